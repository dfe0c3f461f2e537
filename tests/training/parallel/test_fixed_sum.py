"""Sums in a fixed order: the same bits as numpy's additions in that order, on any devices."""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from pipeline.training.parallel import fixed_sum
from pipeline.training.parallel.fixed_sum import add_devices, sum_leaves
from pipeline.training.parallel.parallel_spec import DATA
from pipeline.training.parallel.state_sharing import DevicePlacement


def terms_of(count: int, seed: int) -> np.ndarray:
    """Terms whose sum depends on the order of additions."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((count, 5)) * 10.0 ** rng.integers(-4, 4, (count, 1))).astype("f4")


def add_by_hand(terms: list[np.ndarray]) -> np.ndarray:
    """The halves, as long as their number is even; an odd number one after the other."""
    if len(terms) % 2 == 0:
        middle = len(terms) // 2
        return add_by_hand(terms[:middle]) + add_by_hand(terms[middle:])
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 24),
    seed=st.integers(0, 2**16),
    stacked=st.booleans(),
    most_at_once=st.sampled_from([1, 2, 4, 8]),
)
def test_leaves_are_added_in_tree_order(
    count: int, seed: int, stacked: bool, most_at_once: int
) -> None:
    """Where terms are kept side by side, and where there is no room for that."""
    terms = jnp.asarray(terms_of(count, seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed_sum, "STACKED_BYTES", 1 << 30 if stacked else 0)
        at_once = gcd(most_at_once, count)
        total = jax.jit(lambda: sum_leaves(lambda i: terms[i], count, at_once=at_once))()
    assert np.asarray(total).tobytes() == add_by_hand(list(terms_of(count, seed))).tobytes()


@pytest.mark.medium
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_devices_continue_the_tree(devices: int) -> None:
    """Each adds its own terms, then all together: as if one had added everything."""
    terms, counts = terms_of(8, seed=3), np.arange(8, dtype=np.int32) + 2**30 // 8
    own = 8 // devices

    def add(mine: jax.Array, counted: jax.Array) -> Any:
        local = sum_leaves(lambda i: (mine[i], counted[i]), own)
        return add_devices(local, DATA, devices)

    mesh = DevicePlacement(tuple(jax.devices("cpu")[:devices])).mesh
    rows, whole = PartitionSpec(DATA), PartitionSpec()
    spread = partial(jax.shard_map, mesh=mesh, in_specs=rows, out_specs=whole, check_vma=False)
    total, count = jax.jit(spread(add))(terms, counts)
    np.testing.assert_array_equal(total, add_by_hand(list(terms)))
    assert count == counts.sum()
