"""Search for changed images with wrong predictions, guided by the coverage of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.core.errors import RecipeError
from pipeline.data.batch import Batch
from pipeline.data.columns import IMAGES
from pipeline.data.dataset import Dataset
from pipeline.data.order import draw_words
from pipeline.data.random import seed_words
from pipeline.inspect.dumps.opened_recipe import OpenedRecipe
from pipeline.inspect.fuzz.coverage import NeuronCoverage, apply_with_neurons
from pipeline.inspect.fuzz.mutations import KINDS, ChangeLimits, mutate
from pipeline.training.step import map_batch

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
