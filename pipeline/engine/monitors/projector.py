"""Files of TensorBoard's projector, and pictures with captions.

`projector_config.pbtxt`, in the folder of the events, names the files of vectors, labels and
pictures in `embeddings/`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline.core.errors import printable
from pipeline.core.files.atomic_write import write_whole

CONFIG = "projector_config.pbtxt"
FOLDER = "embeddings"
PICTURED_CHANNELS = (1, 3, 4)
"""Numbers of channels of images that can be drawn."""
SPRITE_PIXELS = 8192
"""Longest side of a sheet of pictures, as browsers can show it."""
PICTURE_PIXELS = 64
"""Longest side of a picture on a sheet."""
CAPTION_PIXELS = 16
"""Height of a caption."""
LEAST_WIDTH_PIXELS = 96
"""Least width of a picture with a caption."""
MAX_CHARACTERS = 15
"""Largest number of characters of a caption."""
WRONG = (179, 38, 30)
RIGHT = (29, 36, 41)
"""Colours of captions, as RGB."""


def write_embeddings(
    board: Path, vectors: np.ndarray, labels: Sequence[str], images: np.ndarray | None
) -> None:
    """Write vectors, float32 (n, features), their labels, and images (n, H, W, C) or None.

    Earlier files are replaced. Images with other than 1, 3 or 4 channels are left out. Raises
    OSError if the files can't be written.
    """
    folder = board / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    rows = ("\t".join(f"{value:.7g}" for value in row) for row in vectors.tolist())
    write_whole(folder / "vectors.tsv", "".join(f"{row}\n" for row in rows))
    texts = (" ".join(printable(label).split()) or "-" for label in labels)
    write_whole(folder / "labels.tsv", "".join(f"{text}\n" for text in texts))
    sprite = ""
    if images is not None and images.shape[-1] in PICTURED_CHANNELS:
        sheet, (height, width) = _draw_sheet(stretch_range(images))
        write_whole(folder / "pictures.png", sheet)
        sprite = (
            f'  sprite {{ image_path: "{FOLDER}/pictures.png" '
            f"single_image_dim: {width} single_image_dim: {height} }}\n"
        )
    # Written last, since it names the other files.
    write_whole(
        board / CONFIG,
        'embeddings {\n  tensor_name: "input of the last layer"\n'
        f'  tensor_path: "{FOLDER}/vectors.tsv"\n  metadata_path: "{FOLDER}/labels.tsv"\n'
        f"{sprite}}}\n",
    )


def _draw_sheet(images: np.ndarray) -> tuple[bytes, tuple[int, int]]:
    """Return a square sheet of images uint8 (n, H, W, C) as PNG, and a picture's height and width.
    If the sheet would be too large, only every second, third, ... pixel is drawn."""
    from PIL import Image

    side = math.ceil(math.sqrt(len(images)))
    max_pixels = min(PICTURE_PIXELS, SPRITE_PIXELS // side)
    step = math.ceil(max(images.shape[1:3]) / max_pixels)
    pictures = images[:, ::step, ::step]
    height, width = pictures.shape[1:3]
    cells = np.zeros((side * side, *pictures.shape[1:]), np.uint8)
    cells[: len(pictures)] = pictures
    rows = cells.reshape(side, side, height, width, -1).swapaxes(1, 2)
    sheet = rows.reshape(side * height, side * width, -1)
    file = io.BytesIO()
    Image.fromarray(sheet[..., 0] if sheet.shape[-1] == 1 else sheet).save(file, "PNG")
    return file.getvalue(), (height, width)


def stretch_range(images: np.ndarray) -> np.ndarray:
    """Return images (n, H, W, C) as uint8, with the range of each stretched to 0 to 255."""
    values = images.astype(np.float64)
    low = values.min(axis=(1, 2, 3), keepdims=True)
    high = values.max(axis=(1, 2, 3), keepdims=True)
    return ((values - low) / np.maximum(high - low, 1e-12) * 255).astype(np.uint8)


def add_captions(
    images: np.ndarray, captions: Sequence[str], wrong: Sequence[bool] | None = None
) -> np.ndarray:
    """Return images uint8 (n, H, W, C), enlarged, with captions below: uint8 (n, H', W', 3).

    A caption is red if `wrong` is true for its image. C is 1, 3 or 4.
    """
    from PIL import Image, ImageDraw

    count, height, width, channels = images.shape
    scale = max(1, -(-LEAST_WIDTH_PIXELS // width))
    result = np.full((count, height * scale + CAPTION_PIXELS, width * scale, 3), 255, np.uint8)
    wrong = wrong or [False] * count
    for number, (image, caption, is_wrong) in enumerate(zip(images, captions, wrong, strict=True)):
        picture = Image.fromarray(image[..., 0] if channels == 1 else image).convert("RGB")
        size = width * scale, height * scale
        canvas = Image.fromarray(result[number])
        canvas.paste(picture.resize(size, Image.Resampling.NEAREST), (0, 0))
        text = caption if len(caption) <= MAX_CHARACTERS else f"{caption[: MAX_CHARACTERS - 1]}…"
        corner = (2, height * scale + 1)
        colour = WRONG if is_wrong else RIGHT
        ImageDraw.Draw(canvas).text(corner, text, fill=colour, font_size=12)
        result[number] = np.asarray(canvas)
    return result
