"""Estimate: price the step on an emulated device, before anything is compiled or run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.autosink.choose_sink import chooses_sink, modelled_chooser
from pipeline.backends.base import Backend, Estimate, StepToPrice
from pipeline.config.recipe import Recipe, TrainSpec
from pipeline.data.dataset import Dataset
from pipeline.data.order import Batching
from pipeline.observe.reporter import Reporter
from pipeline.sink.schedule import total_steps
from pipeline.stages.build import Built
from pipeline.training.step import image_shape, make_update_only_step


def estimate_cost(
    recipe: Recipe,
    dataset: Dataset,
    built: Built,
    backend: Backend,
    run_dir: Path,
    reporter: Reporter,
) -> Estimate | None:
    """Price the run on the device, report the estimate and write its files.

    Returns None on devices that are not emulated. Raises RunError where the run doesn't fit the
    device, RecipeError for what the device can't do.
    """
    with reporter.clock(f"pricing {recipe.model.name}"):
        estimate = backend.estimate(propose(recipe, dataset, built))
    if estimate is None:
        return None
    reporter.say(str(estimate))
    files = estimate.save(run_dir)
    reporter.stage("modelled", f"{', '.join(files)} in {run_dir}")
    return estimate


def propose(recipe: Recipe, dataset: Dataset, built: Built) -> StepToPrice:
    """Describe the run to the device, in shapes: batches as the map ops on the host leave them."""
    image, label = image_shape(dataset.image), dataset.train_label

    def batch(size: int) -> tuple[Any, Any]:
        return (
            jax.ShapeDtypeStruct((size, *image), np.float32),
            jax.ShapeDtypeStruct((size, *label.shape), label.dtype),
        )

    train, run_schedule = recipe.train, built.run_schedule
    size = train.sink_size
    return StepToPrice(
        name=recipe.name,
        step=make_update_only_step(built.parts, train.optimizer.lr),
        state=built.state,
        batch=batch,
        batch_size=train.batch_size,
        sink=train.sink,
        sink_steps=size if isinstance(size, int) and size > 0 else run_schedule.steps_per_pass,
        total_steps=partial(steps_on, recipe.train, dataset.train_order),
        eager=train.mode == "eager",
        choose_sink=modelled_chooser(recipe, run_schedule) if chooses_sink(recipe) else None,
    )


def steps_on(train: TrainSpec, order: Batching, devices: int) -> int | None:
    """Return the length of a run in steps where `devices` devices share the data (X-02).

    `train.batch_size` is the batch of one device, as in MindSpore's scripts, so a pass over the
    data is as many times shorter; a length in steps stays. None where a pass has no batch.
    """
    if devices == 1:
        return total_steps(train, order.steps_per_pass)
    shards = order.num_shards * devices
    try:
        share = Batching(
            order.samples, order.batch_size, order.drop_remainder, order.repeat, shards
        )
    except ValueError:
        return train.steps
    return total_steps(train, share.steps_per_pass)
