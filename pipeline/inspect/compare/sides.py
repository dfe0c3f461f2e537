"""The two sides of a comparison: their recipes, and the computation of one step on both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from pipeline.checkpoint.checkpoint_folder import FOLDER, list_saved_steps
from pipeline.checkpoint.restore import join_problems
from pipeline.config.compose import compose_and_check
from pipeline.config.inspection_specs import What
from pipeline.config.overrides import get_key
from pipeline.core.errors import DataError, first_line
from pipeline.core.files.name_text import find_nearest
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.core.reporter import Reporter
from pipeline.inspect.compare.layer_errors import ForcedComparison, ReferenceStep
from pipeline.inspect.compare.tensor_rows import (
    Mapped,
    TensorRow,
    TensorSide,
    Thresholds,
    compare_arrays,
    compare_tensors,
    require_mapped,
)
from pipeline.inspect.dumps.dump_files import DATA, is_selected, named_tensors, require_layers
from pipeline.inspect.dumps.dump_step import CapturedStep, capture_step
from pipeline.inspect.dumps.layer_programs import Weights, layer_kinds
from pipeline.inspect.dumps.opened_recipe import (
    OpenedRecipe,
    logged_loss,
    open_recipe,
)
from pipeline.inspect.replay import (
    Replay,
    RunAtStep,
    find_last_step,
    mark,
    replay_state,
)
from pipeline.stages.record.run_directory import RECIPE, describe_missing_run
from pipeline.stages.record.trained_run import read_run_recipe
from pipeline.training.features.loss_scales import LossScaling, ScaledLoss

LOWERING_KEYS = ("autotune", "device", "model", "dataset", "train.precision", "train.to_float")
"""Keys on which the recorded lowerings of a run depend."""
RESTORE = "checkpoint.restore"


@dataclass(frozen=True, eq=False)
class Side:
    """An opened recipe, and its run if it has one; `changed` are the overrides of `--against`."""

    name: str
    opened: OpenedRecipe
    run_dir: Path | None = None
    changed: tuple[str, ...] = ()


def open_run_side(run_dir: Path) -> Side:
    """Open a run. Raises DataError if it isn't one."""
    if not (run_dir / RECIPE).is_file():
        raise DataError(describe_missing_run(run_dir))
    return Side(str(run_dir), open_recipe(read_run_recipe(run_dir), run_dir), run_dir)


def open_recipe_side(overrides: Sequence[str]) -> Side:
    """Open the recipe that overrides compose, as on the command line. Raises RecipeError."""
    recipe = compose_and_check(overrides)
    return Side(recipe.name, open_recipe(recipe))


def open_changed_side(side: Side, overrides: Sequence[str], changes: Sequence[str]) -> Side:
    """Open a side with changes, with the run's lowerings unless they depend on a changed key."""
    if side.run_dir is not None:
        recipe = read_run_recipe(side.run_dir, changes)
    else:
        recipe = compose_and_check([*overrides, *changes])
    keys = [get_key(change) for change in changes]
    keeps_lowerings = not any(
        key == prefix or key.startswith(f"{prefix}.") for key in keys for prefix in LOWERING_KEYS
    )
    opened = open_recipe(recipe, side.run_dir if keeps_lowerings else None)
    return Side(f"{side.name} with {' '.join(changes)}", opened, side.run_dir, tuple(changes))


@dataclass(frozen=True)
class StepComparison:
    """Two computations of one step from one state and one batch."""

    step: int
    left_loss: float | None
    """None if the left side can compute only single layers."""
    right_loss: float
    run_loss: float | None
    rows: tuple[TensorRow, ...]
    """Tensors of both sides, each computed from the layers before it, so that errors add up."""
    forced: ForcedComparison
    """Layers of the left side, each computed from the inputs of the right side's layer."""
    notes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    """Promises of the replay that are gone, so that figures are approximate."""


