"""Map ops of several columns: an image moved with its masks, boxes and labels of pixels.

An op may also make a second view of an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from pipeline.core.registry import ComponentOf, Seq, component
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import MapOp, WrappedOp
from pipeline.data.ops.image import GeometricOp
from pipeline.data.transform import compute_column_specs


@component("op")
class MoveTogether(WrappedOp):
    """Apply an op that moves pixels to an image, and move other columns with it, by the same draws.

    `also` names these columns. Whole numbers (height, width) are a mask, whose labels aren't mixed;
    its pixels from outside the image are `fill`. Values (height, width, channels) are another
    image, to which the op is applied. float32 (boxes, 4) are boxes: shares of height and width
    (top, left, bottom, right), clipped at the edges. A box outside becomes zeros, and a rotated one
    the upright box around it.
    """

    moves_pixels: ClassVar[bool] = True
    name: Literal["move_together"] = "move_together"
    op: Annotated[MapOp, ComponentOf("op")]
    also: Annotated[Seq[str], Field(min_length=1)]
    fill: int | None = None

    @field_validator("op")
    @classmethod
    def _require_geometric(cls, op: MapOp) -> MapOp:
        if not isinstance(op, GeometricOp):
            raise ValueError(
                f"{op.name}: must be an op that moves pixels in a way that others can follow, such "
                "as random_crop or a flip"
            )
        return op

    @property
    def geometric(self) -> GeometricOp:
        """The op."""
        assert isinstance(self.op, GeometricOp), "the validator refuses others"
        return self.op

    @property
    def columns(self) -> tuple[str, ...]:
        return self.geometric.column, *self.also

    @property
    def written(self) -> tuple[str, ...]:
        return self.columns

    def narrow(self, columns: Set[str]) -> MapOp:
        also = tuple(name for name in self.also if name in columns)
        return self.model_copy(update={"also": also}) if also else self.op

    def outputs(self, values: tuple[ColumnSpec, ...]) -> tuple[ColumnSpec, ...]:
        image, *others = values
        mapped = self.op.outputs((image,))[0]
        if len(set(self.columns)) < len(self.columns):
            raise ValueError(f"also = {list(self.also)}: must be different, and not the image")
        return mapped, *(
            self._move_spec(name, spec, image, mapped)
            for name, spec in zip(self.also, others, strict=True)
        )

    def _move_spec(
        self, name: str, spec: ColumnSpec, image: ColumnSpec, mapped: ColumnSpec
    ) -> ColumnSpec:
        """Return the spec of a moved column. Raises ValueError if it can't follow the image."""
        size = image.shape[:2]
        if _are_boxes(spec):
            zeros = np.zeros((1, *spec.shape), np.float32)
            self.geometric.move_boxes(np, zeros, np.zeros((1, self.draws), np.float32), *size)
            return spec
        is_mask = _is_mask(spec)
        is_image = len(spec.shape) == 3 and spec.layout == "hwc"
        if not is_mask and not is_image:
            raise ValueError(
                f"also: {name} is {spec.dtype} of shape {spec.shape}; must be a mask of whole "
                "numbers (height, width), an image, or boxes float32 (boxes, 4)"
            )
        if spec.shape[:2] != size:
            raise ValueError(
                f"also: {name} is {spec.shape[0]}x{spec.shape[1]}, and the image "
                f"{size[0]}x{size[1]}; must have the same size"
            )
        if is_image:
            return self.op.outputs((spec,))[0]
        if self.geometric.creates_border and self.fill is None:
            raise ValueError(
                f"makes pixels that {name} has no label for; set fill to the label that they get"
            )
        return replace(spec, shape=mapped.shape[:2])

    def map(self, xp: Any, values: tuple[Any, ...], uniforms: Any) -> tuple[Any, ...]:
        images = values[0]
        size = images.shape[1:3]

        def move(column: Any) -> Any:
            if column.ndim == 4:
                return self.geometric(xp, column, uniforms)
            if np.issubdtype(column.dtype, np.floating):
                return self.geometric.move_boxes(xp, column, uniforms, *size)
            labels = self.geometric.move_labels(xp, column[..., None], uniforms, self.fill or 0)
            return labels[..., 0]

        return self.geometric(xp, images, uniforms), *map(move, values[1:])


def _are_boxes(spec: ColumnSpec) -> bool:
    return spec.dtype == "float32" and len(spec.shape) == 2 and spec.shape[1] == 4


def _is_mask(spec: ColumnSpec) -> bool:
    return np.issubdtype(np.dtype(spec.dtype), np.integer) and len(spec.shape) == 2


@component("op")
class CopyColumn(MapOp):
    """Make a column `to` of the values of another, such as a second view of an image.

    Later ops name either column, and each op draws separately.
    """

    name: Literal["copy"] = "copy"
    column: str = "image"
    to: Annotated[str, Field(pattern=r"^\w+$")]

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def written(self) -> tuple[str, ...]:
        return (self.to,)

    def outputs(self, values: tuple[ColumnSpec, ...]) -> tuple[ColumnSpec, ...]:
        return values

    def map(self, xp: Any, values: tuple[Any, ...], uniforms: Any) -> tuple[Any, ...]:
        return values


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
