"""From images as they are read to logits, as evaluation computes them: the function that is
exported and that `infer` calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax import Array

from pipeline.data.columns import ColumnSpec
from pipeline.data.random import seed_words
from pipeline.data.transform import apply_ops, column_specs
from pipeline.errors import RecipeError
from pipeline.stages.build import typed_network
from pipeline.training.step import network_inputs
from pipeline.weights.trained_run import TrainedRun

Weights = Mapping[str, Array | np.ndarray]
"""Arrays by full name, `params/conv_0/kernel`."""
Predict = Callable[[Weights, Array], Array]
"""(weights, images (batch, *shape) as they are read) -> logits float32 (batch, classes)."""


def make_predict(run: TrainedRun) -> Predict:
    """The evaluation of a run as one function: its evaluation ops, then its network.

    Raises RecipeError where the ops don't take such images.
    """
    recipe, layout = run.recipe, _layout_of(run)
    ops, seed = recipe.dataset.eval.ops, seed_words(recipe.seed)
    network = typed_network(recipe, len(run.samples.classes))

    def predict(weights: Weights, images: Array) -> Array:
        labels = jnp.zeros(images.shape[:1], jnp.int32)
        batch = {"image": images, "label": labels}
        rows = jnp.arange(images.shape[0])
        mapped = apply_ops(jnp, ops, batch, seed, np.int32(0), rows)["image"]
        sizes = _whole(mapped, layout) if recipe.dataset.padding_mask else None
        inputs = network_inputs(mapped, layout, sizes)
        logits: Any = network.apply(unflatten_dict(dict(weights), sep="/"), inputs, train=False)
        return logits

    return predict


def _layout_of(run: TrainedRun) -> str:
    """How the evaluation ops leave images."""
    samples = run.samples
    columns = {
        "image": ColumnSpec(samples.shape, samples.dtype),
        "label": ColumnSpec((), "int32"),
    }
    try:
        return column_specs(run.recipe.dataset.eval.ops, columns)["image"].layout
    except ValueError as error:
        raise RecipeError([f"dataset.eval.{error}"]) from error


def _whole(images: Array, layout: str) -> Array:
    """The sizes (B, 2) of images of which nothing is padding."""
    height_width = images.shape[1:3] if layout == "hwc" else images.shape[2:4]
    return jnp.full((images.shape[0], 2), jnp.array(height_width), jnp.int32)


def shapes_of_weights(weights: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    """What `predict` is traced with in place of weights."""
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in weights.items()}
