"""Batch ops that mix each sample and its label with a partner, another sample of the batch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import PositiveFloat

from pipeline.core.registry import component
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import BatchOp
from pipeline.data.ops.color import blend, round_factors
from pipeline.data.ops.image import (
    STEPS,
    Probability,
    draw_rows,
    require_image,
    require_image_dtype,
)
from pipeline.data.ops.values import OneHot
from pipeline.data.random import scale_to_integers


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
