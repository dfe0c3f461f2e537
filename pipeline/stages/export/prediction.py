"""The prediction function, from raw images to logits as in evaluation, for export and `infer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax import Array

from pipeline.core.errors import RecipeError
from pipeline.data.columns import ColumnSpec
from pipeline.data.random import seed_words
from pipeline.data.tables.encode_table import encoded_features, encoding_ops
from pipeline.data.text.text_format import NO_TOKEN
from pipeline.data.transform import apply_ops, column_specs
from pipeline.stages.build import typed_network
from pipeline.stages.export.trained_run import TrainedRun
from pipeline.training.step import network_inputs

Weights = Mapping[str, Array | np.ndarray]
"""Arrays by full name, `params/conv_0/kernel`."""
Predict = Callable[[Weights, Array], Array]
"""(weights, raw images (batch, *shape)) -> logits float32 (batch, classes)."""


def make_predict(run: TrainedRun) -> Predict:
    """Make one function of a run's evaluation ops and its network.

    Raises RecipeError where the ops don't accept the run's images.
    """
    recipe, layout = run.recipe, _layout_of(run)
    ops, seed = recipe.dataset.eval.ops, seed_words(recipe.seed)
    ops = (*encoding_ops(run.samples.table, recipe.model.table_input), *ops)
    network = typed_network(recipe, len(run.samples.classes), encoded_features(ops))
    text = run.samples.text
    classifies_texts = text is not None and text.predicts == "class"

    # Where tokens follow the special ones, 0 is the padding of a dataset, and else a token.
    padding = 0 if text is not None and text.adds_special else NO_TOKEN

    def predict(weights: Weights, images: Array) -> Array:
        labels = jnp.zeros(images.shape[:1], jnp.int32)
        lengths = _lengths(images, padding) if classifies_texts else None
        if lengths is not None:
            images = jnp.maximum(images, 0)
        batch = {"image": images, "label": labels}
        rows = jnp.arange(images.shape[0])
        mapped = apply_ops(jnp, ops, batch, seed, np.int32(0), rows)["image"]
        sizes = None
        if recipe.dataset.padding_mask:
            sizes = _full_sizes(mapped, layout) if lengths is None else lengths
        inputs = network_inputs(mapped, layout, sizes)
        logits: Any = network.apply(unflatten_dict(dict(weights), sep="/"), inputs, train=False)
        return logits

    return predict


def _layout_of(run: TrainedRun) -> str:
    """The layout of images after the evaluation ops."""
    samples = run.samples
    columns = {
        "image": ColumnSpec(samples.shape, samples.dtype),
        "label": ColumnSpec((), "int32"),
    }
    encode = encoding_ops(samples.table, run.recipe.model.table_input)
    try:
        columns = column_specs(encode, columns)
        return column_specs(run.recipe.dataset.eval.ops, columns)["image"].layout
    except ValueError as error:
        raise RecipeError(f"dataset.eval.{error}") from error


def _lengths(texts: Array, padding: int) -> Array:
    """The number of tokens of each text, int32 (B, 1); numbers up to `padding` fill up the rest."""
    return (texts.reshape(texts.shape[0], -1) > padding).sum(axis=1, keepdims=True)


def _full_sizes(images: Array, layout: str) -> Array:
    """The sizes, int32 (B, 2), of images without padding."""
    height_width = images.shape[1:3] if layout == "hwc" else images.shape[2:4]
    return jnp.full((images.shape[0], 2), jnp.array(height_width), jnp.int32)


def shapes_of_weights(weights: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes to trace `predict` with."""
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in weights.items()}
