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
from pipeline.training.bucketing import with_padding_mask
from pipeline.weights.run import TrainedRun

Weights = Mapping[str, Array | np.ndarray]
"""Arrays by full name, `params/conv_0/kernel`."""
Predict = Callable[[Weights, Array], Array]
"""(weights, images (batch, *shape) as they are read) -> logits float32 (batch, classes)."""


def make_predict(run: TrainedRun) -> Predict:
    """The evaluation of a run as one function: its evaluation ops, then its network.

    Raises RecipeError where the ops don't take such images.
    """
    recipe, samples = run.recipe, run.samples
    ops, seed = recipe.dataset.eval.ops, seed_words(recipe.seed)
    columns = {
        "image": ColumnSpec(samples.shape, samples.dtype),
        "label": ColumnSpec((), "int32"),
    }
    try:
        mapped = column_specs(ops, columns)["image"]
    except ValueError as error:
        raise RecipeError([f"dataset.eval.{error}"]) from error
    network = typed_network(recipe, len(samples.classes))

    def predict(weights: Weights, images: Array) -> Array:
        labels = jnp.zeros(images.shape[:1], jnp.int32)
        batch = {"image": images, "label": labels}
        rows = jnp.arange(images.shape[0])
        inputs = apply_ops(jnp, ops, batch, seed, np.int32(0), rows)["image"]
        inputs = inputs.astype(jnp.float32)
        if mapped.layout == "chw":
            inputs = inputs.transpose(0, 2, 3, 1)
        if recipe.dataset.padding_mask:
            inputs = _all_of_it_real(inputs)
        variables = unflatten_dict(dict(weights), sep="/")
        logits: Any = network.apply(variables, inputs, train=False)
        return logits

    return predict


def _all_of_it_real(images: Array) -> Array:
    """Images with the channel that tells padding, of which these have none."""
    sizes = jnp.full((images.shape[0], 2), jnp.array(images.shape[1:3]), jnp.int32)
    return with_padding_mask(images, sizes)


def shapes_of_weights(weights: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    """What `predict` is traced with in place of weights."""
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in weights.items()}
