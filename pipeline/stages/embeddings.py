"""Embeddings of samples: what the last layer of a network reads of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from pipeline.config.recipe import Recipe
from pipeline.data.columns import IMAGES
from pipeline.data.dataset import Dataset
from pipeline.data.padding.buckets import SIZE
from pipeline.data.random import seed_words
from pipeline.data.transform import apply_ops
from pipeline.models.modules.layout import batch_first
from pipeline.models.modules.standard import Network
from pipeline.stages.sample_pictures import label_text
from pipeline.training.state import StepConfig, TrainState, merge
from pipeline.training.step import network_inputs

CHUNK = 256
"""Samples that are computed at once."""


@dataclass(frozen=True)
class EmbeddedSamples:
    """Embeddings of samples, float32 (n, features), with the label of each as text.

    `images` (n, H, W, C) are the samples as they are read, None where they are no images.
    """

    vectors: np.ndarray
    labels: tuple[str, ...]
    images: np.ndarray | None


def embed_samples(
    recipe: Recipe, config: StepConfig, state: TrainState, dataset: Dataset
) -> EmbeddedSamples | None:
    """Embed `monitor.embeddings` samples, spread over the evaluation split, by a state.

    A layer that reads several positions of a sample, of tokens or pixels, has the mean over them.
    None where none are asked for, labels are of positions, images are padded to several sizes, or
    the network has no flax layer with parameters.
    """
    count = min(recipe.monitor.embeddings, len(dataset.eval))
    if not count or dataset.label_positions or recipe.dataset.buckets:
        return None
    rows = np.arange(count) * len(dataset.eval) // count
    params = state.params if state.average is None else merge(state.params, state.average)
    # One device computes them, wherever the state lies.
    params, batch_stats = jax.tree.map(np.asarray, (params, state.batch_stats))
    program, seed = jax.jit(_embedding(config)), seed_words(recipe.seed)
    vectors, labels, images = [], [], []
    for start in range(0, count, CHUNK):
        # The same shape for all: the last chunk is filled up with its last sample.
        own = rows[start : start + CHUNK]
        filled = np.pad(own, (0, min(CHUNK, count) - len(own)), mode="edge")
        split = dataset.eval.columns
        columns = {name: np.asarray(column[filled]) for name, column in split.items()}
        found = program(params, batch_stats, columns, seed, filled)
        if found is None:
            return None
        vectors.append(np.asarray(found)[: len(own)])
        labels += [label_text(one, dataset.targets) for one in columns["label"][: len(own)]]
        images.append(columns["image"][: len(own)])
    are_images = dataset.unit == IMAGES and len(dataset.raw_image.shape) == 3
    pictures = np.concatenate(images) if are_images else None
    return EmbeddedSamples(np.concatenate(vectors), tuple(labels), pictures)


def _embedding(config: StepConfig) -> Callable[..., Any]:
    """A function of (params, batch statistics, columns, seed, samples) -> float32 (n, features)."""

    def embed(params: Any, batch_stats: Any, columns: Any, seed: Any, samples: Any) -> Any:
        mapped = apply_ops(jnp, config.eval_ops, columns, seed, np.int32(0), samples)
        sizes = columns[SIZE] if config.padding_mask else None
        inputs = network_inputs(mapped["image"], config.image.layout, sizes)
        read: list[Any] = []

        def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            if context.method_name == "__call__" and _has_parameters(context.module) and args:
                read.append(args[0])
            return call(*args, **kwargs)

        with nn.intercept_methods(note):
            variables = {"params": params, "batch_stats": batch_stats}
            config.network.apply(variables, inputs, train=False)
        if not read:
            return None
        # Another network than a list of layers has no modules inside that read its images.
        layout = config.network.layout if isinstance(config.network, Network) else "nhwc"
        last = batch_first(read[-1], layout).astype(jnp.float32)
        return last.mean(axis=tuple(range(1, last.ndim - 1))) if last.ndim > 2 else last

    return embed


def _has_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters of its own, not only in modules inside of it."""
    params = module.variables.get("params", {}) if module.scope is not None else {}
    return any(not isinstance(leaf, dict) and hasattr(leaf, "shape") for leaf in params.values())
