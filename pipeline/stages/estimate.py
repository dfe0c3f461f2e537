"""Estimate: what an emulated device says of the step, before anything is compiled or run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.backends.base import Backend, Estimate, Proposal
from pipeline.config.recipe import Recipe
from pipeline.observe.reporter import Reporter
from pipeline.stages.build import Built
from pipeline.stages.data import Dataset
from pipeline.stages.sinking import chooses_sink, modelled_chooser
from pipeline.training.step import image_shape, make_bare_step


def estimate_run(
    recipe: Recipe,
    dataset: Dataset,
    built: Built,
    backend: Backend,
    run_dir: Path,
    reporter: Reporter,
) -> Estimate | None:
    """Ask the device what the run would cost, tell the user and keep the answer.

    None on devices that are not emulated. Raises RunError where the run doesn't fit the device,
    RecipeError for what the device can't be asked to do.
    """
    with reporter.clock(f"pricing {recipe.model.name}"):
        estimate = backend.estimate(propose(recipe, dataset, built))
    if estimate is None:
        return None
    reporter.say(str(estimate))
    files = estimate.save(run_dir)
    reporter.stage("modelled", f"{', '.join(files)} in {run_dir}")
    return estimate


def propose(recipe: Recipe, dataset: Dataset, built: Built) -> Proposal:
    """The run in shapes, as the map ops on the host leave its batches."""
    image, label = image_shape(dataset.image), dataset.train_label

    def batch(size: int) -> tuple[Any, Any]:
        return (
            jax.ShapeDtypeStruct((size, *image), np.float32),
            jax.ShapeDtypeStruct((size, *label.shape), label.dtype),
        )

    train, course = recipe.train, built.course
    size = train.sink_size
    return Proposal(
        name=recipe.name,
        step=make_bare_step(built.parts, train.optimizer.lr),
        state=built.state,
        batch=batch,
        batch_size=train.batch_size,
        sink=train.sink,
        sink_steps=size if isinstance(size, int) and size > 0 else course.steps_per_pass,
        total_steps=course.total,
        eager=train.mode == "eager",
        choose_sink=modelled_chooser(recipe, course) if chooses_sink(recipe) else None,
    )
