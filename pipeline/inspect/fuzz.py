"""Search for changed images with wrong predictions, guided by the coverage of layers, and the
accuracy that faults of weights leave (flipped bits, zeros, changed signs)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.core.errors import RecipeError
from pipeline.data.batch import Batch
from pipeline.data.columns import IMAGES
from pipeline.data.inputs import Dataset
from pipeline.data.ops.affine import RandomAffine
from pipeline.data.ops.color import adjust_brightness, adjust_contrast
from pipeline.data.ops.image import list_steps
from pipeline.data.order import draw_words, permute
from pipeline.data.random import scale_to_integers, seed_words, uniforms
from pipeline.inspect.dumps.layer_observer import LayerObserver
from pipeline.inspect.dumps.opened_recipe import OpenedRecipe
from pipeline.models.modules.apply_layers import intercept_layers, to_nhwc
from pipeline.training.step import map_batch
from pipeline.training.step_config import StepConfig

FAULT_KINDS = ("bit flips", "zeros", "sign flips")
TRIALS = 5
FAULT_STREAM = 3 << 61
"""Number of the first draw of faults; no epoch has this number."""


@dataclass(frozen=True)
class FaultRow:
    """The accuracy with a number of faults."""

    fault: str
    count: int
    accuracy: float
    """Mean over TRIALS draws."""
    least: float
    """Least accuracy of the draws."""


def list_counts(weights: int) -> list[int]:
    """Return the numbers of faults: powers of ten, up to the number of weights."""
    return [10**power for power in range(10) if 10**power <= weights]


def inject_faults(params: Any, fault: str, count: int, seed: int, trial: int) -> Any:
    """Return float32 parameters with `count` faults in different weights; `params` don't change."""
    leaves, structure = jax.tree.flatten(params)
    copies = [np.array(leaf, np.float32) for leaf in leaves]
    ends = np.cumsum([copy.size for copy in copies])
    number = FAULT_STREAM + FAULT_KINDS.index(fault) * TRIALS + trial
    places = permute(np.arange(count), int(ends[-1]), seed, number)
    bits = draw_words(seed, FAULT_STREAM + (1 << 20) + trial, count) % np.uint64(32)
    leaf_numbers = np.searchsorted(ends, places, side="right")
    for leaf_number in np.unique(leaf_numbers).tolist():
        flat = copies[leaf_number].reshape(-1)
        is_inside = leaf_numbers == leaf_number
        rows = places[is_inside] - (ends[leaf_number] - flat.size)
        match fault:
            case "bit flips":
                masks = np.uint32(1) << bits[is_inside].astype(np.uint32)
                flat.view(np.uint32)[rows] ^= masks
            case "zeros":
                flat[rows] = 0
            case "sign flips":
                flat[rows] = -flat[rows]
    return jax.tree.unflatten(structure, copies)


def measure_faults(
    params: Any, compute_accuracy: Callable[[Any], float], seed: int
) -> Iterator[FaultRow]:
    """Yield the accuracy of parameters for each kind and number of faults."""
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    for fault in FAULT_KINDS:
        for count in list_counts(weights):
            accuracies = [
                compute_accuracy(inject_faults(params, fault, count, seed, trial))
                for trial in range(TRIALS)
            ]
            yield FaultRow(fault, count, float(np.mean(accuracies)), min(accuracies))


def count_right(logits: np.ndarray, labels: Sequence[int] | np.ndarray) -> int:
    """Return how many predictions are right. Logits that aren't finite are wrong."""
    is_finite = np.isfinite(logits).all(axis=1)
    return int((is_finite & (np.nan_to_num(logits).argmax(axis=1) == np.asarray(labels))).sum())


ROUND_SAMPLES = 256
"""Images that the network computes at once."""
RANGE_SAMPLES = 1024
"""At most this many training samples set the ranges of neurons."""
MAX_POOL = 4096
"""At most this many images are changed further."""
STREAM = 3 << 60
"""Number of the draws of the first round; no epoch has this number."""

