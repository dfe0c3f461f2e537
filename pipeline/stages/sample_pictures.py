"""Samples to look at: what they are labelled, and what the network predicts of some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from pipeline.config.recipe import Recipe
from pipeline.data.columns import IMAGES
from pipeline.data.dataset import Dataset
from pipeline.data.dataset_spec import BatchOp
from pipeline.data.mask_pictures import mask_picture
from pipeline.data.padding.buckets import SIZE
from pipeline.data.random import seed_words
from pipeline.data.targets import Targets
from pipeline.data.transform import apply_ops
from pipeline.models.modules.layout import batch_first
from pipeline.models.modules.standard import Network
from pipeline.stages.build import Built
from pipeline.training.state import StepConfig, TrainState, merge
from pipeline.training.step import network_inputs


@dataclass(frozen=True)
class SamplePredictions:
    """Images as they are read, (n, H, W, C), what to say below each, and which are wrong."""

    images: np.ndarray
    captions: tuple[str, ...]
    wrong: tuple[bool, ...]


def sample_labels(recipe: Recipe, dataset: Dataset) -> tuple[str, ...]:
    """The labels of the images of `sample_images`; () where they are mixed, or of positions."""
    if any(isinstance(op, BatchOp) for op in dataset.train_ops) or dataset.label_positions:
        return ()
    rows = dataset.train_order.batches(0, 1).rows[0][: recipe.monitor.sample_images]
    labels = np.asarray(dataset.train.columns["label"][rows])
    return tuple(label_text(label, dataset.targets) for label in labels)


def label_text(label: np.ndarray, targets: Targets) -> str:
    """A label as text: the class, the numbers in the units of the data, or the labels."""
    match targets.task:
        case "regression":
            return ", ".join(f"{number:.4g}" for number in targets.in_units(label).reshape(-1))
        case "multi_label":
            has = zip(targets.names, label > 0.5, strict=True)
            return ", ".join(name for name, one in has if one) or "none"
    number = int(label.argmax()) if label.ndim else int(label)
    return targets.names[number] if 0 <= number < len(targets) else "ignored"


def predict_samples(
    recipe: Recipe, config: StepConfig, state: TrainState, dataset: Dataset
) -> SamplePredictions | None:
    """Predict `monitor.sample_predictions` samples by a state, spread over the evaluation
    split; None where samples are no images, or labels are of positions or padded."""
    count = min(recipe.monitor.sample_predictions, len(dataset.eval))
    are_images = dataset.unit == IMAGES and len(dataset.raw_image.shape) == 3
    if not count or not are_images or dataset.label_positions or recipe.dataset.buckets:
        return None
    rows = np.arange(count) * len(dataset.eval) // count
    columns = {name: np.asarray(column[rows]) for name, column in dataset.eval.columns.items()}
    outputs = np.asarray(_outputs(recipe, config, state, columns, rows))
    targets = dataset.targets
    labels = columns["label"]
    if targets.task == "classification":
        said = [targets.names[int(best)] for best in outputs.argmax(axis=-1)]
    elif targets.task == "multi_label":
        said = [label_text((one > 0).astype(np.float32), targets) for one in outputs]
    else:
        said = [label_text(one, targets) for one in outputs]
    true = [label_text(label, targets) for label in labels]
    captions, wrong = _captions(said, true, is_number=targets.task == "regression")
    return SamplePredictions(columns["image"], captions, wrong)


def _captions(
    said: Sequence[str], true: Sequence[str], *, is_number: bool
) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """Predictions, followed by the truth where it is another; numbers are never wrong."""
    pairs = list(zip(said, true, strict=True))
    captions = tuple(one if one == other else f"{one}, is {other}" for one, other in pairs)
    return captions, tuple(one != other and not is_number for one, other in pairs)


def _outputs(
    recipe: Recipe, config: StepConfig, state: TrainState, columns: Any, rows: np.ndarray
) -> Any:
    seed = seed_words(recipe.seed)

    def outputs(params: Any, batch_stats: Any, columns: Any) -> Any:
        mapped = apply_ops(jnp, config.eval_ops, columns, seed, np.int32(0), rows)
        inputs = network_inputs(mapped["image"], config.image.layout, None)
        variables = {"params": params, "batch_stats": batch_stats}
        return config.network.apply(variables, inputs, train=False)

    params = state.params
    if state.average is not None:
        params = merge(params, state.average)
    # One device computes them, wherever the state lies.
    params, batch_stats = jax.tree.map(np.asarray, (params, state.batch_stats))
    return jax.jit(outputs)(params, batch_stats, columns)


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
