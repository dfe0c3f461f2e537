"""What MindSpore's Resize makes of images, written to map_ops/resize.npz.

    python tests/golden/make_map_ops_resize.py    with mindspore 2.10.0 and pillow 13.0.0

The keys are interpolation/image/size; the images stand beside them under image/name.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mindspore.dataset import vision
from mindspore.dataset.vision import Inter
from PIL import Image

FILE = Path(__file__).parent / "map_ops" / "resize.npz"
RNG = np.random.default_rng(20)
SHAPES = [(11, 15, 3), (16, 16, 3), (14, 14, 1), (24, 16, 3)]
SIZES = [(16, 16), (5, 17), (7, 7), (8, 8), (20, 6), (12, 8), 13, 4]
INTERPOLATIONS = {
    "linear": Inter.LINEAR,
    "nearest": Inter.NEAREST,
    "cubic": Inter.CUBIC,
    "area": Inter.AREA,
    "pil_cubic": Inter.PILCUBIC,
    "antialias": Inter.ANTIALIAS,
}


def images() -> dict[str, np.ndarray]:
    """Noise, the hardest to interpolate: bytes, and floats in -1..1."""
    made = {}
    for shape in SHAPES:
        text = "x".join(map(str, shape))
        made[f"uint8_{text}"] = RNG.integers(0, 256, shape, dtype=np.uint8)
        made[f"float32_{text}"] = RNG.uniform(-1, 1, shape).astype(np.float32)
    return made


def resize_image(image: np.ndarray, interpolation: str, size: tuple[int, int] | int) -> np.ndarray:
    """The image through MindSpore, as a PIL image where it takes nothing else."""
    op = vision.Resize(size, INTERPOLATIONS[interpolation])
    if interpolation == "antialias":
        return np.asarray(op(Image.fromarray(image)))
    return op(image)


def main() -> None:
    """Ask MindSpore for every case that it takes."""
    golden = {}
    for name, image in images().items():
        golden[f"image/{name}"] = image
        for interpolation in INTERPOLATIONS:
            of_pillow = interpolation in ("pil_cubic", "antialias")
            if of_pillow and (image.dtype != np.uint8 or image.shape[2] != 3):
                continue
            for size in SIZES:
                text = str(size) if isinstance(size, int) else "x".join(map(str, size))
                made = resize_image(image, interpolation, size)
                golden[f"{interpolation}/{name}/{text}"] = made.reshape(*made.shape[:2], -1)
    np.savez_compressed(FILE, **golden)


if __name__ == "__main__":
    main()
