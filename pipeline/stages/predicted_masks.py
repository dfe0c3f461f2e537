"""Pictures of what a network predicts for pixels: image, mask and prediction side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.config.recipe import Recipe
from pipeline.data.dataset import Dataset
from pipeline.data.image_file import mask_picture
from pipeline.data.random import seed_words
from pipeline.data.transform import apply_ops
from pipeline.stages.build import Built
from pipeline.training.state import TrainState, merge
from pipeline.training.step import network_inputs

GAP = 2
"""White pixels between the three."""


def mask_pictures(
    recipe: Recipe, dataset: Dataset, built: Built
) -> Callable[[TrainState], np.ndarray] | None:
    """Return a function from a state to pictures of the first evaluation images.

    They are uint8 (n, H, 3 W + 2 GAP, 3). None where there is nothing to show: no class for every
    pixel, images of several sizes, or a state that is spread over devices.
    """
    count = min(recipe.monitor.sample_images, len(dataset.eval))
    label = dataset.eval_label
    of_pixels = len(label.shape) == 2 and np.issubdtype(np.dtype(label.dtype), np.integer)
    spread = recipe.parallel.mode != "none" or recipe.dataset.buckets is not None
    if not count or not of_pixels or spread or dataset.targets.task != "classification":
        return None
    rows = np.arange(count)
    columns = {name: column[rows] for name, column in dataset.eval.columns.items()}
    mapped = apply_ops(np, dataset.eval_ops, columns, seed_words(recipe.seed), np.int32(0), rows)
    inputs = np.asarray(network_inputs(jnp.asarray(mapped["image"]), dataset.image.layout, None))
    images, classes = _as_rgb(inputs), len(dataset.targets)
    truth = mask_picture(np.asarray(mapped["label"]), classes)
    parts = built.parts

    @jax.jit
    def predict(params: Any, batch_stats: Any, images: jax.Array) -> jax.Array:
        weights = {"params": params, "batch_stats": batch_stats}
        logits: Any = parts.network.apply(weights, images, train=False)
        return jnp.argmax(logits, axis=-1)

    def draw(state: TrainState) -> np.ndarray:
        params = state.params
        if parts.average is not None:
            params = merge(params, state.average)
        predicted = mask_picture(np.asarray(predict(params, state.batch_stats, inputs)), classes)
        gap = np.full((*images.shape[:2], GAP, 3), 255, np.uint8)
        return np.concatenate([images, gap, truth, gap, predicted], axis=2)

    return draw


def _as_rgb(images: np.ndarray) -> np.ndarray:
    """Images (n, H, W, C), each stretched to its own range, uint8 (n, H, W, 3); of other than three
    channels, the first."""
    colour = images if images.shape[-1] == 3 else np.repeat(images[..., :1], 3, axis=-1)
    low = colour.min(axis=(1, 2, 3), keepdims=True)
    span = np.maximum(colour.max(axis=(1, 2, 3), keepdims=True) - low, 1e-12)
    return np.rint(255 * (colour - low) / span).astype(np.uint8)
