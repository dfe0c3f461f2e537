"""PROFILING_MODE and PROFILING_OPTIONS as the documents have them (F-03)."""

from __future__ import annotations

import json

import pytest

from pipeline import load_recipe
from pipeline.config.profile_spec import parse_profiling_variables
from pipeline.core.errors import RecipeError


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
