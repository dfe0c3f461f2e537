"""Dumps of steps: tensors computed from a state and written, of a saved run or during a run.

They are all tensors of a step, of each portion of the batch and of the whole batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.config.inspection_specs import parse_steps
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import resolve_level
from pipeline.core.errors import PipelineError, RecipeError
from pipeline.core.files.trusted_files import require_real_trees
from pipeline.data.batch import Batch
from pipeline.engine.callbacks.callback import Monitor
from pipeline.inspect.dumps.dump_files import (
    DumpHeader,
    DumpReport,
    add_run_loss,
    dump_folder,
    is_selected,
    named_tensors,
    require_layers,
    write_dump,
)
from pipeline.inspect.dumps.layer_programs import (
    LayerPrograms,
    LayerTensors,
    NumpyArrays,
    Weights,
    layer_kinds,
)
from pipeline.inspect.dumps.portions import Portion, split_batch
from pipeline.stages.record.run_directory import DUMP
from pipeline.stages.runner.context import CompiledRun
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.features.freezing import get_freezing, select_phase
from pipeline.training.state import TrainState
from pipeline.training.telemetry import Telemetry


@dataclass(frozen=True)
class DumpRequest:
    """The run whose steps are dumped, by the section `dump` of its recipe."""

    recipe: Recipe
    run_dir: Path
    device: str
    time_text: str = field(default_factory=lambda: time.strftime("%Y%m%d%H%M%S"))
    """Name of the folder for dumps that begin now."""
    approximate: tuple[str, ...] = ()
    """Promises of a replay that are gone; empty if states have the run's bits."""


def dump_step(
    request: DumpRequest,
    programs: LayerPrograms,
    weights: Weights,
    batch: Batch,
    step: int,
    run_loss: float | None = None,
) -> DumpReport:
    """Compute the step after `step` steps and write its tensors.

    `run_loss` is the loss that the run logged for that step, or None. A full disk raises nothing:
    the report has the reason.
    """
    recipe = request.recipe
    spec = recipe.dump
    captured = capture_step(programs, weights, batch, step)
    tensors = captured.merge_passes()
    header = DumpHeader(
        recipe=recipe.name,
        model=recipe.model.name,
        device=request.device,
        step=step,
        content=spec.content,
        loss=tensors.loss,
        run=str(request.run_dir),
        run_loss=run_loss,
        precision=resolve_level(recipe),
        approximate=request.approximate,
        layers=[(path, form.kind, form.dtype) for path, form in tensors.forms.items()],
    )
    selected = (
        (name, array)
        for name, array in named_tensors(tensors, captured.inputs)
        if is_selected(name, spec.layers, spec.what)
    )
    root = spec.path or request.run_dir / DUMP
    folder = dump_folder(root, request.time_text, programs.device.id, recipe.model.name, step)
    return write_dump(folder, header, selected, spec.max_mib << 20)


def compare_losses(loss: float, run_loss: float | None) -> str:
    """Describe the difference between the loss of a dump and the loss that the run logged."""
    if run_loss is None:
        return f"loss {loss:.8g}; the run has no loss of this step"
    dumped = np.float32(loss)
    logged = np.float32(run_loss)
    if dumped == logged:
        return f"loss {loss:.8g}, the run's own, to the bit"
    difference = abs(float(dumped) - float(logged))
    units = difference / float(np.spacing(abs(logged)))
    noun = "unit" if units == 1 else "units"
    return (
        f"loss {loss:.9g}, the run's is {run_loss:.9g}: {difference:.3g} apart, "
        f"{units:,.0f} {noun} in the last place"
    )


@dataclass
class RunDumps(Monitor):
    """Writes the dumps of a run. It is called with a state and the number of steps done.

    The training program and its inputs are unchanged. If a dump fails, this warns and
    writes no later dump, and the run continues.
    """

    run: CompiledRun
    _programs: dict[int, LayerPrograms] = field(default_factory=dict)
    """Programs by the first step of a phase, each compiled once."""
    _waiting: dict[int, DumpReport] = field(default_factory=dict)
    """Dumps of steps that the run has not done yet."""
    _ended: bool = False

    def __post_init__(self) -> None:
        context = self.run.context
        device = self.run.backend.describe()["device"]
        self._request = DumpRequest(context.recipe, context.run_dir, device)

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of steps done after which a dump is written."""
        steps = self.run.context.recipe.dump.steps
        return parse_steps(steps) if steps else ()

    def require_possible(self) -> None:
        """Raise RecipeError for an unknown layer, a late step, or a network without layers."""
        built = self.run.built
        spec = self.run.context.recipe.dump
        total = built.run_schedule.total
        problems = []
        if max(self.steps) >= total:
            problems.append(
                f"dump.steps = {spec.steps}: must be at most {total - 1:,}, since training has "
                f"{total:,} steps and a dump is of the next step"
            )
        try:
            LayerPrograms(select_phase(built.step_config, 0), self.run.backend.device)
        except ValueError as error:
            problems.append(f"dump.steps: {error}")
        if problems:
            raise RecipeError(problems)
        require_layers(spec.layers, list(layer_kinds(built)), "dump.layers")

    def __call__(self, state: TrainState, step: int) -> None:
        """Dump the step after `step` steps. Raises only PipelineError."""
        if self._ended:
            return
        try:
            with self.run.context.reporter.clock(f"dumping step {step}"):
                report = self._write_dump(state, step)
        except PipelineError:
            raise
        except Exception as error:  # the run matters more than its dump
            self._end_dumps(f"dump of step {step}: {type(error).__name__}: {error}")
            return
        self.run.context.reporter.print_stage("dump", f"step {step}: {report}")
        if report.stopped is not None:
            self._end_dumps(f"dump of step {step} {report.stopped}")
        else:
            self._waiting[step] = report

    def _end_dumps(self, reason: str) -> None:
        self._ended = True
        self.run.context.reporter.warn(f"{reason}; the run continues without later dumps")

    def _write_dump(self, state: TrainState, step: int) -> DumpReport:
        path = self.run.context.recipe.dump.path
        if path is None:
            require_real_trees(self.run.context.run_dir, (DUMP,))
        elif path.exists() and not path.is_dir():
            raise NotADirectoryError(f"dump.path = {path}: must be a folder")
        batch = jax.tree.map(np.array, self.run.executable.loader.read_batch(step + 1))
        step_config = self.run.built.step_config
        device = self.run.backend.device
        starts = [phase.start for phase in get_freezing(step_config).phases if phase.start <= step]
        phase_start = max(starts, default=0)
        if phase_start not in self._programs:
            self._programs[phase_start] = LayerPrograms(select_phase(step_config, step), device)
        programs = self._programs[phase_start]
        return dump_step(self._request, programs, Weights.of(state), batch, step)

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Compare the losses of the run's steps with the dumps' losses."""
        end = telemetry.start + len(telemetry)
        for step in [waiting for waiting in self._waiting if waiting < end]:
            report = self._waiting.pop(step)
            index = step - telemetry.start
            if index < 0:
                continue
            loss = float(telemetry.loss[index])
            text = f"step {step}: {compare_losses(report.loss, loss)}"
            self.run.context.reporter.print_stage("dump", text)
            add_run_loss(report.folder, loss)


