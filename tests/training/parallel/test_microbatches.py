from __future__ import annotations

import jax
import numpy as np
import pytest

from pipeline.training.parallel.microbatches import (
    compute_batch_multiple,
    compute_microbatch_size,
    list_batch_positions,
    stack_microbatches,
)

DROPOUT = jax.random.key(3)


@pytest.mark.parametrize(("count", "parts", "size"), [(1, 1, 24), (3, 1, 8), (3, 4, 2)])
def test_microbatch_sizes_multiply_to_the_batch(count: int, parts: int, size: int) -> None:
    assert compute_microbatch_size(24, count, parts) == size
    assert compute_batch_multiple(count, parts) * size == 24


def test_samples_are_in_batch_order() -> None:
    samples = {"image": np.arange(24).reshape(6, 2, 2), "label": np.arange(6)}
    stacked, _ = stack_microbatches(samples, DROPOUT, 3)
    for index in range(3):
        positions = list(list_batch_positions((0, 1), index, 6, 3))
        for name, array in samples.items():
            np.testing.assert_array_equal(stacked[name][index], array[positions])


def test_microbatch_key_is_derived_from_its_number() -> None:
    _, keys = stack_microbatches(np.zeros(6), DROPOUT, 3)
    expected = [jax.random.key_data(jax.random.fold_in(DROPOUT, i)) for i in range(3)]
    np.testing.assert_array_equal(jax.random.key_data(keys), np.stack(expected))


def test_single_microbatch_is_the_batch_with_its_key() -> None:
    samples, keys = stack_microbatches(np.arange(6), DROPOUT, 1)
    np.testing.assert_array_equal(samples[0], np.arange(6))
    assert keys[0] == DROPOUT
    assert list_batch_positions((1, 4), 5, 6, 1) == (1, 4)
