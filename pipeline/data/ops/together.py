"""Map ops of several columns: an image moved with its masks and boxes, and a second view of it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from pipeline.core.registry import ComponentOf, Seq, component
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import MapOp, WrappedOp
from pipeline.data.ops.image import GeometricOp


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
