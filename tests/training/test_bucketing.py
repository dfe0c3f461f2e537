"""A channel that marks padding, against a loop; tests/stages/test_sample_sizes.py runs buckets."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.bucketing import add_padding_mask, apply_in_bucket
from tests.training.test_step import make_batch


@pytest.mark.medium
@pytest.mark.parametrize("axes", [1, 2])
def test_padding_mask_is_1_inside_each_size(axes: int) -> None:
    images = np.zeros((3, 4, 5, 2), np.float32)
    sizes = np.array([[4, 5], [2, 3], [0, 1]])[:, :axes]
    mask = add_padding_mask(jnp.asarray(images), jnp.asarray(sizes))[..., -1]
    for n, size in enumerate(sizes):
        for y in range(4):
            for x in range(5):
                inside = y < size[0] and (axes == 1 or x < size[1])
                assert mask[n, y, x] == inside


def test_batch_without_buckets_is_unchanged() -> None:
    batch = make_batch()
    assert apply_in_bucket((), batch, lambda cut: cut) is batch
