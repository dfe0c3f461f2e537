"""Pictures of samples with a line of text below each, for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CAPTION = 16
LEAST_SIDE = 96
MAX_CHARACTERS = 15
WRONG = (179, 38, 30)
RIGHT = (29, 36, 41)


def stretch_range(images: np.ndarray) -> np.ndarray:
    """Stretch each image of (n, H, W, C) to its range of values, uint8."""
    values = images.astype(np.float64)
    low = values.min(axis=(1, 2, 3))
    high = values.max(axis=(1, 2, 3))
    span = np.maximum(high - low, 1e-12)
    return ((values - low[:, None, None, None]) / span[:, None, None, None] * 255).astype(np.uint8)


def add_captions(
    images: np.ndarray, captions: Sequence[str], wrong: Sequence[bool] | None = None
) -> np.ndarray:
    """Enlarge images uint8 (n, H, W, C) to be legible, over their captions: (n, H', W', 3).

    The captions of those that are `wrong` are red. C is 1, 3 or 4.
    """
    from PIL import Image, ImageDraw

    count, height, width, channels = images.shape
    scale = max(1, -(-LEAST_SIDE // width))
    result = np.full((count, height * scale + CAPTION, width * scale, 3), 255, np.uint8)
    marked = wrong or [False] * count
    for number, (image, caption, red) in enumerate(zip(images, captions, marked, strict=True)):
        picture = Image.fromarray(image[..., 0] if channels == 1 else image).convert("RGB")
        size = width * scale, height * scale
        canvas = Image.fromarray(result[number])
        canvas.paste(picture.resize(size, Image.Resampling.NEAREST), (0, 0))
        text = caption if len(caption) <= MAX_CHARACTERS else f"{caption[: MAX_CHARACTERS - 1]}…"
        place = (2, height * scale + 1)
        ImageDraw.Draw(canvas).text(place, text, fill=WRONG if red else RIGHT, font_size=12)
        result[number] = np.asarray(canvas)
    return result
