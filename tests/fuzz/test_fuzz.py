"""The short fuzz run: some hundred cases of every kind; `python -m tests.fuzz` is the long one."""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.core.errors import DataError, PipelineError, RecipeError
from tests.fuzz.__main__ import format_table, plan_cases
from tests.fuzz.kinds import KINDS, split_cases
from tests.fuzz.mutate import mutate_bytes, mutate_tree, nudge_tree
from tests.fuzz.outcomes import DEFECTS, judge
from tests.fuzz.recipe_kinds import check_recipe_tree, prepare
from tests.fuzz.workers import run_case

LEFT_OUT = frozenset({"recipe, trained", "command", "command, in process"})
"""Kinds that take seconds a case."""
FEW = frozenset({"recipe file", "component file", "overrides", "recipe, built", "checkpoint"})


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> None:
    prepare()


# What orbax leaves unfinished, where it is stopped by a damaged file, is told when it is collected.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LEFT_OUT])
def test_fuzz_cases_have_no_defects(kind: str) -> None:
    for case in plan_cases(4 if kind in FEW else 25, 0, [kind]):
        judged = run_case(case)
        assert judged.outcome not in DEFECTS, f"{case}: {judged.outcome}\n{judged.detail}"


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False))
def test_every_change_of_a_recipe_is_reported(rng: Random) -> None:
    """The same generators, drawn from and shrunk by hypothesis."""
    with tempfile.TemporaryDirectory() as folder, suppress(RecipeError):
        check_recipe_tree(rng, Path(folder))


@pytest.mark.medium
def test_cases_are_distributed_and_reproducible() -> None:
    counts = split_cases(20_000, list(KINDS))
    assert sum(counts.values()) == 20_000
    assert min(counts.values()) >= 5
    cases = plan_cases(60, 5, ["idx", "records"])
    assert (len(cases), {case.kind for case in cases}) == (60, {"idx", "records"})
    assert [case.random().random() for case in cases] == [c.random().random() for c in cases]
    assert len({case.random().random() for case in cases}) == 60


def raising(error: BaseException) -> str:
    def act(rng: Random, folder: Path) -> None:
        raise error

    with tempfile.TemporaryDirectory() as folder:
        return judge(act, Random(0), Path(folder), 5.0).outcome


@pytest.mark.medium
def test_outcomes_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert raising(RecipeError(["x"])) == "recipe error"
    assert raising(DataError("x")) == "data error"
    assert raising(PipelineError("x")) == "run error"
    assert raising(SystemExit(2)) == "recipe error"
    assert raising(ValueError("x")) == "traceback"
    assert raising(PipelineError("\n" * 200)) == "unclear message"

    def endless(rng: Random, folder: Path) -> None:
        while True:
            pass

    def untidy(rng: Random, folder: Path) -> None:
        (folder / "x.part").write_text("")

    def unfinished(rng: Random, folder: Path) -> None:
        (folder / "recipe.yaml").write_text("")

    assert judge(endless, Random(0), tmp_path, 0.05).outcome == "hang"
    assert judge(unfinished, Random(0), tmp_path, 5.0).outcome == "partial output"
    (tmp_path / "recipe.yaml").unlink()
    assert judge(untidy, Random(0), tmp_path, 5.0).outcome == "partial output"


def test_table_totals_add_up() -> None:
    lines = format_table(
        {"a": Counter({"success": 2}), "b": Counter({"data error": 3})}
    ).splitlines()
    assert lines[0].startswith("| kind | cases | success | recipe error | data error |")
    assert lines[-1].startswith("| all | 5 | 2 | 0 | 3 | 0 |")


@given(rng=st.randoms(use_true_random=False), content=st.binary(max_size=64))
@settings(max_examples=50, deadline=None)
def test_changes_leave_their_input_unchanged(rng: Random, content: bytes) -> None:
    tree = {"a": [1, 2.5, None, {"b": "x"}], "c": True}
    assert isinstance(mutate_bytes(rng, content), bytes)
    mutate_tree(rng, tree)
    nudge_tree(rng, tree)
    assert tree == {"a": [1, 2.5, None, {"b": "x"}], "c": True}
