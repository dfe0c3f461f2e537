"""The prediction of a trained run or an ensemble, from raw samples to the logits of evaluation.

An ensemble averages the probabilities of its runs, or the numbers of a regression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax import Array, nn
from jax.scipy.special import logsumexp

from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.core.host.array_values import allow_reads
from pipeline.data.columns import ColumnSpec, Task
from pipeline.data.dataset_spec import MapOp, find_table_layout
from pipeline.data.inputs import PADDING_MASK, NetworkInputs
from pipeline.data.padding.buckets import Bucket
from pipeline.data.random import seed_words
from pipeline.data.tables.encode_table import make_encoding_ops
from pipeline.data.text.text_format import NO_TOKEN
from pipeline.data.transform import apply_ops, compute_column_specs
from pipeline.stages.build import build_network
from pipeline.stages.data import drop_folds
from pipeline.stages.key_errors import prefixing_problems
from pipeline.stages.record.trained_run import Samples, TrainedRun, read_trained_run
from pipeline.stages.sample_sizes import add_padding_mask, choose_inputs
from pipeline.training.state import Inputs

Weights = Mapping[str, Array | np.ndarray]
"""Arrays by full name, such as `params/conv_0/kernel`."""
Predict = Callable[[Weights, Inputs], Array]
"""(weights, samples before map ops) -> logits float32 (batch, classes). Samples are an array
(batch, *shape), or several by the names of their columns."""


def compile_predict(run: TrainedRun) -> Predict:
    """Return the compiled function of `make_predict`. In eager mode it isn't compiled, and layers
    may read values."""
    predict = make_predict(run)
    if run.recipe.train.mode == "eager":
        return allow_reads(is_eager=True)(predict)
    return jax.jit(predict)


def make_predict(run: TrainedRun) -> Predict:
    """Return the function of a run's evaluation ops and network, averaged over an ensemble.

    Raises RecipeError if the ops don't accept the run's samples, and for host ops.
    """
    if run.members:
        require_average(run.samples.targets.task)
        return _make_average(run)
    recipe = run.recipe
    if recipe.dataset.eval.host_ops:
        raise RecipeError(
            "dataset.eval.host_ops: must be [] for predictions, which read other samples than the "
            "dataset's"
        )
    samples = run.samples
    mapped_inputs = map_inputs(recipe, samples)
    ops, inputs, size = mapped_inputs.ops, mapped_inputs.inputs, mapped_inputs.size
    first_column = next(iter(samples.columns))
    seed = seed_words(recipe.seed)
    network = build_network(recipe, samples.targets, find_table_layout(ops))
    text = samples.text
    classifies_texts = text is not None and text.predicts == "class"
    # 0 is padding with special tokens, and a token without them.
    padding = 0 if text is not None and text.adds_special else NO_TOKEN

    def predict(weights: Weights, arrays: Inputs) -> Array:
        batch = dict(arrays) if isinstance(arrays, dict) else {first_column: arrays}
        sizes = None
        if classifies_texts:
            # The number of tokens of each text, int32 (B, 1).
            sizes = (batch[first_column] > padding).sum(axis=1, keepdims=True)
            batch[first_column] = jnp.maximum(batch[first_column], 0)
        rows = jnp.arange(batch[first_column].shape[0])
        batch["label"] = jnp.zeros(rows.shape, jnp.int32)
        mapped = apply_ops(jnp, ops, batch, seed, np.int32(0), rows)
        if not recipe.dataset.padding_mask:
            sizes = None
        elif sizes is None:
            sizes = jnp.full((*rows.shape, len(size)), jnp.array(size), jnp.int32)
        read = inputs.read(jnp, mapped, sizes)
        logits: Any = network.apply(unflatten_dict(dict(weights), sep="/"), read, train=False)
        return logits if run.temperature == 1 else logits / np.float32(run.temperature)

    return predict


@dataclass(frozen=True)
class MappedInputs:
    """The map ops of evaluation, and the arrays that a network reads after them."""

    ops: tuple[MapOp, ...]
    inputs: NetworkInputs
    size: Bucket
    """Size of a padding mask; () without one."""


def map_inputs(recipe: Recipe, samples: Samples) -> MappedInputs:
    """Return what the network of a recipe reads. Raises RecipeError if the ops don't accept the
    samples."""
    encode = make_encoding_ops(samples.table, recipe.model.table_input, samples.scale)
    columns = {**samples.columns, "label": ColumnSpec((), "int32")}
    with prefixing_problems("dataset.eval."):
        columns = compute_column_specs(encode, columns)
        columns = compute_column_specs(recipe.dataset.eval.ops, columns, leave_out=True)
    first_column = next(iter(samples.columns))
    size: Bucket = ()
    if recipe.dataset.padding_mask:
        mapped = columns[first_column]
        size = (mapped.shape if mapped.layout == "hwc" else mapped.shape[1:])[:2]
        columns = add_padding_mask(columns, first_column, size)
    default = tuple(name for name in columns if name not in ("label", PADDING_MASK))
    ops = (*encode, *recipe.dataset.eval.ops)
    return MappedInputs(ops, choose_inputs(recipe, columns, default), size)


def _make_average(run: TrainedRun) -> Predict:
    """Return the function that averages the outputs of an ensemble's members."""
    predicts = [make_predict(member) for member in run.members]

    def predict(weights: Weights, samples: Inputs) -> Array:
        outputs = [
            predict_alone(select_weights(weights, number), samples)
            for number, predict_alone in enumerate(predicts)
        ]
        return average_outputs(outputs, run.samples.targets.task)

    return predict


