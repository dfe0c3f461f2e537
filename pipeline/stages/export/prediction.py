"""The prediction of a trained run as a function, from raw images to the logits of evaluation."""

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
from pipeline.data.tables.encode_table import count_encoded_features, make_encoding_ops
from pipeline.data.text.text_format import NO_TOKEN
from pipeline.data.transform import apply_ops, compute_column_specs
from pipeline.stages.build import build_network
from pipeline.stages.export.ensemble import average_outputs, select_weights
from pipeline.stages.export.trained_run import TrainedRun
from pipeline.training.step import make_network_inputs

Weights = Mapping[str, Array | np.ndarray]
"""Arrays by full name, such as `params/conv_0/kernel`."""
Predict = Callable[[Weights, Array], Array]
"""(weights, raw images (batch, *shape)) -> logits float32 (batch, classes)."""


def make_predict(run: TrainedRun) -> Predict:
    """Return the function of a run's evaluation ops and network, averaged over an ensemble.

    Raises RecipeError if the ops don't accept the run's images, and for host ops.
    """
    if run.members:
        return _make_average(run)
    recipe = run.recipe
    if recipe.dataset.eval.host_ops:
        raise RecipeError(
            "dataset.eval.host_ops: must be [] for predictions, which read other images than the "
            "dataset's"
        )
    samples = run.samples
    encode = make_encoding_ops(samples.table, recipe.model.table_input)
    ops = (*encode, *recipe.dataset.eval.ops)
    columns = {"image": ColumnSpec(samples.shape, samples.dtype), "label": ColumnSpec((), "int32")}
    try:
        columns = compute_column_specs(encode, columns)
        layout = compute_column_specs(recipe.dataset.eval.ops, columns)["image"].layout
    except ValueError as error:
        raise RecipeError(f"dataset.eval.{error}") from error
    seed = seed_words(recipe.seed)
    network = build_network(recipe, len(samples.classes), count_encoded_features(ops))
    text = samples.text
    classifies_texts = text is not None and text.predicts == "class"
    # 0 is padding with special tokens, and a token without them.
    padding = 0 if text is not None and text.adds_special else NO_TOKEN

    def predict(weights: Weights, images: Array) -> Array:
        sizes = None
        if classifies_texts:
            # The number of tokens of each text, int32 (B, 1).
            tokens = images.reshape(images.shape[0], -1)
            sizes = (tokens > padding).sum(axis=1, keepdims=True)
            images = jnp.maximum(images, 0)
        labels = jnp.zeros(images.shape[:1], jnp.int32)
        rows = jnp.arange(images.shape[0])
        batch = {"image": images, "label": labels}
        mapped = apply_ops(jnp, ops, batch, seed, np.int32(0), rows)["image"]
        if not recipe.dataset.padding_mask:
            sizes = None
        elif sizes is None:
            height_width = mapped.shape[1:3] if layout == "hwc" else mapped.shape[2:4]
            sizes = jnp.full((mapped.shape[0], 2), jnp.array(height_width), jnp.int32)
        inputs = make_network_inputs(mapped, layout, sizes)
        logits: Any = network.apply(unflatten_dict(dict(weights), sep="/"), inputs, train=False)
        return logits

    return predict


def _make_average(run: TrainedRun) -> Predict:
    """Return the function that averages the outputs of an ensemble's members."""
    predicts = [make_predict(member) for member in run.members]

    def predict(weights: Weights, images: Array) -> Array:
        outputs = [
            predict_alone(select_weights(weights, number), images)
            for number, predict_alone in enumerate(predicts)
        ]
        return average_outputs(outputs, run.samples.targets.task)

    return predict


def make_weight_shapes(weights: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of weights, for tracing."""
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in weights.items()}
