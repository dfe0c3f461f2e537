"""Steps of a dump as a recipe names them.

PROFILING_MODE and PROFILING_OPTIONS as the documents have them (F-03).
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import load_recipe
from pipeline.config.inspection_specs import MAX_DUMPED, parse_profiling_variables, parse_steps
from pipeline.core.errors import RecipeError


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("0", (0,)),
        ("10|0|5", (0, 5, 10)),
        ("5-8", (5, 6, 7, 8)),
        (" 7 | 5-8 |5", (5, 6, 7, 8)),
        ("3-3", (3,)),
    ],
)
def test_steps_are_sorted_and_unique(text: str, steps: tuple[int, ...]) -> None:
    assert parse_steps(text) == steps


@pytest.mark.medium
@given(steps=st.sets(st.integers(0, 10**9 - 1), min_size=1, max_size=20))
def test_list_of_steps_is_parsed(steps: set[int]) -> None:
    assert parse_steps("|".join(map(str, steps))) == tuple(sorted(steps))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be steps such as"),
        ("5,6", "not '5,6'"),
        ("-1", "not '-1'"),
        ("1" * 10, "not '1111111111'"),
        ("8-5", "8-5: must not end before its first step"),
        (f"0-{MAX_DUMPED}", "must be at most 10,000 steps"),
        ("0-9999|10000-19998", "19,999 steps or more; must be at most 10,000"),
    ],
)
def test_invalid_steps_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_steps(text)


@pytest.mark.medium
def test_documented_options_become_keys() -> None:
    options = {
        "output": "/tmp/it's here",
        "training_trace": "on",
        "task_trace": "off",
        "aicpu": "on",
        "fp_point": "",
        "bp_point": "dot.2",
        "aic_metrics": "PipeUtilization",
    }
    environment = {"PROFILING_MODE": "true", "PROFILING_OPTIONS": json.dumps(options)}
    spec = load_recipe("lenet5_digits", parse_profiling_variables(environment)).profile
    assert (spec.mode, str(spec.output)) == ("on", "/tmp/it's here")
    assert (spec.training_trace, spec.task_trace, spec.aicpu) == (True, False, True)
    assert (spec.fp_point, spec.bp_point) == (None, "dot.2")


def test_options_without_mode_have_no_effect() -> None:
    assert parse_profiling_variables({}) == []
    assert parse_profiling_variables({"PROFILING_MODE": "false", "PROFILING_OPTIONS": "{"}) == []
    assert parse_profiling_variables({"PROFILING_MODE": "true"}) == ["profile.mode=on"]


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"PROFILING_MODE": "yes"}, "PROFILING_MODE = 'yes': must be true or false"),
        (
            {"PROFILING_MODE": "true", "PROFILING_OPTIONS": "{"},
            "PROFILING_OPTIONS = '{': must be JSON",
        ),
        ({"PROFILING_MODE": "true", "PROFILING_OPTIONS": "[]"}, "must be an object"),
        (
            {"PROFILING_MODE": "true", "PROFILING_OPTIONS": '{"fp_pont": "a"}'},
            "PROFILING_OPTIONS.fp_pont: there is no such option; did you mean fp_point?",
        ),
        (
            {"PROFILING_MODE": "true", "PROFILING_OPTIONS": '{"aicpu": 7}'},
            "PROFILING_OPTIONS.aicpu = 7: must be on or off",
        ),
        (
            {"PROFILING_MODE": "true", "PROFILING_OPTIONS": '{"aic_metrics": "Pipes"}'},
            "aic_metrics = Pipes: must be one of PipeUtilization",
        ),
    ],
)
def test_invalid_options_are_refused(environment: dict[str, str], problem: str) -> None:
    with pytest.raises(RecipeError) as refused:
        parse_profiling_variables(environment)
    assert problem in str(refused.value)


@pytest.mark.medium
@pytest.mark.parametrize("steps", [19, 201])
def test_trace_must_have_20_to_200_steps(steps: int) -> None:
    with pytest.raises(RecipeError, match=r"profile\.steps"):
        load_recipe("lenet5_digits", [f"profile.steps={steps}"])
