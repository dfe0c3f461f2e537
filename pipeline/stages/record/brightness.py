"""Brightness of images, by which an image of another kind than the training images is noticed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from pipeline.core.errors import DataError, printable
from pipeline.data.columns import Column

MEASURED_SAMPLES = 16
"""Most images whose brightness is measured, since each may have to be decoded."""
MIN_SPREADS = 3.0
"""Distance from the training images' mean, in their standard deviations, that is unusual."""
LEAST_SPREAD = 0.02
"""Least standard deviation that is assumed, as a share of white."""
NEARER = 0.5
"""An image looks inverted if that brings its mean this much nearer, as a share of the distance."""
MAX_DIM = 0.5
"""Training images have another scale than 0 to 255 if none of their pixels is above this share."""
WHITE = 255


@dataclass(frozen=True)
class Brightness:
    """Mean and standard deviation of the mean pixels of training images, and the largest pixel."""

    mean: float
    std: float
    largest: float

    def to_dict(self) -> dict[str, float]:
        """Return the fields as a tree for JSON."""
        return asdict(self)


def measure_brightness(column: Column) -> Brightness | None:
    """Measure evenly spread images of a column (n, height, width, channels) of bytes.

    None for other samples, and if an image can't be read.
    """
    num_images = column.shape[0]
    if column.dtype != np.uint8 or len(column.shape) != 4 or not num_images:
        return None
    count = min(num_images, MEASURED_SAMPLES)
    rows = np.arange(count) * num_images // count
    try:
        images = np.asarray(column[rows])
    except DataError:
        return None
    means = images.mean(axis=(1, 2, 3))
    return Brightness(float(means.mean()), float(means.std()), float(images.max()))


def parse_brightness(tree: Any) -> Brightness | None:
    """Return the brightness in a JSON object; None for none. Raises ValueError for other JSON."""
    if tree is None:
        return None
    names = [field.name for field in fields(Brightness)]
    if not isinstance(tree, Mapping) or sorted(tree) != sorted(names):
        raise ValueError(f"brightness must have {', '.join(names)}")
    if not all(type(value) in (int, float) and 0 <= value <= WHITE for value in tree.values()):
        raise ValueError(f"brightness must be numbers from 0 to {WHITE}")
    return Brightness(**tree)


@dataclass(frozen=True)
class UnusualImage:
    """An image of another brightness than the training images."""

    name: str
    mean: float
    largest: float
    divisor: float
    """Number by which its pixels would have the training images' scale; 1 if they have."""
    is_inverted: bool
    """Whether the mean of the inverted image is nearer to that of the training images."""


def find_unusual_image(name: str, image: np.ndarray, usual: Brightness) -> UnusualImage | None:
    """Return what is unusual about an image of bytes (height, width, channels); None if nothing."""
    mean = float(image.mean())
    largest = float(image.max())
    is_dim = _is_dim(usual)
    divisor = WHITE / usual.largest if is_dim and largest > 2 * usual.largest > 0 else 1.0
    white = usual.largest if is_dim else float(WHITE)
    distance = abs(mean / divisor - usual.mean)
    inverted_mean = white - mean / divisor
    is_unusual = distance > MIN_SPREADS * max(usual.std, LEAST_SPREAD * white)
    is_nearer = abs(inverted_mean - usual.mean) < (1 - NEARER) * distance
    is_inverted = is_unusual and is_nearer
    if divisor == 1 and not is_inverted:
        return None
    return UnusualImage(name, mean, largest, divisor, is_inverted)


def _is_dim(usual: Brightness) -> bool:
    """Return whether white is the largest pixel of the training images, not 255."""
    return usual.largest < MAX_DIM * WHITE


def explain_unusual_images(
    unusual: Sequence[UnusualImage], num_images: int, usual: Brightness
) -> str:
    """Return a line about unusual images, of which the first is the example, and what to do."""
    first = unusual[0]
    reasons = []
    advice = []
    if first.divisor != 1:
        look = "have another scale"
        reasons.append(f"pixels reach {first.largest:.0f}, in training {usual.largest:.0f}")
        advice.append(f"divide by {first.divisor:.3g}")
    if first.is_inverted:
        look = "look inverted" if first.divisor == 1 else f"{look} and look inverted"
        reasons.append(
            f"the mean pixel is {first.mean:.0f}, in training {usual.mean:.3g} (standard deviation "
            f"{usual.std:.2g})"
        )
        white = usual.largest if _is_dim(usual) and first.divisor == 1 else WHITE
        way = "PIL.ImageOps.invert" if white == WHITE else f"{white:.0f} - pixel"
        advice.append(f"{way}, which makes it {white - first.mean:.0f}")
    name = printable(first.name)
    if num_images == 1:
        head = f"{name} {look.replace('have', 'has').replace('look', 'looks')}"
    else:
        head = f"{len(unusual):,} of {num_images:,} images {look}, such as {name}"
    return f"{head}: {'; '.join(reasons)}. If so: {', and '.join(advice)}"
