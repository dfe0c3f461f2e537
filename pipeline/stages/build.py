"""Build: network, loss, optimizer and schedule become the pure functions of a training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from pipeline.config.recipe import COMPUTE_DTYPES, Recipe
from pipeline.data.random import seed_words
from pipeline.errors import RecipeError
from pipeline.observe.reporter import Reporter
from pipeline.sink.schedule import Course, course
from pipeline.stages.data import Dataset
from pipeline.training.state import TrainState
from pipeline.training.step import (
    StepParts,
    TrainStep,
    initial_state,
    initial_variables,
    make_train_step,
)


@dataclass(frozen=True)
class Built:
    """A training step, the course it will run, and what it will be given."""

    parts: StepParts
    course: Course
    learning_rates: np.ndarray
    seed: np.ndarray
    state: TrainState
    """Shapes and dtypes only."""
    parameters: int
    parameter_bytes: int

    @property
    def step(self) -> TrainStep:
        """The pure functions that the parts make."""
        return make_train_step(self.parts)


def build(recipe: Recipe, dataset: Dataset, reporter: Reporter) -> Built:
    """Build from shapes alone; no weight is made. Raises RecipeError where parts don't fit."""
    run = course(recipe.train, dataset.train_order.steps_per_pass)
    parts = _parts(recipe, dataset)
    seed = seed_words(recipe.seed)
    _check_labels(recipe, dataset, parts)
    with _blaming(f"model {recipe.model.name}"):
        variables = jax.eval_shape(lambda words: initial_variables(parts, words), seed)
    with _blaming("train.optimizer"):
        state = jax.eval_shape(lambda made: initial_state(parts, made), variables)
    _refuse_padding_into_statistics(recipe, dataset, state)
    leaves = jax.tree.leaves(state.params)
    built = Built(
        parts=parts,
        course=run,
        learning_rates=_learning_rates(recipe, run),
        seed=seed,
        state=state,
        parameters=sum(leaf.size for leaf in leaves),
        parameter_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
    )
    reporter.stage("build", _line(recipe, built))
    return built


def _parts(recipe: Recipe, dataset: Dataset) -> StepParts:
    train, classes = recipe.train, len(dataset.classes)
    return StepParts(
        network=recipe.model.build(classes, COMPUTE_DTYPES[train.precision]),
        image=dataset.image,
        classes=classes,
        train_ops=recipe.dataset.train.ops,
        eval_ops=recipe.dataset.eval.ops,
        loss=train.loss.build(),
        reduction=train.loss.reduction,
        optimizer=optax.chain(train.clip.build(), train.optimizer.build()),
        loss_scale=train.loss_scale,
    )


@contextmanager
def _blaming(key: str) -> Iterator[None]:
    """What doesn't fit is a problem of the recipe, under this key."""
    try:
        yield
    except ValueError as error:
        raise RecipeError([f"{key}: {error}"]) from error


def _learning_rates(recipe: Recipe, run: Course) -> np.ndarray:
    with _blaming("train.schedule"):
        return recipe.train.schedule.table(recipe.train.optimizer.lr, run.total, run.steps_per_pass)


def _check_labels(recipe: Recipe, dataset: Dataset, parts: StepParts) -> None:
    """The loss takes the labels that either split's ops leave."""
    batch = recipe.train.batch_size
    logits = jax.ShapeDtypeStruct((batch, parts.classes), np.float32)
    for key, label in (("train", dataset.train_label), ("eval", dataset.eval_label)):
        with _blaming(f"dataset.{key}.ops"):
            jax.eval_shape(
                parts.loss, logits, jax.ShapeDtypeStruct((batch, *label.shape), label.dtype)
            )


def _refuse_padding_into_statistics(recipe: Recipe, dataset: Dataset, state: Any) -> None:
    """Padding is masked out of the loss, but batch statistics would see it."""
    short = len(dataset.train) % recipe.train.batch_size
    if state.batch_stats and short and not recipe.dataset.train.drop_remainder:
        raise RecipeError(
            [
                f"dataset.train.drop_remainder = false: the last batch would hold {short} of "
                f"{recipe.train.batch_size} samples and its padding would enter the batch "
                f"statistics of {recipe.model.name}; must be true for this network"
            ]
        )


def _line(recipe: Recipe, built: Built) -> str:
    run = built.course
    sink = f"sinks of {run.sink_steps:,}" if run.sink_steps else "no sinks"
    if recipe.train.sink and recipe.train.sink_size == "auto":
        sink = "sinks to be chosen"
    return (
        f"{recipe.model.name}: {built.parameters:,} parameters, "
        f"{built.parameter_bytes / 1e6:,.1f} MB; {run.total:,} steps, {sink}, "
        f"{run.total / run.steps_per_pass:,.2f} passes"
    )
