"""The map from pixels of the raw image, 0 to 1, to a network's inputs. The radius of an attack is
in units of these pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import BatchOp, MapOp, WrappedOp
from pipeline.data.ops.color import RandomColorAdjust
from pipeline.data.ops.geometry import Cutout
from pipeline.data.ops.image import GeometricOp
from pipeline.data.ops.policies import Policy
from pipeline.data.ops.values import Hwc2Chw, Normalize, Rescale, TypeCast

RANGE_KEEPING = (BatchOp, GeometricOp, RandomColorAdjust, Cutout, Policy, Hwc2Chw, TypeCast)
"""Ops that change images but not the range of their values."""


@dataclass(frozen=True)
class PixelScale:
    """The map from pixels to inputs of a network, pixel * factor + shift. Factor and shift have one
    value, or one for each channel."""

    factor: tuple[float, ...]
    shift: tuple[float, ...]

    def to_inputs(self, pixels: Any) -> Any:
        """Return the inputs of pixels (B, H, W, C)."""
        return pixels * np.array(self.factor, np.float32) + np.array(self.shift, np.float32)

    def to_pixels(self, inputs: Any) -> Any:
        """Return the pixels, 0 to 1, of inputs (B, H, W, C)."""
        factor = np.array(self.factor, np.float32)
        shift = np.array(self.shift, np.float32)
        return ((inputs - shift) / factor).clip(0, 1)


def find_white(image: ColumnSpec, brightest: int) -> float:
    """Return the value of a white pixel of raw images: `brightest` if values are integers, else
    1."""
    return float(brightest) if np.issubdtype(np.dtype(image.dtype), np.integer) else 1.0


def find_pixel_scale(ops: Sequence[MapOp], white: float) -> PixelScale:
    """Return the scale after map ops on raw images, whose white pixels have the value `white`.
    Raises ValueError for an op that changes values in another way than rescale and normalize, and
    for a factor of 0. Its text begins with the op's position and name."""
    factor = np.array([white])
    shift = np.zeros(1)
    for position, entry in enumerate(ops):
        op = entry.op if isinstance(entry, WrappedOp) else entry
        if "image" not in op.columns:
            continue
        if isinstance(op, Rescale):
            factor = factor * op.factor
            shift = shift * op.factor + op.shift
        elif isinstance(op, Normalize):
            factor = factor / np.array(op.std)
            shift = (shift - np.array(op.mean)) / np.array(op.std)
        elif not isinstance(op, RANGE_KEEPING):
            raise ValueError(
                f"ops.{position} ({op.name}): changes values so that they have no radius in "
                "pixels; must be rescale or normalize"
            )
        if not factor.all():
            raise ValueError(f"ops.{position} ({op.name}): must not have factor 0")
    return PixelScale(tuple(factor.tolist()), tuple(shift.tolist()))
