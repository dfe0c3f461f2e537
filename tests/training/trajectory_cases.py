"""Trainings that run here and in MindSpore, from the same weights and in the same order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.reporter import Reporter
from pipeline.stages.build import build
from pipeline.stages.data import load_data

STEPS = 200
FOLDER = Path(__file__).parents[1] / "golden" / "trajectories"
_DIGITS = "[{name: resize, size: [32, 32]}, {name: rescale, factor: 0.0625, shift: 0.0}]"


@dataclass(frozen=True)
class Case:
    """A recipe, its overrides, and the folder under the shared data, if any."""

    recipe: str
    overrides: tuple[str, ...] = ()
    data: str | None = None


CASES: Mapping[str, Case] = {
    "lenet5_of_the_documents": Case("lenet5_mnist", data="mnist"),
    "mlp_of_the_documents": Case(
        "mlp_mnist", ("optimizer=sgd", "train.optimizer.lr=0.01", "schedule=constant"), "mnist"
    ),
    "lenet5_digits": Case(
        "lenet5_digits", (f"dataset.train.ops={_DIGITS}", "train.optimizer.lr=0.005")
    ),
}
"""The documents' own (M-02, M-04), and one that learns more in `STEPS` steps.

At larger rates float32 decides: of some 40 million values that LeNet-5 hands to ReLU in 200 steps,
one or two are so near to zero that a last digit changes their sign, and losses differ from there
on. So they do here from one lowering of a step to another.
"""


def recipe_of(name: str, shared_data: Path, *overrides: str) -> Recipe:
    """The recipe of a case, `STEPS` long."""
    case = CASES[name]
    length = [f"train.steps={STEPS}", "eval.every_epochs=null"]
    root = [f"dataset.root={shared_data / case.data}"] if case.data else []
    return load_recipe(case.recipe, [*case.overrides, *length, *overrides, *root])


@dataclass(frozen=True)
class Given:
    """Initial weights and data of both sides."""

    images: np.ndarray
    """uint8 (steps, batch, H, W, C), as read."""
    labels: np.ndarray
    """int32 (steps, batch)."""
    weights: Mapping[str, np.ndarray]
    """Parameter path -> float32 array."""
    learning_rates: np.ndarray
    """float32 (steps,)."""


def given(recipe: Recipe) -> Given:
    """The first `STEPS` batches, the initial weights and the learning rates of a recipe."""
    reporter = Reporter()
    dataset = load_data(recipe, reporter)
    built = build(recipe, dataset, reporter)
    rows = dataset.train_order.batches(0, STEPS).indices
    columns: Mapping[str, Any] = dataset.train.columns
    params = built.step.init(built.seed).params
    return Given(
        images=columns["image"][rows.ravel()].reshape(*rows.shape, *columns["image"].shape[1:]),
        labels=columns["label"][rows.ravel()].reshape(rows.shape).astype(np.int32),
        weights={
            jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
            for path, leaf in jax.tree.leaves_with_path(params)
        },
        learning_rates=built.learning_rates[:STEPS],
    )