@dataclass(frozen=True)
class CompareRequest:
    """The step to compare, and the output of its tensors."""

    step: int | None
    """Number of steps before it; None: the right side's newest checkpoint, its last step if it has
    none, or 0 without a run."""
    layers: tuple[str, ...]
    """Glob patterns of layers; empty for all layers."""
    what: What
    """Whether to compare inputs of layers, outputs or all tensors."""
    mapped: Mapped
    """The right side's layers for each layer of the left side."""
    limits: Thresholds
    out: Path | None
    """CSV file for all rows."""
    approximate: bool = False
    """Whether to go on if the state of the run can't be had to the bit."""


def compare_step(
    left: Side, right: Side, request: CompareRequest, reporter: Reporter
) -> StepComparison:
    """Compute and compare a step from the right side's state. Raises DataError and RecipeError."""
    _require_same_network(left, right)
    layers = layer_kinds(right.opened.built)
    require_layers(request.layers, list(layers), "--layers")
    # Both sides have the same layers.
    require_mapped(request.mapped, list(layers), list(layers))
    loaded = open_side(right, request, reporter)
    step = loaded.step
    batch = right.opened.batch(step)
    weights = Weights.of(loaded.state)
    right_programs = right.opened.programs(step)
    left_programs = left.opened.programs(step)
    reference = ReferenceStep(right_programs, capture_step(right_programs, weights, batch, step))
    left_weights = _choose_left_weights(left, right, weights)
    notes = []
    left_step = None
    try:
        left_step = capture_step(left_programs, left_weights, batch, step)
    except (ValueError, TypeError) as error:
        notes.append(f"the left side can't be computed as a whole: {first_line(error)}")
    rows = [] if left_step is None else _compare_tensors(left_step, reference.step, request)
    if left.run_dir is not None and not left.changed:
        notes.append(_describe_weight_distance(left, left.run_dir, step, weights))
    if left_step is not None:
        notes += _describe_unequal_inputs(left_step.inputs, reference.step.inputs)
    forced = reference.compare(left_programs, left_weights)
    errors = [error for error in forced.errors if is_selected(error.name, request.layers, "all")]
    run_loss = None if right.run_dir is None else logged_loss(right.run_dir, step)
    return StepComparison(
        step,
        None if left_step is None else left_step.merge_passes().loss,
        reference.step.merge_passes().loss,
        run_loss,
        tuple(rows),
        ForcedComparison(errors),
        tuple(notes),
        loaded.lost,
    )


def capture_tensors(side: Side, request: CompareRequest, reporter: Reporter) -> TensorSide:
    """Compute the step of one side that is requested. Raises DataError, RunError."""
    loaded = open_side(side, request, reporter)
    step = loaded.step
    weights = Weights.of(loaded.state)
    captured = capture_step(side.opened.programs(step), weights, side.opened.batch(step), step)
    tensors = captured.merge_passes()
    arrays = dict(named_tensors(tensors, captured.inputs))
    text = f"step {step} on {side.opened.device_name}, loss {tensors.loss:.8g}"
    about = mark(loaded.lost, text)
    layers = layer_kinds(side.opened.built)
    warning = mark(loaded.lost, "; ".join(loaded.lost)) or None
    return TensorSide(side.name, about, layers, list(arrays), arrays.get, warning)


def _require_same_network(left: Side, right: Side) -> None:
    """Raise DataError, with the first differences, if layers or parameters differ."""
    left_kinds = layer_kinds(left.opened.built)
    right_kinds = layer_kinds(right.opened.built)
    problems = [
        f"{path} is only on the left side" for path in left_kinds if path not in right_kinds
    ]
    for path in right_kinds:
        if path not in left_kinds:
            guess = find_nearest(path, left_kinds)
            hint = f" (the left side has {guess})" if guess else ""
            problems.append(f"{path} is only on the right side{hint}")
    problems += [
        f"{path} is {left_kinds[path]} on the left, {right_kinds[path]} on the right"
        for path in left_kinds
        if path in right_kinds and left_kinds[path] != right_kinds[path]
    ]
    left_shapes, right_shapes = (
        {path: leaf.shape for path, leaf in flatten_by_path(side.opened.built.state.params).items()}
        for side in (left, right)
    )
    if not problems:
        problems = [
            f"{path} has shape {left_shape} on the left, {right_shape} on the right"
            for path in {**left_shapes, **right_shapes}
            if (left_shape := left_shapes.get(path)) != (right_shape := right_shapes.get(path))
        ]
    if problems:
        raise DataError(
            f"{left.name} and {right.name}: have different networks: {join_problems(problems)}"
        )