class DumpedSteps(RunFeature):
    """The dumps of a run with `dump.steps`; a run in several processes has none."""

    _dumps: RunDumps | None = None

    def check(self, run: CompiledRun) -> None:
        """Raise RecipeError if a dump can't be made."""
        context = run.context
        if context.ranks.size > 1:
            text = "ignored with several processes; the command dump writes one from a checkpoint"
            context.reporter.warn(f"dump.steps = {context.recipe.dump.steps}: {text}")
            return
        self._dumps = RunDumps(run)
        self._dumps.require_possible()

    @property
    def monitors(self) -> Sequence[Monitor]:
        return () if self._dumps is None else (self._dumps,)

    @property
    def state_steps(self) -> Sequence[int]:
        return () if self._dumps is None else self._dumps.steps

    def see_state(self, state: TrainState, step: int) -> None:
        assert self._dumps is not None, "no state is shown without dumps"
        self._dumps(state, step)


@dataclass(frozen=True)
class StepPass:
    """One pass through the network: its inputs and its tensors."""

    weights: Weights
    portion: Portion
    tensors: LayerTensors


@dataclass(frozen=True)
class CapturedStep:
    """The passes of a step: the microbatches of each shard."""

    shards: tuple[tuple[StepPass, ...], ...]

    @property
    def passes(self) -> tuple[StepPass, ...]:
        return tuple(step_pass for microbatches in self.shards for step_pass in microbatches)

    @property
    def inputs(self) -> NumpyArrays:
        """The network's inputs after the map ops, (B, ...) by name; a single one is "0"."""
        parts: list[NumpyArrays] = [
            jax.tree.map(np.asarray, inputs if isinstance(inputs, dict) else {"0": inputs})
            for inputs in (step_pass.portion.inputs for step_pass in self.passes)
        ]
        return _merge_arrays(np.concatenate, parts)

    def merge_passes(self) -> LayerTensors:
        """Join portions, add gradients and losses, and average the shards' statistics."""
        tensors = [step_pass.tensors for step_pass in self.passes]
        statistics = [microbatches[-1].tensors.statistics for microbatches in self.shards]
        return join_passes(tensors, statistics)


def join_passes(passes: Sequence[LayerTensors], statistics: Sequence[NumpyArrays]) -> LayerTensors:
    """Join the tensors of portions; `statistics` are the batch statistics of each shard."""
    if len(passes) == 1:
        return passes[0]
    first = passes[0]
    concatenated: dict[str, Any] = {
        name: _merge_arrays(np.concatenate, [getattr(tensors, name) for tensors in passes])
        for name in ("inputs", "outputs", "input_gradients", "output_gradients")
    }
    return replace(
        first,
        **concatenated,
        parameters=_merge_arrays(
            partial(np.sum, axis=0), [tensors.parameters for tensors in passes]
        ),
        statistics=_merge_arrays(partial(np.mean, axis=0), statistics),
        logits=np.concatenate([tensors.logits for tensors in passes]),
        logits_gradient=np.concatenate([tensors.logits_gradient for tensors in passes]),
        loss=float(np.sum(np.array([tensors.loss for tensors in passes], first.logits.dtype))),
    )


def _merge_arrays(
    combine: Callable[[list[np.ndarray]], Any], parts: Sequence[NumpyArrays]
) -> NumpyArrays:
    return {path: combine([part[path] for part in parts]) for path in parts[0]}


def capture_step(
    programs: LayerPrograms, weights: Weights, batch: Batch, step: int
) -> CapturedStep:
    """Compute the step after `step` steps with the tensors of all layers."""
    shards = []
    for microbatches in split_batch(programs.config, batch, step):
        pass_weights = weights
        passes = list[StepPass]()
        for portion in microbatches:
            tensors = programs.compute_free(pass_weights, portion)
            passes.append(StepPass(pass_weights, portion, tensors))
            pass_weights = pass_weights.replace_statistics(tensors.statistics)
        shards.append(tuple(passes))
    return CapturedStep(tuple(shards))
