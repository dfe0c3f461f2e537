"""Image files, opened within bounds: their formats, their pixels and the work to decode them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

FORMATS = ("PNG", "JPEG", "BMP")
MAX_PIXELS = 2**26
"""A few kilobytes of PNG can stand for any number of them."""
MAX_SCANS = 200
"""A progressive JPEG is decoded again for each of its scans; encoders write about ten."""
UNREADABLE_IMAGE = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, MemoryError),
    *(OverflowError, Image.DecompressionBombError, Image.DecompressionBombWarning),
)
"""Errors that Pillow raises for damaged or malicious files."""

_SCAN = b"\xff\xda"

# Pillow warns of images above a bound that is beyond ours.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@contextmanager
def open_image(source: Path | bytes, formats: Sequence[str]) -> Iterator[Image.Image]:
    """Open an image, a file or its bytes, without decoding it.

    Raises one of `UNREADABLE_IMAGE` where it is refused.
    """
    opened = BytesIO(source) if isinstance(source, bytes) else source
    with Image.open(opened, formats=list(formats)) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(
                f"it has {image.width:,} x {image.height:,} pixels; at most {MAX_PIXELS:,} are read"
            )
        if image.info.get("progressive"):
            content = source if isinstance(source, bytes) else source.read_bytes()
            if content.count(_SCAN) > MAX_SCANS:
                raise ValueError(f"it has more than {MAX_SCANS} scans")
        yield image


def eight_bits(image: Image.Image) -> Image.Image:
    """The image. Raises ValueError where its pixels have more bits: Pillow would cut them off."""
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"its pixels are {image.mode}, not 8 bits per channel")
    return image


def rgb_pixels(image: Image.Image, height: int, width: int) -> np.ndarray:
    """An opened image as RGB, resized bilinearly where its size differs: uint8 (height, width, 3).

    Raises one of `UNREADABLE_IMAGE`.
    """
    rgb = eight_bits(image).convert("RGB")
    if rgb.size != (width, height):
        rgb = rgb.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(rgb)
