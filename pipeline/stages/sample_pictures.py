"""Samples for TensorBoard: their labels, predictions, masks and embeddings; generated images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from pipeline.config.recipe import Recipe
from pipeline.data.columns import IMAGES, Targets
from pipeline.data.inputs import Dataset
from pipeline.data.mask_colours import draw_masks
from pipeline.data.padding.buckets import SIZE
from pipeline.data.random import seed_words
from pipeline.data.transform import apply_ops, has_constant_labels
from pipeline.engine.monitors.tensorboard import TensorBoard
from pipeline.models.layers.standard import Adversarial
from pipeline.models.modules.adversarial import GENERATOR
from pipeline.models.modules.apply_layers import to_nhwc
from pipeline.models.modules.jit_layers import observe_modules
from pipeline.models.modules.network import Network
from pipeline.stages.build import Built
from pipeline.stages.data import read_batch
from pipeline.training.state import TrainState
from pipeline.training.step import get_evaluated_weights
from pipeline.training.step_config import StepConfig

MASK_GAP = 2
"""White pixels between an image, its mask and the predicted mask."""
EMBEDDING_CHUNK = 256
"""Samples whose embeddings are computed at once."""

Show = Callable[[TensorBoard], None]
"""Function that writes pictures or vectors for TensorBoard."""
Draw = Callable[[TrainState], Show]
"""Function that computes the pictures of a state, and returns the function that writes them."""


def sample_images(recipe: Recipe, dataset: Dataset) -> np.ndarray:
    """Return the first training images after their map ops, float32 (n, H, W, C).

    n is 0 if the samples aren't images.
    """
    if dataset.unit != IMAGES or dataset.inputs.image is None:
        return np.zeros((0, 1, 1, 1), np.float32)
    count = recipe.monitor.sample_images
    batches = dataset.train_order.batches(0, 1)
    # Ops on batches need the whole batch, as in training.
    max_samples = None if dataset.mixes_samples else count
    columns = read_batch(recipe, dataset, "train", batches, 0, max_samples)
    images: np.ndarray = dataset.inputs.read(np, columns)[:count]
    return images


def format_sample_labels(recipe: Recipe, dataset: Dataset) -> tuple[str, ...]:
    """Return the labels of the images of `sample_images`; () if images haven't one label each."""
    mixes = dataset.mixes_samples
    if mixes or dataset.label_positions or has_constant_labels(dataset.eval_ops):
        return ()
    rows = dataset.train_order.batches(0, 1).rows[0][: recipe.monitor.sample_images]
    labels = np.asarray(dataset.train.columns["label"][rows])
    return tuple(format_label(label, dataset.targets) for label in labels)


def format_label(label: np.ndarray, targets: Targets) -> str:
    """Return the text of a label: a class, numbers in the units of the data, or several labels."""
    match targets.task:
        case "regression":
            return ", ".join(f"{number:.4g}" for number in targets.to_data_units(label).reshape(-1))
        case "multi_label":
            flags = zip(targets.names, label > 0.5, strict=True)
            return ", ".join(name for name, is_set in flags if is_set) or "none"
    class_number = int(label.argmax()) if label.ndim else int(label)
    return targets.names[class_number] if 0 <= class_number < len(targets) else "ignored"


def predict_samples(
    recipe: Recipe, config: StepConfig, state: TrainState, dataset: Dataset, step: int
) -> Show | None:
    """Predict `monitor.sample_predictions` samples; return the function that shows them.

    Samples are evenly spread over the evaluation split. A caption is the prediction, followed by
    the true label if it differs. Predicted numbers are never shown as wrong. Returns None if
    samples aren't images, are padded, or have constant labels or a label for each position.
    """
    count = min(recipe.monitor.sample_predictions, len(dataset.eval))
    cant_be_captioned = (
        dataset.label_positions or recipe.dataset.buckets or has_constant_labels(dataset.eval_ops)
    )
    if not count or not _has_images(dataset) or cant_be_captioned:
        return None
    rows = np.arange(count) * len(dataset.eval) // count
    columns = {name: np.asarray(column[rows]) for name, column in dataset.eval.columns.items()}
    seed = seed_words(recipe.seed)

    def predict(variables: Any, columns: Any) -> Any:
        mapped = apply_ops(jnp, config.eval_ops, columns, seed, np.int32(0), rows)
        inputs = config.inputs.read(jnp, mapped)
        return config.network.apply(variables, inputs, train=False)

    outputs = np.asarray(jax.jit(predict)(_copy_variables_to_host(config, state), columns))
    targets = dataset.targets
    if targets.task == "multi_label":
        outputs = (outputs > 0).astype(np.float32)
    truths = [format_label(label, targets) for label in columns["label"]]
    texts = [format_label(output, targets) for output in outputs]
    captions = []
    are_wrong = []
    for text, truth in zip(texts, truths, strict=True):
        captions.append(text if text == truth else f"{text}, is {truth}")
        are_wrong.append(text != truth and targets.task != "regression")
    pictures = columns[next(iter(dataset.raw_inputs))]
    return lambda board: board.add_predictions(step, pictures, captions, are_wrong)