def read_network(folders: Sequence[Path]) -> TrainedRun:
    """Return the trained run of a folder, or the ensemble of several folders' runs.

    Raises DataError as `read_trained_run` and `make_ensemble` do, and for a repeated folder.
    """
    if len(folders) == 1:
        return read_trained_run(folders[0])
    repeated = [folder for folder in folders if folders.count(folder) > 1]
    if repeated:
        raise DataError(f"{repeated[0]}: is named twice; must be another run")
    return make_ensemble({folder: read_trained_run(folder) for folder in folders})


def make_ensemble(runs: Mapping[Path, TrainedRun]) -> TrainedRun:
    """Return the ensemble of runs by folder. Names of weights begin with the member's number.

    Raises DataError if the runs' samples or targets differ.
    """
    first_folder, first = next(iter(runs.items()))
    for folder, run in runs.items():
        differing = [
            field.name
            for field in fields(Samples)
            # Splits, such as folds, differ in their mean pixel.
            if field.name != "brightness"
            and getattr(run.samples, field.name) != getattr(first.samples, field.name)
        ]
        if differing:
            problem = f"its samples differ from those of {first_folder} in {', '.join(differing)}"
            raise DataError(f"{folder}: {problem}; must be equal in an ensemble")
    members = tuple(runs.values())
    arrays = {
        f"{number}/{name}": array
        for number, member in enumerate(members)
        for name, array in member.arrays.items()
    }
    step = max(member.step for member in members)
    return TrainedRun(drop_folds(first.recipe), arrays, step, first.samples, members)


def select_weights(weights: Weights, number: int) -> dict[str, Array | np.ndarray]:
    """Return the weights of member `number`, by their names in the member's run."""
    prefix = f"{number}/"
    return {
        name.removeprefix(prefix): array
        for name, array in weights.items()
        if name.startswith(prefix)
    }


def average_outputs(outputs: Sequence[Array | np.ndarray], task: Task) -> Array:
    """Return the outputs (..., K) of an ensemble from the outputs of its members.

    Numbers of a regression are averaged. Otherwise the result has the logits of the mean
    probabilities: softmax over K, or a sigmoid for each label. Raises DataError for unequal shapes.
    """
    require_equal_shapes([array.shape[1:] for array in outputs])
    values = jnp.stack([jnp.asarray(array, jnp.float32) for array in outputs])
    if task == "regression":
        return values.mean(axis=0)
    if task == "multi_label":
        # The logit of the mean probability p is log p - log(1 - p); the number of members cancels.
        positive = logsumexp(nn.log_sigmoid(values), axis=0)
        return positive - logsumexp(nn.log_sigmoid(-values), axis=0)
    return logsumexp(nn.log_softmax(values), axis=0) - np.float32(np.log(len(outputs)))


def require_average(task: Task) -> None:
    """Raise DataError for embeddings, whose axes have another meaning in each network."""
    if task == "matching":
        raise DataError("embeddings of several networks have no average; must be one run")


def require_equal_shapes(shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise DataError unless the outputs of an ensemble's networks have equal shapes."""
    if len(set(shapes)) > 1:
        text = " and ".join(map(str, dict.fromkeys(shapes)))
        raise DataError(f"the networks have outputs of shape {text}; must be equal in an ensemble")
