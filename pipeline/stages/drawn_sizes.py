"""Sizes of images that are drawn for each step: checked before anything is compiled (D-18)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import jax
import numpy as np
from flax.errors import FlaxError

from pipeline.core.errors import RecipeError
from pipeline.data.batch import Batch
from pipeline.data.columns import ColumnSpec, Split
from pipeline.data.dataset_spec import MapOp
from pipeline.data.transform import choices_among, chosen_ops, column_specs
from pipeline.training.state import StepConfig, TrainState
from pipeline.training.step import gradients_of


def drawn_specs(ops: Sequence[MapOp], split: Split) -> tuple[ColumnSpec, ...]:
    """Return the spec of a mapped image by size; empty where no op draws one.

    Raises RecipeError that names the op which can't be applied to a size.
    """
    choices = choices_among(ops)
    if choices == 1:
        return ()
    try:
        lists = [chosen_ops(ops, number) for number in range(choices)]
        return tuple(column_specs(chosen, split.specs())["image"] for chosen in lists)
    except ValueError as error:
        raise RecipeError([f"dataset.train.{error}"]) from error


def like_evaluation(
    train: Mapping[str, ColumnSpec], evaluated: Mapping[str, ColumnSpec]
) -> dict[str, ColumnSpec]:
    """Return the specs of training in the size of evaluation, which the network is built for."""
    image, label = train["image"], train["label"]
    channel = 2 if image.layout == "hwc" else 0
    wanted = evaluated["image"]
    if (image.layout, image.shape[channel]) == (wanted.layout, wanted.shape[channel]):
        image = replace(image, shape=wanted.shape)
    if len(label.shape) == len(evaluated["label"].shape):
        label = replace(label, shape=evaluated["label"].shape)
    return {**train, "image": image, "label": label}


def refuse_sizes_that_do_not_fit(parts: StepConfig, state: TrainState, split: Split) -> None:
    """Raise RecipeError where a network has weights that fit one size alone."""
    choices = choices_among(parts.train_ops)
    if choices == 1:
        return
    (position,) = (n for n, op in enumerate(parts.train_ops) if op.choices > 1)
    where = f"dataset.train.ops.{position} ({parts.train_ops[position].name})"
    if parts.curvature is not None:
        problem = "can't be had with an optimizer that looks at the inputs of layers; take another"
        raise RecipeError([f"{where}: {problem}"])
    count = parts.accumulate * (1 if parts.shards is None else parts.shards.count)

    def shapes(*shape: int, dtype: object = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    columns = {
        name: shapes(count, *column.shape[1:], dtype=column.dtype)
        for name, column in split.columns.items()
    }
    sample = shapes(count)
    batch = Batch(columns, shapes(2, dtype=np.uint32), shapes(), sample, shapes())  # type: ignore[arg-type]
    for number in range(choices):
        chosen = replace(parts, train_ops=chosen_ops(parts.train_ops, number), shards=None)
        try:
            jax.eval_shape(partial(gradients_of, chosen), state, batch)
        except (ValueError, TypeError, FlaxError) as error:
            reason = str(error).splitlines()[0]
            raise RecipeError(
                [
                    f"{where}: the network can't take all sizes: {reason}; take a network that "
                    "averages over positions before its dense layers"
                ]
            ) from error
