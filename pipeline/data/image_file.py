"""Image files, opened within bounds: their formats, their pixels and the work to decode them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

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
def open_image(path: Path, formats: Sequence[str]) -> Iterator[Image.Image]:
    """Open an image without decoding it. Raises one of `UNREADABLE_IMAGE` where it is refused."""
    with Image.open(path, formats=list(formats)) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(
                f"it has {image.width:,} x {image.height:,} pixels; at most {MAX_PIXELS:,} are read"
            )
        if image.info.get("progressive") and path.read_bytes().count(_SCAN) > MAX_SCANS:
            raise ValueError(f"it has more than {MAX_SCANS} scans")
        yield image


def eight_bits(image: Image.Image) -> Image.Image:
    """The image. Raises ValueError where its pixels have more bits: Pillow would cut them off."""
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"its pixels are {image.mode}, not 8 bits per channel")
    return image
