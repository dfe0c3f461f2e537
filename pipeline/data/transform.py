"""Run lists of map ops. Labels of pixels move with their pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import GeometricOp, MapOp, Op
from pipeline.data.random import integers, uniforms

CHOICE_OP = (1 << 30) + 1
"""The op number that keys the op of a step: no list of map ops is as long."""


def compute_column_specs(
    ops: Sequence[MapOp], specs: Mapping[str, ColumnSpec]
) -> dict[str, ColumnSpec]:
    """Specs of the columns after all ops.

    Raises ValueError that opens with the op's position and name, such as `ops.2 (normalize): `.
    """
    result = dict(specs)
    for position, op in enumerate(ops):
        try:
            for name in op.columns:
                if name not in result:
                    columns = ", ".join(sorted(result))
                    raise ValueError(f"there is no column {name!r}; the columns are {columns}")
            values = tuple(result[name] for name in op.columns)
            result.update(zip(op.columns, op.outputs(values), strict=True))
        except ValueError as error:
            raise ValueError(f"ops.{position} ({op.name}): {error}") from error
    return result


def count_choices(ops: Sequence[MapOp]) -> int:
    """Return the number of lists of ops, one of which is drawn for each step; 1 if all are
    fixed."""
    return max((op.choices for op in ops), default=1)


def select_ops(ops: Sequence[MapOp], number: int) -> tuple[MapOp, ...]:
    """Return the list of ops of this number."""
    return tuple(op.chosen(number) for op in ops)


def draw_choice(xp: Any, choices: int, seed: Any, step: Any) -> Any:
    """Return the number of the list of ops of a step, counted from 0: int32 (), a pure function of
    (seed, step), the same in numpy and jax.numpy."""
    draws = uniforms(xp, seed, np.int32(0), xp.asarray(step).reshape(1), CHOICE_OP, 1)
    return integers(xp, draws, choices)[0, 0]


def apply_ops(
    xp: Any, ops: Sequence[MapOp], columns: Mapping[str, Any], seed: Any, epoch: Any, sample: Any
) -> dict[str, Any]:
    """Map columns of shape (batch, *shape) through ops that `compute_column_specs` has accepted.

    `xp` is numpy or jax.numpy. `seed` are the words of `seed_words`, `sample` the sample indices
    (batch,) and `epoch` their epoch, (batch,) or a scalar: the key of the random ops.
    """
    result = dict(columns)
    for position, op in enumerate(ops):
        draws = uniforms(xp, seed, epoch, sample, position, op.draws)
        values = tuple(result[name] for name in op.columns)
        result.update(zip(op.columns, op.map(xp, values, draws), strict=True))
    return result


class JointGeometricOp(MapOp):
    """An op on images, and the same on the labels of their pixels, from the same draws."""

    op: GeometricOp
    fill: int
    """The label of pixels from outside of the image."""

    @property
    def draws(self) -> int:
        return self.op.draws

    @property
    def choices(self) -> int:
        return self.op.choices

    def chosen(self, number: int) -> JointGeometricOp:
        return self.model_copy(update={"op": self.op.chosen(number)})

    @property
    def columns(self) -> tuple[str, ...]:
        return self.op.column, "label"

    def outputs(self, values: tuple[ColumnSpec, ...]) -> tuple[ColumnSpec, ...]:
        image, labels = values
        mapped = self.op.output(image)
        positions = len(labels.shape)
        if positions == 1 and mapped.shape[1] != 1:
            raise ValueError(
                f"makes {mapped.shape} of images of shape {image.shape}, and labels {labels.shape} "
                "are one for each row; it must leave the width 1"
            )
        return mapped, replace(labels, shape=mapped.shape[:positions])

    def map(self, xp: Any, values: tuple[Any, ...], uniforms: Any) -> tuple[Any, ...]:
        images, labels = values
        as_images = labels.reshape(*images.shape[:3], 1)
        shifted = self.op.move_labels(xp, as_images, uniforms, self.fill)
        return self.op(xp, images, uniforms), shifted.reshape(shifted.shape[: labels.ndim])


def make_joint_ops(
    ops: Sequence[MapOp], specs: Mapping[str, ColumnSpec], ignore_index: int | None
) -> tuple[MapOp, ...]:
    """Make the ops that move pixels move their labels too, if pixels have labels.

    Raises ValueError that opens with the op's position and name if labels can't follow it.
    """
    result: tuple[MapOp, ...] = ()
    for position, op in enumerate(ops):
        before = compute_column_specs(result, specs)
        try:
            result = *result, _join_labels(op, before, ignore_index)
        except ValueError as error:
            raise ValueError(f"ops.{position} ({op.name}): {error}") from error
    return result


def _join_labels(op: MapOp, specs: Mapping[str, ColumnSpec], ignore_index: int | None) -> MapOp:
    moves = isinstance(op, Op) and op.moves_pixels and op.column == "image"
    if not moves or not _have_pixel_labels(specs["label"], specs["image"]):
        return op
    if not isinstance(op, GeometricOp):
        raise ValueError("moves pixels in a way that labels of pixels can't follow; leave it out")
    if op.creates_border and ignore_index is None:
        raise ValueError(
            "makes pixels that have no label; set dataset.ignore_index to the label that they get, "
            "such as 255"
        )
    return JointGeometricOp(name=op.name, op=op, fill=ignore_index or 0)


def _have_pixel_labels(labels: ColumnSpec, image: ColumnSpec) -> bool:
    """Return whether an image has one label for each pixel or token.

    Raises ValueError for labels of other positions, and for labels that are not integers.
    """
    if image.layout != "hwc" or len(image.shape) != 3:
        return False  # no op takes such images; the op raises its error
    integer = np.issubdtype(np.dtype(labels.dtype), np.integer)
    if len(labels.shape) < 2:
        # Labels of tokens have a position; a few labels of a sample, or a one-hot label, have none.
        return integer and (*labels.shape, 1) == image.shape[:2]
    if not integer:
        raise ValueError(
            f"moves pixels, and their labels are {labels.dtype} of shape {labels.shape}; list the "
            "op that makes them so, such as one_hot, after it"
        )
    if labels.shape != image.shape[:2]:
        raise ValueError(
            f"moves pixels of images of shape {image.shape}, and labels of shape {labels.shape} "
            "are not one for each of them; leave it out"
        )
    return True