def open_side(side: Side, request: CompareRequest, reporter: Reporter) -> RunAtStep:
    """Open a side at the step that is requested, or that None stands for.

    Raises DataError for a step that it doesn't have or data that have changed, RunError if a run's
    state can't be had.
    """
    step = request.step
    if side.run_dir is None:
        if step:
            raise DataError(
                f"--step {step}: must be 0 for a recipe without a run, which has no later state"
            )
        return RunAtStep(side.opened, 0, jax.tree.map(np.array, side.opened.fresh_state()))
    if step is None:
        step = max(list_saved_steps(side.run_dir / FOLDER), default=find_last_step(side.run_dir))
    with Replay(side.opened, side.run_dir, reporter, request.approximate) as replay:
        replay.require_steps([step])
        replay.require_data()
        return RunAtStep(side.opened, step, replay.go_to(step), tuple(replay.lost))


def _get_scaling(side: Side) -> LossScaling:
    feature = side.opened.built.step_config.find(ScaledLoss)
    assert feature is not None, "steps of recipes have a loss scale"
    return feature.scaling


def _choose_left_weights(left: Side, right: Side, weights: Weights) -> Weights:
    """Return the weights that the left side restores, else `weights` with the left loss scale."""
    if any(get_key(change) == RESTORE for change in left.changed):
        return Weights.of(jax.tree.map(np.array, left.opened.fresh_state()))
    left_scale = _get_scaling(left)
    if left_scale == _get_scaling(right):
        return weights
    return replace(weights, loss_scale=np.float32(left_scale.initial))


def _describe_unequal_inputs(
    left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]
) -> Iterator[str]:
    """Yield a note for each array that the networks read and that isn't equal."""
    for name, array in right.items():
        other = left.get(name)
        if other is None:
            yield f"the left network doesn't read {name}"
        elif not np.array_equal(other, array):
            column = f" {name}" if len(right) > 1 else ""
            distance = compare_arrays(other, array).relative_euclidean
            yield (
                f"the data differ before the network: {DATA}{column} has a relative Euclidean "
                f"distance of {distance:.3g}"
            )


def _compare_tensors(
    left_step: CapturedStep, reference: CapturedStep, request: CompareRequest
) -> list[TensorRow]:
    left, right = (
        {
            name: array
            for name, array in named_tensors(step.merge_passes(), step.inputs)
            if is_selected(name, request.layers, request.what)
        }
        for step in (left_step, reference)
    )
    return compare_tensors(list(left), list(right), left.get, right.get, request.mapped)


def _describe_weight_distance(left: Side, run_dir: Path, step: int, weights: Weights) -> str:
    """Describe the distance of the left run's weights from the weights that both sides use."""
    if step not in list_saved_steps(run_dir / FOLDER):
        return f"{left.name} has no checkpoint of step {step}: its weights are not compared"
    left_weights = Weights.of(replay_state(left.opened, run_dir, step, Reporter()))
    left_params = flatten_by_path(left_weights.params)
    right_params = flatten_by_path(weights.params)
    squares = [
        float(np.square(np.subtract(array, right_params[path], dtype=np.float64)).sum())
        for path, array in left_params.items()
    ]
    norm = sum(float(np.square(array, dtype=np.float64).sum()) for array in right_params.values())
    distance = (sum(squares) / norm) ** 0.5 if norm else 0.0
    worst = max(zip(squares, left_params, strict=True), default=(0.0, ""))[1]
    if distance == 0:
        return "the weights of both runs are equal"
    return (
        f"the weights of the runs are {distance:.3g} apart (relative Euclidean distance), {worst} "
        "most; both sides are computed with the weights of the right side"
    )
