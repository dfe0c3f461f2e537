"""Dump of one step: its tensors computed from a state, and written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.config.dump_spec import Content, What
from pipeline.config.precision import level_of
from pipeline.config.recipe import Recipe
from pipeline.data.batch import Batch
from pipeline.inspect.dumps.captured_step import capture
from pipeline.inspect.dumps.dump_files import DumpHeader, DumpReport, dump_folder, write_dump
from pipeline.inspect.dumps.layer_programs import LayerPrograms, Weights
from pipeline.inspect.dumps.portions import portions_of
from pipeline.inspect.dumps.tensor_names import is_wanted, named_tensors

TIME = "%Y%m%d%H%M%S"
"""The format of the folder of a dump's time."""


@dataclass(frozen=True)
class DumpRequest:
    """The tensors that a dump is to have, and the folder that dumps go to."""

    root: Path
    time_text: str
    layers: Sequence[str]
    what: What
    content: Content
    limit_bytes: int

    @staticmethod
    def now() -> str:
        """Return the time as a folder is named after it."""
        return time.strftime(TIME)


@dataclass(frozen=True)
class StepInputs:
    """The inputs of the step after `step` steps: the weights after these, and its batch."""

    weights: Weights
    batch: Batch
    step: int


@dataclass(frozen=True)
class DumpedRun:
    """The run of a dumped step."""

    path: str
    device: str
    loss: float | None = None
    """The loss that the run logged for the step, if it is known."""


def dump_step(
    request: DumpRequest,
    recipe: Recipe,
    programs: LayerPrograms,
    inputs: StepInputs,
    run: DumpedRun,
) -> DumpReport:
    """Compute a step and write its tensors.

    Raises nothing for what the system refuses, which is in the report.
    """
    weights = inputs.weights
    step = inputs.step
    portions = portions_of(programs.config, inputs.batch, step)
    first = next(iter(portions))
    forms = programs.forms(weights, first)
    captured = capture(programs, weights, portions)
    tensors = captured.merge_passes()
    header = DumpHeader(
        recipe=recipe.name,
        model=recipe.model.name,
        device=run.device,
        step=step,
        content=request.content,
        loss=tensors.loss,
        run=run.path,
        run_loss=run.loss,
        precision=level_of(recipe),
        layers=[(path, form.kind, form.dtype) for path, form in forms.items()],
    )
    selected = (
        (name, array)
        for name, array in named_tensors(tensors, captured.images)
        if is_wanted(name, request.layers, request.what)
    )
    folder = dump_folder(
        request.root, request.time_text, programs.device.id, recipe.model.name, step
    )
    return write_dump(folder, header, selected, request.limit_bytes)


def loss_check(loss: float, run_loss: float | None) -> str:
    """Return how the loss of a dump compares with the one that the run logged, in words."""
    if run_loss is None:
        return f"loss {loss:.8g}; the run has none of this step"
    dumped = np.float32(loss)
    logged = np.float32(run_loss)
    if dumped == logged:
        return f"loss {loss:.8g}, the run's own, to the bit"
    apart = abs(float(dumped) - float(logged))
    units = apart / float(np.spacing(abs(logged)))
    counted = "unit" if units == 1 else "units"
    return (
        f"loss {loss:.9g}, and the run's {run_loss:.9g}: {apart:.3g} apart, {units:,.0f} {counted} "
        "in the last place"
    )
