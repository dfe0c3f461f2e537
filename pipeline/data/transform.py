"""Functions that apply lists of map ops, and ops that move labels of pixels with the pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import BatchOp, GeometricOp, MapOp, WrappedOp
from pipeline.data.random import scale_to_integers, uniforms
from pipeline.data.targets import Targets

CHOICE_OP = (1 << 30) + 1
"""Op number in the key that draws a step's variant, larger than any index of a map op."""


def compute_column_specs(
    ops: Sequence[MapOp], specs: Mapping[str, ColumnSpec]
) -> dict[str, ColumnSpec]:
    """Return the specs of all columns after all ops. Raises ValueError for an op that can't be
    applied, beginning with its position and name: `ops.2 (normalize): `."""
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


def fit_to_classes(ops: Sequence[MapOp], classes: int) -> tuple[MapOp, ...]:
    """Return the ops, with `classes` set in each `BatchOp` whose recipe doesn't set it."""
    result = []
    for op in ops:
        lacks_classes = isinstance(op, BatchOp) and op.classes is None
        result.append(op.model_copy(update={"classes": classes}) if lacks_classes else op)
    return tuple(result)


def replace_targets(ops: Sequence[MapOp], targets: Targets) -> Targets:
    """Return the targets of the labels after all ops."""
    for op in ops:
        targets = op.replace_targets(targets)
    return targets


def count_choices(ops: Sequence[MapOp]) -> int:
    """Return the number of variants of a list of ops, one of which is drawn for each step."""
    return max((op.choices for op in ops), default=1)


def select_variants(ops: Sequence[MapOp], number: int) -> tuple[MapOp, ...]:
    """Return each op's variant with this number; ops that have no variants stay the same."""
    return tuple(op.select_variant(number) for op in ops)


def draw_choice(xp: Any, choices: int, seed: Any, step: Any) -> Any:
    """Return the number of a step's variant, int32 (), a pure function of (seed, step)."""
    draws = uniforms(xp, seed, np.int32(0), xp.asarray(step).reshape(1), CHOICE_OP, 1)
    return scale_to_integers(xp, draws, choices)[0, 0]


def apply_ops(
    xp: Any, ops: Sequence[MapOp], columns: Mapping[str, Any], seed: Any, epoch: Any, sample: Any
) -> dict[str, Any]:
    """Return columns, (batch, *shape), mapped by ops that `compute_column_specs` has accepted. `xp`
    is numpy or jax.numpy. Random numbers depend on `seed`, the words of `seed_words`, on the sample
    indices `sample`, (batch,), and on their `epoch`, (batch,) or a scalar."""
    result = dict(columns)
    for position, op in enumerate(ops):
        draws = uniforms(xp, seed, epoch, sample, position, op.draws)
        values = tuple(result[name] for name in op.columns)
        result.update(zip(op.columns, op.map(xp, values, draws), strict=True))
    return result


class JointGeometricOp(WrappedOp):
    """An op on images that also moves the labels of pixels, with the same random numbers."""

    op: GeometricOp
    fill: int
    """The label of pixels from outside the image."""

    @property
    def columns(self) -> tuple[str, ...]:
        return self.op.column, "label"

    def outputs(self, values: tuple[ColumnSpec, ...]) -> tuple[ColumnSpec, ...]:
        image, labels = values
        mapped = self.op.output(image)
        num_axes = len(labels.shape)
        # Labels (tokens,) belong to images (tokens, 1, channels).
        if num_axes == 1 and mapped.shape[1] != 1:
            raise ValueError(
                f"makes {mapped.shape} of images of shape {image.shape}, and labels {labels.shape} "
                "are one for each row; it must leave the width 1"
            )
        return mapped, replace(labels, shape=mapped.shape[:num_axes])

    def map(self, xp: Any, values: tuple[Any, ...], uniforms: Any) -> tuple[Any, ...]:
        images, labels = values
        moved = self.op.move_labels(xp, labels.reshape(*images.shape[:3], 1), uniforms, self.fill)
        return self.op(xp, images, uniforms), moved.reshape(moved.shape[: labels.ndim])


def make_joint_ops(
    ops: Sequence[MapOp], specs: Mapping[str, ColumnSpec], ignore_index: int | None
) -> tuple[MapOp, ...]:
    """Return the ops. Those that move pixels with labels are replaced by a `JointGeometricOp`.
    Raises ValueError, beginning with the op's position, if an op can't move labels."""
    result: list[MapOp] = []
    for position, op in enumerate(ops):
        specs_before = compute_column_specs(result, specs)
        try:
            result.append(_join_labels(op, specs_before, ignore_index))
        except ValueError as error:
            raise ValueError(f"ops.{position} ({op.name}): {error}") from error
    return tuple(result)


def _join_labels(op: MapOp, specs: Mapping[str, ColumnSpec], ignore_index: int | None) -> MapOp:
    """Return an op, or the op that replaces it in `make_joint_ops`. Raises ValueError if it can't
    move the labels of the pixels that it moves."""
    moves_pixels = op.moves_pixels and "image" in op.columns
    if not moves_pixels or not _have_pixel_labels(specs["label"], specs["image"]):
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
    """Return whether an image has a label for each pixel or token. Raises ValueError for labels of
    several axes that aren't integers, or have another height and width than the image."""
    if image.layout != "hwc" or len(image.shape) != 3:
        return False  # the op raises an error for such images
    is_integer = np.issubdtype(np.dtype(labels.dtype), np.integer)
    if len(labels.shape) < 2:
        # Images (tokens, 1, channels) have labels (tokens,). Others are labels of the sample.
        return is_integer and (*labels.shape, 1) == image.shape[:2]
    if not is_integer:
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


def describe_unequal_shapes(train_shape: Sequence[int], eval_shape: Sequence[int]) -> str:
    """Return the message for map ops whose images differ in shape between the two splits."""
    shapes = f"{tuple(train_shape)} in training and {tuple(eval_shape)} in evaluation"
    return f"dataset.eval.ops: must return images of the same shape as dataset.train.ops; {shapes}"


def has_constant_labels(ops: Sequence[MapOp]) -> bool:
    """Return whether all samples have the same labels, which metrics of labels can't measure."""
    return any(op.has_constant_labels for op in ops)
