"""MNIST digits on CIFAR-10 images, and masks of them, for +recipe=unet_digit_masks.

The class of a pixel is 1 on the strokes of a digit, 0 in the background, and 255, which is not
counted, where ink and background are mixed. Run it from the root of the repository:
`python examples/digit_masks.py MNIST_ROOT CIFAR_ROOT FOLDER`, with roots as in dataset.root.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from pipeline import load_recipe

IMAGES, SIDE, SEED = 6000, 20, 1
mnist, cifar, folder = sys.argv[1:]
roots = (("lenet5_mnist", mnist), ("resnet20_cifar10", cifar))
cache = Path(folder) / "cache"
sources = [load_recipe(name, [f"dataset.root={root}"]).dataset for name, root in roots]
digits, photos = (source.read(cache).train.columns for source in sources)
rng = np.random.default_rng(SEED)
for kind in ("images", "masks"):
    (Path(folder) / kind).mkdir(parents=True, exist_ok=True)
for number in range(IMAGES):
    ink = Image.fromarray(np.asarray(digits["image"][number : number + 1])[0, :, :, 0])
    ink = np.asarray(ink.resize((SIDE, SIDE), Image.Resampling.BILINEAR)).astype(float) / 255
    image = np.asarray(photos["image"][number : number + 1])[0].copy()
    mask = np.zeros(image.shape[:2], np.uint8)
    top, left = rng.integers(0, 32 - SIDE + 1, 2)
    place, share = (slice(top, top + SIDE), slice(left, left + SIDE)), ink[..., None]
    colour = rng.integers(0, 256, 3)
    image[place] = (1 - share) * image[place] + share * colour
    mask[place] = np.where(ink > 0.5, 1, np.where(ink > 0.15, 255, 0))
    Image.fromarray(image).save(Path(folder) / "images" / f"{number:05}.png")
    Image.fromarray(mask).save(Path(folder) / "masks" / f"{number:05}.png")
print(f"done: {IMAGES} images and masks in {folder}")