Predict = Callable[[Any, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(variables, raw images (n, H, W, C)) -> logits (n, classes) and neurons (n, neurons), float32."""
AFFINE = RandomAffine(
    degrees=15.0,
    translate_x=(-0.1, 0.1),
    translate_y=(-0.1, 0.1),
    scale=(0.9, 1.1),
    shear_x=(-10.0, 10.0),
    interpolation="linear",
)
KINDS = ("affine", "brightness", "contrast", "blur", "noise")
FACTORS = list_steps(0.7, 1.3)
"""Factors of brightness and contrast."""
FIRST_DRAW = 1 << 20
"""Number of the first draw, which no map op has."""
SECTIONS = 100
SAME_VALUES = ("flatten", "dropout")
"""Layers whose outputs are the values of their inputs."""


@dataclass(frozen=True)
class Candidate:
    """An image that may be changed further, or fools the network."""

    sample: int
    """Position of the unchanged image in the evaluation split."""
    label: int
    image: np.ndarray
    """uint8 (H, W, C)."""
    reference: np.ndarray
    """The unchanged image after its affine map, if it has one."""
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FoolingMutant:
    """A changed image with a wrong prediction."""

    candidate: Candidate
    predicted: int
    probability: float
    distance: float
    """Largest change of a pixel from the reference, from 0 to 1."""


@dataclass(frozen=True)
class FuzzResult:
    """The result of a search."""

    right: int
    """Number of samples with right predictions, which are changed."""
    wrong: int
    """Number of samples with wrong predictions, which are left out."""
    neurons: int
    coverage: dict[str, float]
    """Coverage of the samples."""
    coverage_with_mutants: dict[str, float]
    fooling: tuple[FoolingMutant, ...]


def make_predict(opened: OpenedRecipe, step: int) -> Predict:
    """Return the compiled prediction of a run's network, with the map ops of evaluation.

    Raises RecipeError if the network doesn't list its layers.
    """
    config = opened.programs(step).config
    seed = jnp.asarray(seed_words(opened.recipe.seed))
    name = find_image_column(opened.dataset)
    label = opened.dataset.eval.columns["label"]
    labels = np.zeros((ROUND_SAMPLES, *label.shape[1:]), label.dtype)

    @jax.jit
    def compute(variables: Any, images: Any) -> Any:
        places = jnp.arange(ROUND_SAMPLES)
        columns = {name: images, "label": labels}
        batch = Batch(columns, seed, jnp.int32(0), places, jnp.int32(ROUND_SAMPLES))
        return apply_with_neurons(config, variables, map_batch(config, config.eval_ops, batch)[0])

    def predict(variables: Any, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits = []
        neurons = []
        for first in range(0, len(images), ROUND_SAMPLES):
            chunk = images[first : first + ROUND_SAMPLES]
            rows = np.resize(np.arange(len(chunk)), ROUND_SAMPLES)
            chunk_logits, chunk_neurons = compute(variables, chunk[rows])
            logits.append(np.asarray(chunk_logits)[: len(chunk)])
            neurons.append(np.asarray(chunk_neurons)[: len(chunk)])
        return np.concatenate(logits), np.concatenate(neurons)

    return predict


@dataclass(frozen=True)
class FuzzSearch:
    """A search with the weights of a run."""

    dataset: Dataset
    predict: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    """Raw images -> logits and neurons, as `Predict`."""
    seed: int
    limits: ChangeLimits

    def search(self, rows: np.ndarray, mutants: int) -> FuzzResult:
        """Change the evaluation samples at `rows`, (n,), and their mutants, `mutants` times in all.

        Raises RecipeError if no prediction is right.
        """
        name = find_image_column(self.dataset)
        images, labels = (
            np.asarray(self.dataset.eval.columns[column][rows]) for column in (name, "label")
        )
        train = self.dataset.train
        count = min(RANGE_SAMPLES, len(train))
        range_rows = np.arange(count) * len(train) // count
        coverage = NeuronCoverage(self.predict(np.asarray(train.columns[name][range_rows]))[1])
        logits, neurons = self.predict(images)
        pool = [
            Candidate(int(row), int(label), pixels, pixels)
            for row, label, pixels, outputs in zip(rows, labels, images, logits, strict=True)
            if outputs.argmax() == label
        ]
        right = len(pool)
        if not right:
            raise RecipeError("no prediction of the samples is right, so none can become wrong")
        for sample_neurons in neurons:
            coverage.add(sample_neurons)
        before = coverage.compute_shares()
        fooling = []
        for candidate, outputs, changed_neurons in self._mutate_pool(pool, mutants):
            is_new = coverage.add(changed_neurons)
            if outputs.argmax() != candidate.label:
                fooling.append(_describe(candidate, outputs, self.limits.white))
            elif is_new and len(pool) < MAX_POOL:
                pool.append(candidate)
        after = coverage.compute_shares()
        return FuzzResult(right, len(rows) - right, neurons.shape[1], before, after, tuple(fooling))

    def _mutate_pool(
        self, pool: Sequence[Candidate], mutants: int
    ) -> Iterator[tuple[Candidate, np.ndarray, np.ndarray]]:
        """Yield changed images with their logits and neurons; `pool` may grow meanwhile."""
        change = jax.jit(partial(mutate, self.limits))
        seed = seed_words(self.seed)
        for number in range(-(-mutants // ROUND_SAMPLES)):
            words = draw_words(self.seed, STREAM + number, ROUND_SAMPLES)
            parents = [pool[int(word % np.uint64(len(pool)))] for word in words]
            images = np.stack([parent.image for parent in parents])
            references = np.stack([parent.reference for parent in parents])
            is_affine = np.array([KINDS[0] in parent.changes for parent in parents])
            changed = change(images, references, is_affine, seed, np.int32(number))
            images, references, kinds = map(np.asarray, changed)
            logits, neurons = self.predict(images)
            for place, parent in enumerate(parents[: mutants - number * ROUND_SAMPLES]):
                candidate = replace(
                    parent,
                    image=images[place],
                    reference=references[place],
                    changes=(*parent.changes, KINDS[kinds[place]]),
                )
                yield candidate, logits[place], neurons[place]


def _describe(candidate: Candidate, logits: np.ndarray, white: int) -> FoolingMutant:
    exponentials = np.exp(logits.astype(np.float64) - logits.max())
    predicted = int(logits.argmax())
    change = np.abs(candidate.image.astype(np.int32) - candidate.reference).max()
    return FoolingMutant(
        candidate,
        predicted,
        float(exponentials[predicted] / exponentials.sum()),
        float(change / white),
    )


def find_image_column(dataset: Dataset) -> str:
    """Return the name of the column with the images that a network reads alone."""
    return next(iter(dataset.raw_inputs))


def require_fuzzable(dataset: Dataset, name: str) -> None:
    """Raise RecipeError unless samples are images of bytes with one class each."""
    image = dataset.raw_image
    problem = None
    if dataset.text is not None:
        problem = "has tokens, whose changes would be other texts"
    elif dataset.unit != IMAGES or dataset.table is not None or image is None:
        problem = "doesn't have images"
    elif image.dtype != "uint8" or image.shape[-1] not in (1, 3):
        problem = f"has {image.dtype} of shape {image.shape}, not bytes of 1 or 3 channels"
    elif dataset.targets.task != "classification" or dataset.label_positions:
        problem = "doesn't have one class for each image"
    if problem is not None:
        raise RecipeError(f"dataset = {name}: {problem}; fuzz needs images of one class each")


@dataclass(frozen=True)
class ChangeLimits:
    """The limits of all changes except affine maps."""

    radius: float
    """Largest change of a pixel from its reference, as a share of `white`."""
    white: int
    """The brightest value of a pixel."""


def mutate(
    limits: ChangeLimits,
    images: Array,
    references: Array,
    is_affine: Array,
    seed: Array,
    number: Array,
) -> tuple[Array, Array, Array]:
    """Change images at random; return them, their references, and indices of KINDS, int32 (B,).

    `number` is the round's. An affine map also changes the reference, and is applied only without
    `is_affine`, bool (B,). Other changes keep pixels within `limits` of the reference (DeepHunter,
    Xie et al. 2019).
    """
    places = jnp.arange(len(images))

    def draw(index: int, count: int) -> Array:
        numbers: Array = uniforms(jnp, seed, number, places, FIRST_DRAW + index, count)
        return numbers

    affine = draw(0, AFFINE.draws)
    factors = scale_to_integers(jnp, draw(1, 1)[:, 0], len(FACTORS))
    kinds = scale_to_integers(jnp, draw(2, 1)[:, 0], len(KINDS))
    kinds = jnp.where(is_affine & (kinds == 0), len(KINDS) - 1, kinds)
    max_change = limits.radius * limits.white
    noise = (2 * draw(3, prod(images.shape[1:])).reshape(images.shape) - 1) * max_change
    is_kind = [(kinds == kind)[:, None, None, None] for kind in range(len(KINDS))]
    references = jnp.where(is_kind[0], AFFINE(jnp, references, affine), references)
    changed = jnp.select(
        is_kind,
        [
            AFFINE(jnp, images, affine),
            adjust_brightness(jnp, images, FACTORS, factors),
            adjust_contrast(jnp, images, FACTORS, factors),
            _blur(images),
            jnp.rint(images + noise).clip(0, 255).astype(jnp.uint8),
        ],
    )
    levels = references.astype(jnp.int32)
    limit = int(max_change + 1e-6)
    high = jnp.minimum(levels + limit, limits.white)
    changed = changed.astype(jnp.int32).clip(jnp.maximum(levels - limit, 0), high)
    return changed.astype(jnp.uint8), references, kinds


def _blur(images: Array) -> Array:
    """Average 3x3 pixels with binomial weights; pixels outside repeat the edge."""
    levels = images.astype(jnp.int32)
    for axis in (1, 2):
        size = levels.shape[axis]
        before = jnp.take(levels, jnp.maximum(jnp.arange(size) - 1, 0), axis=axis)
        after = jnp.take(levels, jnp.minimum(jnp.arange(size) + 1, size - 1), axis=axis)
        levels = before + 2 * levels + after
    return ((levels + 8) // 16).astype(jnp.uint8)


def apply_with_neurons(config: StepConfig, variables: Any, images: Any) -> tuple[Array, Array]:
    """Return the logits of a network that lists layers, and its neurons, float32 (B, neurons)."""
    observer = LayerObserver()
    with intercept_layers(observer):
        logits: Any = config.network.apply(variables, images, train=False)
    neurons = []
    for path, output in observer.outputs.items():
        form = observer.forms[path]
        if form.kind in SAME_VALUES:
            continue
        values = to_nhwc(output, form.layout).astype(jnp.float32)
        features = values.mean(axis=tuple(range(1, values.ndim - 1)))
        # Layers inside `views` have a row for each view, after one another for an image.
        neurons.append(features.reshape(len(images), -1, features.shape[-1]).mean(1))
    return logits.astype(jnp.float32), jnp.concatenate(neurons, axis=1)


class NeuronCoverage:
    """The sections that samples have reached in the ranges of training samples' neurons, float32
    (n, neurons)."""

    def __init__(self, neurons: np.ndarray) -> None:
        self._low = neurons.min(axis=0)
        self._high = neurons.max(axis=0)
        self.reached = np.zeros((neurons.shape[1], SECTIONS + 2), bool)
        """The first and last section of a neuron are corners."""

    def add(self, neurons: np.ndarray) -> bool:
        """Add a sample, float32 (neurons,), and return whether it reaches a new section."""
        span = np.maximum(self._high.astype(np.float64) - self._low, np.finfo(np.float32).tiny)
        places = np.floor((neurons.astype(np.float64) - self._low) / span * SECTIONS)
        sections = 1 + places.clip(0, SECTIONS - 1).astype(np.int64)
        sections[neurons < self._low] = 0
        sections[neurons > self._high] = SECTIONS + 1
        rows = np.arange(len(sections))
        is_new = not self.reached[rows, sections].all()
        self.reached[rows, sections] = True
        return is_new

    def compute_shares(self) -> dict[str, float]:
        """Return the shares of reached sections (KMNC) and corners (NBC)."""
        sections = float(self.reached[:, 1:-1].mean())
        corners = float(self.reached[:, [0, -1]].mean())
        return {"multisection": sections, "boundary": corners}