def make_drawers(recipe: Recipe, dataset: Dataset, built: Built) -> list[Draw]:
    """Return the functions that draw predicted masks and generated images, if there are any."""
    drawers = (
        _make_mask_drawer(recipe, dataset, built),
        _make_generated_drawer(recipe, dataset, built),
    )
    return [draw for draw in drawers if draw is not None]


def _make_mask_drawer(recipe: Recipe, dataset: Dataset, built: Built) -> Draw | None:
    """Return the function that draws the first evaluation images with their masks.

    Pictures are uint8 (n, H, 3 W + 2 MASK_GAP, 3): image, mask and predicted mask. Returns None
    unless every pixel has a class, for images of several sizes, and for a state on several devices.
    """
    count = min(recipe.monitor.sample_images, len(dataset.eval))
    label = dataset.eval_label
    has_pixel_labels = len(label.shape) == 2 and np.issubdtype(np.dtype(label.dtype), np.integer)
    is_classification = dataset.targets.task == "classification"
    is_on_one_device = recipe.parallel.mode == "none"
    has_masks = has_pixel_labels and is_classification and recipe.dataset.buckets is None
    has_masks = has_masks and dataset.inputs.image is not None
    if not (count and has_masks and is_on_one_device):
        return None
    rows = np.arange(count)
    columns = {name: column[rows] for name, column in dataset.eval.columns.items()}
    mapped = apply_ops(np, dataset.eval_ops, columns, seed_words(recipe.seed), np.int32(0), rows)
    inputs = dataset.inputs.read(np, mapped)
    images = _stretch_to_rgb(inputs)
    classes = len(dataset.targets)
    truth = draw_masks(np.asarray(mapped["label"]), classes)
    network = built.step_config.network

    @jax.jit
    def predict(variables: Any, images: jax.Array) -> jax.Array:
        logits: Any = network.apply(variables, images, train=False)
        return jnp.argmax(logits, axis=-1)

    def draw(state: TrainState) -> Show:
        variables = get_evaluated_weights(built.step_config, state)
        predicted = draw_masks(np.asarray(predict(variables, inputs)), classes)
        gap = np.full((*images.shape[:2], MASK_GAP, 3), 255, np.uint8)
        step = int(state.step)
        pictures = np.concatenate([images, gap, truth, gap, predicted], axis=2)
        return lambda board: board.add_masks(step, pictures)

    return draw


def _make_generated_drawer(recipe: Recipe, dataset: Dataset, built: Built) -> Draw | None:
    """Return the function that draws `monitor.sample_images` generated images.

    Returns None for a network without the layer `adversarial`, and for a state on several devices.
    """
    network = built.step_config.network
    layers = network.layers if isinstance(network, Network) else ()
    count = recipe.monitor.sample_images
    is_adversarial = any(isinstance(layer, Adversarial) for layer in layers)
    if not count or not is_adversarial or recipe.parallel.mode != "none":
        return None
    # The noise of the generator depends on the input image, so each image has a different value.
    shape = (count, *dataset.inputs.shape)
    inputs = np.broadcast_to(np.arange(count, dtype=np.float32).reshape(-1, 1, 1, 1), shape)

    @jax.jit
    def generate(variables: Any) -> Any:
        captured: Any = network.apply(
            variables,
            inputs,
            train=False,
            mutable=["intermediates"],
            capture_intermediates=lambda module, _: module.name == GENERATOR,
        )
        return jax.tree.leaves(captured[1])[0].astype(jnp.float32)

    def draw(state: TrainState) -> Show:
        step = int(state.step)
        generated = generate(get_evaluated_weights(built.step_config, state))
        pictures = _stretch_to_rgb(np.asarray(generated))
        return lambda board: board.add_generated(step, pictures)

    return draw


