"""Image files, opened with limits on format, pixels and decoding work."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

from pipeline.data.mask_colours import make_class_colours

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")
"""Pillow's names of the formats that are read."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
KINDS = "PNG, JPEG, BMP, GIF, WebP and TIFF"
"""The formats in messages."""
MAX_PIXELS = 2**26
"""Most pixels of an image. A damaged PNG of a few kilobytes can have any number of them."""
MAX_SCANS = 200
"""Most scans of a progressive JPEG, since each is decoded for itself. Encoders write about ten."""
# fmt: off
UNREADABLE_IMAGE = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, MemoryError, OverflowError,
    Image.DecompressionBombError, Image.DecompressionBombWarning,
)
# fmt: on
"""Errors that Pillow raises for damaged or malicious files."""
_SCAN = b"\xff\xda"
_END = b"\xff\xd9"
"""Markers of a JPEG: the start of a scan, and the end. Neither occurs in the data of a scan."""
_TAIL_BYTES = 4096
"""Bytes at the end of a JPEG in which its end marker must be; other bytes may follow the marker."""
_Transpose = Image.Transpose
_TRANSPOSES = {
    2: _Transpose.FLIP_LEFT_RIGHT,
    3: _Transpose.ROTATE_180,
    4: _Transpose.FLIP_TOP_BOTTOM,
    5: _Transpose.TRANSPOSE,
    6: _Transpose.ROTATE_270,
    7: _Transpose.TRANSVERSE,
    8: _Transpose.ROTATE_90,
}
"""Transposition that makes an image upright, by EXIF orientation. Orientation 1 is upright."""
_SIDEWAYS = [_TRANSPOSES[orientation] for orientation in (5, 6, 7, 8)]
"""The transpositions that exchange height and width."""

# Pillow warns of large images at another limit than MAX_PIXELS.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# It also warns of damaged EXIF, which doesn't affect the pixels.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.TiffImagePlugin")


@contextmanager
def open_image(source: Path | bytes, formats: Sequence[str]) -> Iterator[Image.Image]:
    """Open an image without decoding it. Raises one of `UNREADABLE_IMAGE`, also for more than
    `MAX_PIXELS` or `MAX_SCANS`."""
    file = BytesIO(source) if isinstance(source, bytes) else source
    with Image.open(file, formats=list(formats)) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(
                f"it has {image.width:,} x {image.height:,} pixels; at most {MAX_PIXELS:,} are read"
            )
        if image.info.get("progressive"):
            content = source if isinstance(source, bytes) else source.read_bytes()
            if content.count(_SCAN) > MAX_SCANS:
                raise ValueError(f"it has more than {MAX_SCANS} scans")
        yield image


def require_bytes(image: Image.Image) -> None:
    """Raise ValueError for pixels of more than 16 bits, which Pillow would clip at 255."""
    if image.mode.startswith(("I", "F")) and not has_16_bits(image):
        raise ValueError(f"its pixels are {image.mode}, not 8 or 16 bits per channel")


def has_16_bits(image: Image.Image) -> bool:
    """Return whether an opened image has grey levels of 16 bits."""
    return image.mode.startswith("I;16")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Return an image whose grey levels of 16 bits are replaced by their upper 8 bits, as Pillow
    replaces colours of 16 bits. Its conversion of grey levels would clip them at 255."""
    if not has_16_bits(image):
        return image
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def read_upright_size(image: Image.Image) -> tuple[int, int]:
    """Return the (height, width) of an opened image after `turn_upright`, without decoding it."""
    if _find_transpose(image) in _SIDEWAYS:
        return image.width, image.height
    return image.height, image.width


def turn_upright(image: Image.Image) -> Image.Image:
    """Return the first frame of an opened image, transposed by its EXIF orientation."""
    transpose = _find_transpose(image)
    return image if transpose is None else image.transpose(transpose)


def _find_transpose(image: Image.Image) -> Image.Transpose | None:
    """Return the transposition that makes an image upright; None if it is upright."""
    if image.format == "TIFF":
        return None  # Pillow turns a TIFF when it decodes it, and its size is the upright one.
    try:
        # `image.getexif` would decode a whole PNG to find EXIF at its end.
        exif = Image.Image.getexif(image)
        return _TRANSPOSES.get(exif.get(ExifTags.Base.Orientation, 1))
    except (*UNREADABLE_IMAGE, struct.error, UserWarning):
        return None  # The image is usable without EXIF.


def require_complete(
    path: Path, formats: Sequence[str], check: Callable[[Image.Image], object]
) -> None:
    """Raise one of `UNREADABLE_IMAGE` for a truncated or damaged file, or an error of `check`. A
    PNG is decoded only if its checksums are wrong, a JPEG or WebP only if its end is missing, a
    BMP, GIF or TIFF always."""
    with open_image(path, formats) as image:
        check(image)
        if _seems_complete(image, path):
            return
    with open_image(path, formats) as image:
        image.load()


def _seems_complete(image: Image.Image, path: Path) -> bool:
    """Return whether a PNG has valid checksums, or whether a JPEG or WebP has its end, without
    decoding it. False for other formats."""
    if image.format == "PNG":
        try:
            image.verify()
        except UNREADABLE_IMAGE:
            return False
        return True
    size = path.stat().st_size
    with path.open("rb") as file:
        if image.format == "WEBP":  # RIFF: bytes 4 to 7 are the number of bytes that follow
            return int.from_bytes(file.read(8)[4:], "little") + 8 <= size
        if image.format in ("JPEG", "MPO"):
            file.seek(max(0, size - _TAIL_BYTES))
            tail = file.read()
            return tail.rfind(_END) > tail.rfind(_SCAN)
    return False


def read_pixels(image: Image.Image, height: int, width: int, mode: str = "RGB") -> np.ndarray:
    """Return the pixels of an opened image, upright and resized bilinearly to (height, width). They
    are uint8 (height, width, 3) for mode RGB, (height, width) for L, the upper 8 bits of 16. Raises
    one of `UNREADABLE_IMAGE`."""
    require_bytes(image)
    converted = _to_8_bits(turn_upright(image)).convert(mode)
    if converted.size != (width, height):
        converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(converted)


def make_mask_image(mask: np.ndarray, classes: int, size: tuple[int, int]) -> Image.Image:
    """Return a mask, int (H, W) with classes below 256, as a palette image of `size`, (width,
    height). The values of its pixels are the classes."""
    image = Image.fromarray(mask.astype(np.uint8))
    image.putpalette(make_class_colours(classes).tobytes())
    if image.size != size:
        image = image.resize(size, Image.Resampling.NEAREST)
    return image
