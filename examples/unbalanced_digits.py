"""Digits with five rare classes, as PNG files in class folders, for +recipe=lenet5_unbalanced.

python examples/unbalanced_digits.py [FOLDER]

Of the digits that ship with the package, 0 to 4 keep all training images and 5 to 9 one in twenty;
the images to evaluate are all there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from pipeline import load_recipe

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "unbalanced_digits")
data = load_recipe("lenet5_digits").dataset.read(folder)
for name, split in (("train", data.train), ("eval", data.eval)):
    images, labels = np.asarray(split.columns["image"][:]), np.asarray(split.columns["label"][:])
    for label in range(10):
        (folder / name / str(label)).mkdir(parents=True, exist_ok=True)
        rows = np.flatnonzero(labels == label)
        if name == "train" and label >= 5:
            rows = rows[: len(rows) // 20]
        for row in rows:
            pixels = images[row, :, :, 0].astype(np.uint8) * 15
            Image.fromarray(pixels).save(folder / name / str(label) / f"{row:04}.png")
        print(f"{name}: {len(rows):3} images of a {label}")
print(f"done: {folder}")
