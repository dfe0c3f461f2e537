"""Mixtures of sources: shares, repetitions, changes at steps, and continuing from any step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.data.order_kinds import MIX_CYCLE, MixedOrder, divide_cycle

SIZES = (30, 7, 500)


def make_order(*shares: tuple[int, tuple[float, ...]], **changed: Any) -> MixedOrder:
    settings = {
        "samples": sum(SIZES),
        "batch_size": 16,
        "drop_remainder": True,
        "repeat": 1,
        "seed": 3,
        "shuffle": True,
        "buffer_size": None,
        "sizes": SIZES,
        "shares": tuple((step, divide_cycle(weights)) for step, weights in shares),
    }
    return MixedOrder(**{**settings, **changed})


def find_sources(rows: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(SIZES), rows, side="right")


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1, 1, 2), (250, 250, 500)),
        ((1, 1, 1), (334, 333, 333)),
        ((0, 1e-9, 5), (0, 1, 999)),
        ((1e300, 1e300, 0), (500, 500, 0)),
    ],
)
def test_each_source_has_its_share_of_a_cycle(
    weights: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    assert divide_cycle(weights) == expected
    rows = make_order((0, weights)).batches(0, 125).rows.ravel()
    for cycle in rows.reshape(-1, MIX_CYCLE):
        assert tuple(np.bincount(find_sources(cycle), minlength=3)) == expected


def test_more_sources_than_draws_of_a_cycle_leave_none_out() -> None:
    assert min(divide_cycle([1.0] * MIX_CYCLE)) == 1


def test_all_samples_of_a_source_are_drawn_before_any_is_drawn_again() -> None:
    order = make_order((0, (1, 1, 2)), (11, (5, 1, 0)), (90, (1, 3, 1)))
    batches = order.batches(0, 200)
    rows = batches.rows.ravel()
    for source, size in enumerate(SIZES):
        drawn = rows[find_sources(rows) == source]
        for first in range(0, len(drawn) - size, size):
            assert len(set(drawn[first : first + size].tolist())) == size
    keys = batches.epochs[:, None] * 10**6 + batches.indices
    assert len(np.unique(keys)) == keys.size
    assert (batches.counts == 16).all()


def test_weights_change_at_their_step() -> None:
    order = make_order((0, (1, 1, 0)), (11, (0, 0, 1)))
    sources = find_sources(order.batches(0, 22).rows)
    assert set(sources[:11].ravel()) == {0, 1}
    assert set(sources[11:].ravel()) == {2}


def test_step_has_the_same_samples_whatever_was_read_before() -> None:
    order = make_order((0, (1, 1, 2)), (5, (3, 1, 2)), (64, (1, 0, 1)))
    whole = order.batches(0, 150)
    for first, count in ((0, 1), (4, 3), (63, 2), (100, 50)):
        part = order.batches(first, count)
        np.testing.assert_array_equal(part.indices, whole.indices[first : first + count])
        np.testing.assert_array_equal(part.epochs, whole.epochs[first : first + count])
    other = make_order((0, (1, 1, 2)), (5, (3, 1, 2)), (64, (1, 0, 1)), seed=4)
    assert (other.batches(0, 1).indices != whole.indices[:1]).any()


def test_sources_without_a_shuffle_are_read_in_sequence() -> None:
    order = make_order((0, (1, 1, 2)), shuffle=False)
    rows = order.batches(0, 60).rows.ravel()
    drawn = rows[find_sources(rows) == 0]
    np.testing.assert_array_equal(drawn, np.arange(len(drawn)) % 30)


def test_only_sources_with_a_weight_are_reachable() -> None:
    order = make_order((0, (1, 0, 0)), (9, (0, 0, 2)))
    np.testing.assert_array_equal(order.list_reachable(), [*range(30), *range(37, 537)])
