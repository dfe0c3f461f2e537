"""The section `profile` of a recipe, and MindSpore's environment variables for profiling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, NonNegativeInt

from pipeline.config.overrides import quote_value
from pipeline.core.errors import RecipeError
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.core.files.value_text import show
from pipeline.core.registry import FilePath, Spec

MODE = "PROFILING_MODE"
OPTIONS = "PROFILING_OPTIONS"
LEAST_STEPS = 20
MOST_STEPS = 200
SWITCHES = ("training_trace", "task_trace", "aicpu")
"""Options of PROFILING_OPTIONS that are on or off."""
TEXTS = ("output", "fp_point", "bp_point", "aic_metrics")
"""Options of PROFILING_OPTIONS that are texts."""


class ProfileSpec(Spec):
    """Profiling: which steps are traced, and which tables are written."""

    mode: Annotated[
        Literal["off", "on", "only"],
        # YAML reads an unquoted `off` as false, and `on` as true.
        BeforeValidator(lambda mode: ("on" if mode else "off") if isinstance(mode, bool) else mode),
    ]
    """on: trace some steps of the run; only: end training after the traced steps, as the command
    `profile` does."""
    start: NonNegativeInt | None
    """Steps before the first traced step; null: until the run is warm."""
    steps: Annotated[int, Field(ge=LEAST_STEPS, le=MOST_STEPS)] | None
    """Traced steps, 20 to 200; null: 60, fewer if a step has many operations or takes long."""
    output: FilePath | None
    """Folder of the profile; null: `profile` in the run directory."""
    training_trace: bool
    """Write the iteration trace: the ends of forward and backward passes, and tails."""
    task_trace: bool
    """Write the table of operators."""
    aicpu: bool
    """Count operators that run on the host's CPU: calls of Python."""
    fp_point: str | None
    """Operator at which the forward pass begins; null: its first operator."""
    bp_point: str | None
    """Operator at which the backward pass ends; null: its last operator."""
    aic_metrics: Literal[
        "PipeUtilization",
        "ArithmeticUtilization",
        "Memory",
        "MemoryL0",
        "MemoryUB",
        "ResourceConflictRatio",
        "L2Cache",
    ]
    """Counters of an Ascend core. In every mode, the emulated Ascend has shares of its pipes, and
    other devices have shares of their peak rates."""


METRICS: tuple[str, ...] = get_args(ProfileSpec.model_fields["aic_metrics"].annotation)


def parse_profiling_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the overrides for PROFILING_MODE and PROFILING_OPTIONS in the environment.

    Options are ignored unless the mode is true, as in MindSpore. Raises RecipeError for a mode that
    is neither true nor false, for options that aren't a JSON object, and for unknown options.
    """
    mode = environment.get(MODE, "").strip().lower()
    if mode not in ("", "true", "false"):
        raise RecipeError([f"{MODE} = {show(environment[MODE])}: must be true or false"])
    if mode != "true":
        return []
    text = environment.get(OPTIONS, "").strip() or "{}"
    try:
        options = json.loads(text)
    except ValueError as error:
        raise RecipeError([f"{OPTIONS} = {show(text)}: must be JSON: {error}"]) from error
    if not isinstance(options, dict):
        raise RecipeError([f"{OPTIONS} = {show(text)}: must be an object, {{...}}"])
    problems: list[str] = []
    overrides = ["profile.mode=on"]
    for name, value in options.items():
        key = f"{OPTIONS}.{name}"
        if name in SWITCHES:
            switch = {"on": "true", "off": "false"}.get(str(value).lower(), str(value).lower())
            overrides.append(f"profile.{name}={switch}")
            if switch not in ("true", "false"):
                problems.append(f"{key} = {show(value)}: must be on or off")
        elif name not in TEXTS:
            problems.append(f"{key}: {explain_unknown_name('option', name, (*SWITCHES, *TEXTS))}")
        elif not isinstance(value, str):
            problems.append(f"{key} = {show(value)}: must be text")
        elif name == "aic_metrics" and value not in METRICS:
            problems.append(f"{key} = {show(value)}: must be one of {', '.join(METRICS)}")
        elif value:
            # An empty text is left out, so that the profiler chooses, as in MindSpore.
            overrides.append(f"profile.{name}={quote_value(value)}")
    if problems:
        raise RecipeError(problems)
    return overrides
