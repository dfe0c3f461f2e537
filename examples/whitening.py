"""Filters that whiten patches of a recipe's images, as weights for its first frozen kernel.

    python examples/whitening.py whitening.npz cnn6_cifar10_speedrun dataset.root=DIR

Each is an eigenvector of the patches' covariance over the root of its eigenvalue, or the negative
of one, so that responses are uncorrelated (Jordan 2024, arXiv 2404.00498, section 3.2).
"""

import sys

import numpy as np

from pipeline import load_recipe
from pipeline.config.cache import cache_root
from pipeline.data.random import seed_words
from pipeline.data.transform import apply_ops

IMAGES, SIDE, EPSILON = 5000, 2, 5e-4


def whitening(images: np.ndarray) -> np.ndarray:
    """Filters (SIDE, SIDE, C, 2 * SIDE * SIDE * C) for images (B, H, W, C) after their map ops."""
    patches = np.lib.stride_tricks.sliding_window_view(images, (SIDE, SIDE), axis=(1, 2))
    rows = patches.transpose(0, 1, 2, 4, 5, 3).reshape(-1, SIDE * SIDE * images.shape[-1])
    values, vectors = np.linalg.eigh(np.cov(rows.astype(np.float64), rowvar=False))
    filters = vectors / np.sqrt(values + EPSILON)
    both = np.concatenate([filters, -filters], axis=1)
    return both.reshape(SIDE, SIDE, images.shape[-1], -1).astype(np.float32)


if __name__ == "__main__":
    file, name, *overrides = sys.argv[1:]
    recipe = load_recipe(name, overrides)
    split = recipe.dataset.read(cache_root(recipe.cache)).train
    rows = np.arange(min(IMAGES, len(split)))
    columns, seed = {"image": split.columns["image"][rows]}, seed_words(recipe.seed)
    mapped = apply_ops(np, recipe.dataset.eval.ops, columns, seed, np.int32(0), rows)
    np.savez(file, **{recipe.train.freeze[0]: whitening(mapped["image"])})
    print(f"done: {file}, from {len(rows):,} images")
