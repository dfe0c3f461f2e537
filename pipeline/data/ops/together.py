"""Map ops of several values at once: mixed samples of a batch, and an image moved with its masks,
boxes and labels of pixels.

An op may also make a second view of an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveFloat, field_validator

from pipeline.core.registry import ComponentOf, Seq, component
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import BatchOp, MapOp, WrappedOp
from pipeline.data.ops.color import blend, round_factors
from pipeline.data.ops.image import (
    STEPS,
    GeometricOp,
    Probability,
    draw_rows,
    require_image,
    require_image_dtype,
)
from pipeline.data.ops.values import OneHot
from pipeline.data.random import scale_to_integers
from pipeline.data.transform import compute_column_specs


@component("op")
class MixUp(BatchOp):
    """Blend each image and its label with a partner's, in the ratio lambda to 1 - lambda.

    Lambda is drawn from Beta(alpha, alpha) once per batch. The partners are a permutation of the
    batch (Zhang et al., 2018; MindSpore's MixUpBatch).
    """

    name: Literal["mix_up"] = "mix_up"
    column: str = "image"
    alpha: PositiveFloat = 1.0

    draws: ClassVar[int] = 2

    def outputs(self, values: tuple[ColumnSpec, ...]) -> tuple[ColumnSpec, ...]:
        image, label = values
        require_image_dtype(image.dtype)
        return image, _fit_label(self, label)

    def map(self, xp: Any, values: tuple[Any, ...], uniforms: Any) -> tuple[Any, ...]:
        partner = draw_partners(xp, uniforms[:, 0])
        shares = list_beta_steps(self.alpha)
        # The draw of the first sample is used for the whole batch.
        number = scale_to_integers(xp, uniforms[:1, 1], len(shares))
        return mix_up(xp, _encode_label(xp, self, values), partner, shares, number)


def mix_up(
    xp: Any, values: tuple[Any, ...], partner: Any, shares: np.ndarray, number: Any
) -> tuple[Any, ...]:
    """Return (images, labels) mixed with their partners, which are in the rows `partner`, int
    (batch,). The weight of a sample is shares[number], with `number` int32 (1,), and the weight of
    its partner 1 - shares[number]."""
    images, labels = values
    share = xp.asarray(shares)[number]
    mixed_labels = _mix_with_partner(labels, partner, share)
    if images.dtype == np.uint8:
        return blend(xp, images[partner], images, shares, number), mixed_labels
    return _mix_with_partner(images, partner, share), mixed_labels


def _mix_with_partner(values: Any, partner: Any, share: Any) -> Any:
    """Return values * share + partners * (1 - share) in their dtype; `share` is (batch or 1,)."""
    share = share.reshape(-1, *(1,) * (values.ndim - 1))
    partners = values[partner].astype(np.float32)
    return (values.astype(np.float32) * share + partners * (1 - share)).astype(values.dtype)


def _encode_label(xp: Any, op: BatchOp, values: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return images and one-hot labels, from labels that `_fit_label` has accepted."""
    images, labels = values
    if op.classes is not None and labels.ndim == 1:
        labels = OneHot(classes=op.classes)(xp, labels, None)
    return images, labels


def _fit_label(op: BatchOp, label: ColumnSpec) -> ColumnSpec:
    """Return the spec of mixed labels. Raises ValueError for labels that can't be mixed."""
    if op.classes is not None and label.shape == ():
        return OneHot(classes=op.classes).output(label)
    if len(label.shape) != 1 or label.dtype != "float32":
        raise ValueError(
            f"mixes one-hot float32 labels, not {label.dtype} of shape {label.shape}; list a "
            "one_hot before it"
        )
    return label


def draw_partners(xp: Any, uniforms: Any) -> Any:
    """Return the row of each sample's partner: a permutation, int (batch,), drawn by `uniforms`."""
    if xp is np:
        return np.argsort(uniforms, kind="stable")
    return xp.argsort(uniforms, stable=True)


@lru_cache
def list_beta_steps(alpha: float) -> np.ndarray:
    """Return the quantiles of Beta(alpha, alpha) in the middles of STEPS equally likely steps,
    rounded by `round_factors`, float32 (STEPS,)."""
    from scipy.special import betaincinv

    return round_factors(betaincinv(alpha, alpha, (np.arange(STEPS) + 0.5) / STEPS))


@component("op")
class CutMix(BatchOp):
    """Replace a box by the same box of a partner's image, and mix the labels by the box's area.

    Each image is changed with probability `prob`. Lambda is drawn from Beta(alpha, alpha), and the
    box has 1 - lambda of the area before it is clipped. The partners are a permutation of the batch
    (Yun et al., 2019; MindSpore's CutMixBatch).
    """

    name: Literal["cut_mix"] = "cut_mix"
    column: str = "image"
    alpha: PositiveFloat = 1.0
    prob: Probability = 1.0

    draws: ClassVar[int] = 5

    def outputs(self, values: tuple[ColumnSpec, ...]) -> tuple[ColumnSpec, ...]:
        image, label = values
        require_image(image)
        return image, _fit_label(self, label)

    def map(self, xp: Any, values: tuple[Any, ...], uniforms: Any) -> tuple[Any, ...]:
        images, labels = _encode_label(xp, self, values)
        height, width = images.shape[1:3]
        sides = np.sqrt(1 - list_beta_steps(self.alpha))[:, None] * np.array([height, width])
        extents = draw_rows(xp, uniforms[:, 2], sides.astype(np.int32))
        rows = _mark_extent(xp, uniforms[:, 3], extents[:, 0], height)
        columns = _mark_extent(xp, uniforms[:, 4], extents[:, 1], width)
        is_changed = uniforms[:, 1] < self.prob
        rows = rows & is_changed[:, None]  # the box of an unchanged image is empty
        box = rows[:, :, None] & columns[:, None, :]
        partner = draw_partners(xp, uniforms[:, 0])
        area_outside = height * width - rows.sum(axis=1) * columns.sum(axis=1)
        share = area_outside.astype(np.float32) * np.float32(1 / (height * width))
        mixed = xp.where(box[..., None], images[partner], images)
        return mixed, _mix_with_partner(labels, partner, share)


def _mark_extent(xp: Any, uniforms: Any, extent: Any, length: int) -> Any:
    """Return a mask of the pixels of boxes along an axis of `length`, bool (batch, length).

    `uniforms`, (batch,), draw the centre of a box; `extent`, int (batch,), is its side. As in
    MindSpore, the centre may be right after the last pixel, a box that is clipped at the end lacks
    the last pixel, and a box has at least one pixel.
    """
    centre = scale_to_integers(xp, uniforms, length + 1)
    half = extent // 2
    begin = (centre - half).clip(0, length - 1)
    end = (centre + half).clip(0, length - 1)
    pixel = np.arange(length, dtype=np.int32)
    return (begin[:, None] <= pixel) & (pixel < xp.maximum(end, begin + 1)[:, None])


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
        _require_label(self.geometric, self.fill, spec.dtype)
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

    def narrow(self, columns: Set[str]) -> MapOp:
        return self if "label" in columns else self.op

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
    _require_label(op, ignore_index, specs["label"].dtype)
    return JointGeometricOp(name=op.name, op=op, fill=ignore_index or 0)


def _require_label(op: GeometricOp, fill: int | None, dtype: str) -> None:
    """Raise ValueError if an op makes pixels with the label `fill`, which the dtype can't hold."""
    bounds = np.iinfo(dtype)
    if op.creates_border and fill is not None and not bounds.min <= fill <= bounds.max:
        raise ValueError(
            f"makes pixels with the label {fill}, and labels are {dtype}; must be {bounds.min} to "
            f"{bounds.max}"
        )


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
