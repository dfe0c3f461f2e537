"""The sections `dump`, `receipt` and `profile` of a recipe: what is examined of which steps.

MindSpore's environment variables for profiling are read as `profile`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt

from pipeline.config.overrides import quote_value
from pipeline.core.errors import RecipeError
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.core.files.value_text import show
from pipeline.core.registry import FilePath, Seq, Spec

MAX_DUMPED = 10_000
"""A run dumps at most this many steps."""
_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")

What = Literal["input", "output", "all"]
Content = Literal["statistics", "tensors"]
MODE = "PROFILING_MODE"
OPTIONS = "PROFILING_OPTIONS"
"""MindSpore's environment variables for profiling."""
LEAST_STEPS = 20
MOST_STEPS = 200
"""Least and most steps that a profile traces."""
SWITCHES = ("training_trace", "task_trace", "aicpu")
"""Options of PROFILING_OPTIONS that are on or off."""
TEXTS = ("output", "fp_point", "bp_point", "aic_metrics")
"""Options of PROFILING_OPTIONS that are texts."""


def parse_steps(text: str) -> tuple[int, ...]:
    """Return the steps of a text such as `0|5|10`, `5-10` or `0|5-10`, ascending.

    Raises ValueError for any other text, and for more than `MAX_DUMPED` steps.
    """
    steps: set[int] = set()
    for part in text.split("|"):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"must be steps such as 0|5|10 or 5-10, not {part!r:.40}")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"{part}: must not end before its first step")
        if last - first >= MAX_DUMPED:
            raise ValueError(f"{part}: must be at most {MAX_DUMPED:,} steps")
        steps.update(range(first, last + 1))
        if len(steps) > MAX_DUMPED:
            raise ValueError(f"{len(steps):,} steps or more; must be at most {MAX_DUMPED:,}")
    return tuple(sorted(steps))


def _require_steps(text: str) -> str:
    """Return `text`. Raises ValueError if `parse_steps` can't read it."""
    parse_steps(text)
    return text


Steps = Annotated[
    str,
    # YAML reads 500 as a number.
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    AfterValidator(_require_steps),
]
"""Numbers of finished steps, such as `0|5|10` or `5-10`; 0 is before the first step."""


class DumpSpec(Spec):
    """Dumps during a run. A dump after N steps has the tensors of the step that follows."""

    steps: Steps | None
    """Numbers of steps done, such as 0|5|10 or 5-10; null: no dump. Sinks are split there."""
    layers: Seq[str]
    """Patterns of layers, such as conv_*; [] for all."""
    what: What
    """input: the inputs of a layer in the forward and the backward pass; output: its results in
    both; all: inputs and outputs."""
    content: Content
    """tensors: whole arrays as .npy files; statistics: their minimum, maximum, mean and others."""
    path: FilePath | None
    """An existing folder; null: `dump` in the run directory."""
    max_mib: Annotated[PositiveInt, Field(le=1_000_000)]
    """Limit of the arrays of one step, in MiB. Tensors beyond it have only statistics."""


class ReceiptSpec(Spec):
    """Receipts: a chain of digests of the state, of the rows read and of the logged numbers."""

    every_steps: PositiveInt | None
    """Steps between two links of the chain in receipt.jsonl; null: no chain. A link hashes the
    state on the host. Sinks are split there."""


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
    """Counters of an Ascend core. A profile has those of PipeUtilization: shares of the emulated
    chip's pipes, or of another device's peak rates. Others are refused, unless the mode is off."""


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
