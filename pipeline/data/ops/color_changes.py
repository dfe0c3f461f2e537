"""One change of many to each image of a batch, without a branch, for policies.

Every change a policy can make is a row of tables computed on the host: an affine map, a table of
levels, a factor of a blend. A sample picks its row, so the compiled step has each kind of change
once, however many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.data.ops.affine import (
    Interpolation,
    Maps,
    fixed_maps,
    rotation,
    shear,
    translation,
    warp,
)
from pipeline.data.ops.color import blend_table, grey, look_up_blend, mean_grey
from pipeline.data.ops.image import Size
from pipeline.data.ops.lookup_tables import (
    LEVELS,
    brightened,
    equalized,
    histograms,
    inverted,
    look_up,
    posterized,
    smoothed,
    solarized,
    stretched,
)

BLENDS = ("Contrast", "Color", "Sharpness")


@dataclass(frozen=True)
class Change:
    """A change and its magnitude, in the terms of MindSpore's policies."""

    name: str
    magnitude: float = 0.0


@dataclass(frozen=True)
class Changes:
    """Tables of n changes: affine maps, levels int32 (n, 256), names, and numbers of blends.

    `blends` are those of all factors, uint8 (blends, 256, 256), `blend_numbers` int32 (n,).
    """

    maps: Maps
    levels: np.ndarray
    names: np.ndarray
    blends: np.ndarray
    blend_numbers: np.ndarray


def tabulate(changes: Sequence[Change], size: Size) -> Changes:
    """The tables of changes to images of a size, (height, width)."""
    height, width = size
    blends = {_blend(change): _blend_table(change) for change in changes}
    numbers = {blend: number for number, blend in enumerate(blends)}
    return Changes(
        fixed_maps(np.stack([_matrix(change, height, width) for change in changes]), height, width),
        np.stack([_levels(change) for change in changes]).astype(np.int32),
        np.array([change.name for change in changes]),
        np.concatenate(list(blends.values())),
        np.array([numbers[_blend(change)] for change in changes], np.int32),
    )


def _blend(change: Change) -> tuple[float, bool]:
    """The factor of a blend, and whether it is for sharpness."""
    if change.name not in BLENDS:
        return 1.0, False
    return _factor(change), change.name == "Sharpness"


def _factor(change: Change) -> float:
    """1 + the magnitude, which MindSpore adds in float32."""
    return float(np.float32(1) + np.float32(change.magnitude))


def _blend_table(change: Change) -> np.ndarray:
    factor, sharpness = _blend(change)
    return blend_table(factor, "value" if sharpness else "base")


def _matrix(change: Change, height: int, width: int) -> np.ndarray:
    """The map from target to source pixels, float64 (2, 3)."""
    centre, amount = ((width - 1) / 2, (height - 1) / 2), change.magnitude
    match change.name:
        case "ShearX":
            return shear(amount, 0, centre)
        case "ShearY":
            return shear(0, amount, centre)
        case "TranslateX":
            return translation(amount, 0)
        case "TranslateY":
            return translation(0, amount)
        case "Rotate":
            return rotation(np.array(amount), centre)
    return translation(0, 0)


def _levels(change: Change) -> np.ndarray:
    """The table of levels, (256,)."""
    match change.name:
        case "Brightness":
            return brightened(_factor(change))
        case "Posterize":
            return posterized(int(change.magnitude))
        case "Solarize":
            return solarized(change.magnitude)
        case "Invert":
            return inverted()
    return np.arange(LEVELS)


def make_changes(
    xp: Any,
    values: Any,
    changes: Changes,
    numbers: Any,
    interpolation: Interpolation,
    fill: np.ndarray,
) -> Any:
    """Change each image of RGB bytes by the row of its number, int32 (batch,)."""
    values = warp(xp, values, changes.maps.at(xp, numbers), interpolation, fill)
    values = look_up(xp, values, _chosen_levels(xp, values, changes, numbers))
    base = mean_grey(values)
    for name, candidate in (
        ("Color", grey(values)[..., None]),
        ("Sharpness", smoothed(xp, values)),
    ):
        base = xp.where(_is(xp, changes, numbers, (name,)), candidate, base)
    blend = xp.asarray(changes.blend_numbers)[numbers]
    blended = look_up_blend(xp, base, values, changes.blends, blend)
    return xp.where(_is(xp, changes, numbers, BLENDS), blended, values)


def _is(xp: Any, changes: Changes, numbers: Any, names: Sequence[str]) -> Any:
    """Whether each image's change has one of these names, bool (batch, 1, 1, 1)."""
    return xp.asarray(np.isin(changes.names, names))[numbers][:, None, None, None]


def _chosen_levels(xp: Any, values: Any, changes: Changes, numbers: Any) -> Any:
    """The table of levels of each image's channels, int32 (batch, 3, 256)."""
    counts = histograms(xp, values)
    levels = xp.asarray(changes.levels)[numbers][:, None]
    for name, table in (
        ("AutoContrast", stretched(xp, counts)),
        ("Equalize", equalized(xp, counts)),
    ):
        levels = xp.where(_is(xp, changes, numbers, (name,))[..., 0], table, levels)
    return levels
