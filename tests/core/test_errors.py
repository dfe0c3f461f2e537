from __future__ import annotations

import pytest

from pipeline.core.errors import RecipeError, get_exit_status, get_status_after, limit_lines


def test_recipe_error_has_its_problems() -> None:
    error = RecipeError(["a = 1: wrong", "b = 2: wrong"])
    assert error.problems == ("a = 1: wrong", "b = 2: wrong")
    assert str(error) == "the recipe has 2 problems:\n  a = 1: wrong\n  b = 2: wrong"


@pytest.mark.parametrize(
    ("outcome", "status"),
    [("done", 0), ("pruned", 0), ("stopped", 75), ("failed", 1), ("waiting", 1)],
)
def test_run_outcome_has_an_exit_status(outcome: str, status: int) -> None:
    assert get_exit_status(outcome) == status


def test_requested_exit_is_not_a_failure() -> None:
    asked_for = (KeyboardInterrupt(), SystemExit(3), ValueError("a bug"))
    assert [get_status_after(error) for error in asked_for] == ["stopped", "stopped", "failed"]


def test_omitted_lines_are_counted() -> None:
    assert limit_lines(["a", "b"], 2) == ["a", "b"]
    assert limit_lines([str(n) for n in range(1003)], 1) == ["0", "1,002 more"]
