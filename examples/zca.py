"""The mean and matrix of ZCA whitening of a recipe's images, for the op `linear_map`.

    python examples/zca.py zca.npz mlp_mnist dataset.root=DIR

They are those of the first training images after the recipe's evaluation ops. The op follows them:
`{name: linear_map, file: zca.npz}`, in the ops of both splits.
"""

import sys

import numpy as np

from pipeline import load_recipe
from pipeline.config.cache import cache_root
from pipeline.data.ops.affine import compute_zca
from pipeline.data.random import seed_words
from pipeline.data.transform import apply_ops

IMAGES, EPSILON = 10_000, 0.1

if __name__ == "__main__":
    file, name, *overrides = sys.argv[1:]
    recipe = load_recipe(name, overrides)
    split = recipe.dataset.read(cache_root(recipe.cache)).train
    rows = np.arange(min(IMAGES, len(split)))
    columns, seed = {"image": split.columns["image"][rows]}, seed_words(recipe.seed)
    mapped = apply_ops(np, recipe.dataset.eval.ops, columns, seed, np.int32(0), rows)
    np.savez(file, **compute_zca(mapped["image"], EPSILON))
    print(f"done: {file}, from {len(rows):,} images")