def _stretch_to_rgb(images: np.ndarray) -> np.ndarray:
    """Stretch each image (n, H, W, C) to uint8 (n, H, W, 3): RGB, or the first channel in grey."""
    rgb = images if images.shape[-1] == 3 else np.repeat(images[..., :1], 3, axis=-1)
    low = rgb.min(axis=(1, 2, 3), keepdims=True)
    span = np.maximum(rgb.max(axis=(1, 2, 3), keepdims=True) - low, 1e-12)
    return np.rint(255 * (rgb - low) / span).astype(np.uint8)


def embed_samples(
    recipe: Recipe, config: StepConfig, state: TrainState, dataset: Dataset
) -> Show | None:
    """Embed `monitor.embeddings` samples; return the function that shows the embeddings.

    Samples are evenly spread over the evaluation split. An embedding is the input of the network's
    last layer, averaged over positions of tokens or pixels. Returns None if the recipe requests no
    embeddings, samples have a label for each position, images are padded to several sizes, or the
    network has no flax layer with parameters.
    """
    count = min(recipe.monitor.embeddings, len(dataset.eval))
    if not count or dataset.label_positions or recipe.dataset.buckets:
        return None
    rows = np.arange(count) * len(dataset.eval) // count
    variables = _copy_variables_to_host(config, state)
    compute = jax.jit(_make_embedder(config))
    seed = seed_words(recipe.seed)
    vectors = []
    labels = []
    images = []
    for start in range(0, count, EMBEDDING_CHUNK):
        # All chunks have the same shape. The last chunk is padded with its last sample.
        chunk = rows[start : start + EMBEDDING_CHUNK]
        padded = np.pad(chunk, (0, min(EMBEDDING_CHUNK, count) - len(chunk)), mode="edge")
        split = dataset.eval.columns
        columns = {name: np.asarray(column[padded]) for name, column in split.items()}
        embedded = compute(variables, columns, seed, padded)
        if embedded is None:
            return None
        vectors.append(np.asarray(embedded)[: len(chunk)])
        labels += [format_label(label, dataset.targets) for label in columns["label"][: len(chunk)]]
        images.append(columns[next(iter(dataset.raw_inputs))][: len(chunk)])
    pictures = np.concatenate(images) if _has_images(dataset) else None
    return lambda board: board.add_embeddings(np.concatenate(vectors), labels, pictures)


def _make_embedder(config: StepConfig) -> Callable[..., Any]:
    """Return the function (variables, columns, seed, samples) -> float32 (n, features)."""

    def compute_embeddings(variables: Any, columns: Any, seed: Any, samples: Any) -> Any:
        mapped = apply_ops(jnp, config.eval_ops, columns, seed, np.int32(0), samples)
        sizes = columns[SIZE] if config.padding.has_mask else None
        inputs = config.inputs.read(jnp, mapped, sizes)
        layer_inputs: list[Any] = []

        def note_input(module: nn.Module, args: tuple[Any, ...]) -> None:
            if _has_parameters(module) and args:
                layer_inputs.append(args[0])

        with observe_modules(on_call=note_input):
            config.network.apply(variables, inputs, train=False)
        if not layer_inputs:
            return None
        # Networks that aren't lists of layers have images in NHWC.
        layout = config.network.layout if isinstance(config.network, Network) else "nhwc"
        last = to_nhwc(layer_inputs[-1], layout).astype(jnp.float32)
        return last.mean(axis=tuple(range(1, last.ndim - 1))) if last.ndim > 2 else last

    return compute_embeddings


def _has_parameters(module: nn.Module) -> bool:
    """Return whether a module has parameters besides parameters of inner modules."""
    params = module.variables.get("params", {}) if module.scope is not None else {}
    return any(not isinstance(leaf, dict) and hasattr(leaf, "shape") for leaf in params.values())


def _has_images(dataset: Dataset) -> bool:
    return dataset.unit == IMAGES and dataset.raw_image is not None


def _copy_variables_to_host(config: StepConfig, state: TrainState) -> Any:
    return jax.tree.map(np.asarray, get_evaluated_weights(config, state))
