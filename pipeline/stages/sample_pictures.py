"""Samples to look at: what they are labelled, and what the network predicts of some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.config.recipe import Recipe
from pipeline.data.columns import IMAGES
from pipeline.data.dataset import Dataset
from pipeline.data.dataset_spec import BatchOp
from pipeline.data.random import seed_words
from pipeline.data.targets import Targets
from pipeline.data.transform import apply_ops
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
