"""Estimate: price the step on an emulated device before it is compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.backends.base import Backend, Estimate, SinkPrice, StepToPrice
from pipeline.backends.sink_choice import SinkChoice, choose
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import get_sink_steps
from pipeline.core.errors import RecipeError
from pipeline.core.files.value_text import count_noun
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.stages.autosink.choose_sink import make_bounds, make_modelled_costs
from pipeline.stages.build import Built
from pipeline.stages.record.run_directory import RunFolder
from pipeline.stages.runner.context import BuiltRun
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.estimated_step import make_estimated_step
from pipeline.training.features.curvature import LayerCurvature, group_layers
from pipeline.training.parallel.devices import count_batch_parts, count_devices
from pipeline.training.parallel.microbatches import compute_batch_multiple
from pipeline.training.state import count_bytes
from pipeline.training.step import compute_gradients, mask_batch
from pipeline.training.update import shape_batch


def estimate_cost(
    recipe: Recipe,
    dataset: Dataset,
    built: Built,
    backend: Backend,
    folder: RunFolder,
    reporter: Reporter,
) -> Estimate | None:
    """Price the run on the device and report the estimate. An accepted run writes its files.

    Returns None on devices that aren't emulated. Raises RunError if the run doesn't fit the device,
    RecipeError if the device doesn't support it.
    """
    with reporter.clock(f"pricing {recipe.model.name}"):
        estimate = backend.estimate(describe_step(recipe, dataset, built))
    if estimate is None:
        return None
    reporter.print_lines(str(estimate))
    report_shardings(recipe, dataset, built, reporter)

    def save() -> None:
        files = estimate.save(folder.path)
        reporter.print_stage("modelled", f"{', '.join(files)} in {folder.path}")

    folder.accepted.add(save)
    return estimate


def report_shardings(recipe: Recipe, dataset: Dataset, built: Built, reporter: Reporter) -> None:
    """Report what the estimate leaves out of parallel modes other than data parallelism."""
    mode = recipe.parallel.mode
    if mode in ("none", "data"):
        return
    # Imported here, since few recipes shard parameters.
    from pipeline.stages.plan_devices import describe_gathering, describe_shardings

    if mode == "fsdp":
        reporter.print_stage("modelled", describe_gathering(recipe, built))
    else:
        devices = count_noun(_count_priced_devices(recipe), "device")
        text = f"parallel.mode = {mode}: the estimate is that of mode data on {devices}"
        reporter.print_stage("modelled", text)
        reporter.print_stage("modelled", describe_shardings(recipe, dataset, built))


def describe_step(recipe: Recipe, dataset: Dataset, built: Built) -> StepToPrice:
    """Return the description of a run by which a device prices it, with shapes for arrays."""
    train = recipe.train
    run_schedule = built.run_schedule
    make_batch = partial(shape_batch, dataset.inputs, dataset.train_label)

    def choose_modelled_sink(price: SinkPrice) -> SinkChoice:
        return choose(make_modelled_costs(price), make_bounds(recipe, run_schedule))

    return StepToPrice(
        name=recipe.name,
        step=make_estimated_step(built.step_config, _make_rates(built, train.optimizer.lr)),
        state=built.state,
        batch=make_batch,
        batch_size=train.batch_size,
        devices=_count_priced_devices(recipe),
        sink=train.sink,
        sink_steps=get_sink_steps(train) or run_schedule.steps_per_epoch,
        steps_per_epoch=run_schedule.steps_per_epoch,
        total_steps=run_schedule.total,
        eager=train.mode == "eager",
        keep_batchnorm_fp32=bool(train.keep_batchnorm_fp32),
        choose_sink=choose_modelled_sink if train.chooses_sink else None,
        is_batch_per_device=recipe.parallel.batch_per_device is not None,
        shares_state=recipe.parallel.mode == "fsdp",
        exchange_bytes=_count_exchange_bytes(built, make_batch(train.batch_size)),
    )


def _make_rates(built: Built, rate: float) -> Any:
    """Return the rate of a step, or with rate groups (1 + groups,)."""
    shape = built.learning_rates.shape[1:]
    return jnp.full(shape, rate) if shape else rate


def _count_exchange_bytes(built: Built, batch: tuple[Any, Any]) -> tuple[int, ...]:
    """Return the bytes that devices exchange of each layer group's curvature; () without it."""
    config = built.step_config
    feature = config.find(LayerCurvature)
    if feature is None:
        return ()

    def sum_layers(state: Any, batch: tuple[Any, Any]) -> Any:
        inputs, labels = batch
        count = labels.shape[0]
        mapped = mask_batch(inputs, labels, count, jax.random.key(0))
        return compute_gradients(config, state, mapped, count, 1.0).sums[feature.name]

    layers = jax.eval_shape(sum_layers, built.state, batch)
    return tuple(
        count_bytes([layers[path].moments for path in group])
        for group in group_layers(feature.rule, layers)
    )


def _count_priced_devices(recipe: Recipe) -> int:
    """Return the number of devices that share a batch: all, or if they can't, those along the
    batch axes. Raises RecipeError if these can't either."""
    if recipe.parallel.mode == "none":
        return 1
    devices = count_devices(recipe.parallel, jax.process_count())
    size = recipe.train.batch_size
    if size % compute_batch_multiple(recipe.train.accumulate_steps, devices):
        devices = count_batch_parts(recipe.parallel, jax.process_count())
    if size % devices:
        problem = f"must be a multiple of the {devices} devices of the estimate"
        raise RecipeError(f"train.batch_size = {size}: {problem}")
    microbatches = recipe.train.accumulate_steps
    if size % compute_batch_multiple(microbatches, devices):
        problem = f"must divide the {size // devices} samples that each of {devices} devices has"
        raise RecipeError(f"train.accumulate_steps = {microbatches}: {problem}")
    return devices


class ModelledTimes(RunFeature):
    """The estimate of a run on an emulated device."""

    def price(self, built_run: BuiltRun) -> Estimate | None:
        """Price the step and report the estimate."""
        context = built_run.context
        estimate = estimate_cost(
            built_run.recipe,
            built_run.dataset,
            built_run.built,
            built_run.backend,
            context.folder,
            context.reporter,
        )
        if estimate is not None:
            context.summary.modelled = dict(estimate.summary())
        return estimate
