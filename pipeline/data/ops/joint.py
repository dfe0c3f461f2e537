"""Ops that move the labels of pixels with the pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import MapOp, WrappedOp
from pipeline.data.ops.image import GeometricOp
from pipeline.data.ops.together import MoveTogether
from pipeline.data.transform import compute_column_specs


class JointGeometricOp(WrappedOp):
    """An op on images that also moves the labels of pixels, with the same random numbers."""

    op: GeometricOp
    fill: int
    """The label of pixels from outside the image."""

    @property
    def columns(self) -> tuple[str, ...]:
        return self.op.column, "label"

    @property
    def written(self) -> tuple[str, ...]:
        return self.columns

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
    image = specs.get(op.columns[0])
    # `compute_column_specs` names a column that isn't there.
    if not op.moves_pixels or image is None or not _have_pixel_labels(specs["label"], image):
        return op
    if isinstance(op, MoveTogether) and "label" not in op.also:
        if op.fill is not None and op.fill != ignore_index:
            raise ValueError(
                f"fill = {op.fill}: moves labels of pixels too; must be dataset.ignore_index = "
                f"{'null' if ignore_index is None else ignore_index}"
            )
        return op.model_copy(update={"also": (*op.also, "label"), "fill": ignore_index})
    if isinstance(op, MoveTogether):
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
