"""Poisson sampling: laws of the draws, and their independence of how they are asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.core.errors import RunError
from pipeline.data.poisson_order import (
    PoissonOrder,
    compute_overflow,
    find_expected_batch_size,
    make_poisson_order,
)

KEY = (5, 2**31)


def make_order(samples: int = 400, expected: int = 40, size: int = 100) -> PoissonOrder:
    return PoissonOrder(
        seed=1,
        samples=samples,
        batch_size=size,
        shuffle=True,
        buffer_size=None,
        drop_remainder=True,
        repeat=1,
        expected_batch_size=expected,
        key=KEY,
    )


def test_batch_depends_only_on_its_step() -> None:
    order = make_order()
    whole = order.batches(0, 12)
    for first, count in ((0, 5), (5, 7), (11, 1)):
        part = order.batches(first, count)
        np.testing.assert_array_equal(part.indices, whole.indices[first : first + count])
        np.testing.assert_array_equal(part.counts, whole.counts[first : first + count])
        np.testing.assert_array_equal(part.epochs, np.arange(first, first + count))


def test_samples_are_drawn_with_equal_probability_in_each_step() -> None:
    """Planted mistake: a fixed order that is accounted for as Poisson sampling."""
    order = make_order()
    batches = order.batches(0, 3000)
    drawn = np.zeros((3000, order.samples), bool)
    for row, (indices, count) in enumerate(zip(batches.indices, batches.counts, strict=True)):
        assert len(set(indices[:count].tolist())) == count
        assert (indices[count:] == indices[0]).all()
        drawn[row, indices[:count]] = True
    deviation = (order.rate * (1 - order.rate)) ** 0.5
    z_samples = (drawn.mean(0) - order.rate) / deviation * 3000**0.5
    assert np.abs(z_samples).max() < 4.5
    # The number of samples of a step is binomial: a fixed order has no variance.
    variance = batches.counts.var() / (order.samples * deviation**2)
    assert 0.85 < variance < 1.15
    # A sample is drawn again in the next step as often as in any: a shuffled epoch has none.
    again = (drawn[1:] & drawn[:-1]).mean() / order.rate**2
    assert 0.9 < again < 1.1


def test_order_depends_on_the_key_and_not_the_seed() -> None:
    order = make_order()
    first = order.batches(0, 1)
    same = replace(order, seed=2).batches(0, 1)
    other = replace(order, key=(6, 2**31)).batches(0, 1)
    np.testing.assert_array_equal(first.indices, same.indices)
    assert first.counts[0] != other.counts[0] or (first.indices != other.indices).any()
    with pytest.raises(RunError, match="only a run with its secret"):
        replace(order, key=None).batches(0, 1)
    assert "2147483648" not in repr(order)


def test_canary_non_members_are_never_drawn() -> None:
    canaries = np.arange(0, 400, 2)
    order = replace(make_order(), canaries=canaries)
    members = order.draw_members()
    assert 70 < members.sum() < 130
    batches = order.batches(0, 300)
    drawn = {
        int(sample)
        for indices, count in zip(batches.indices, batches.counts, strict=True)
        for sample in indices[:count]
    }
    assert drawn & {*canaries.tolist()} == {*canaries[members].tolist()}


def test_expected_batch_is_the_largest_fitting_batch() -> None:
    expected = find_expected_batch_size(60_000, 256, 1e-17)
    assert 130 < expected < 160
    assert compute_overflow(60_000, 256, expected) <= 1e-17
    assert compute_overflow(60_000, 256, expected + 1) > 1e-17
    assert find_expected_batch_size(100, 100, 1e-17) == 100
    with pytest.raises(ValueError, match="batch_size = 2: is too small"):
        find_expected_batch_size(60_000, 2, 1e-17)


@pytest.mark.parametrize(
    ("samples", "expected", "message"),
    [
        (100, 101, "^batch_size = 256: .*_batch_size = 101 must be at most the 100 samples$"),
        (60_000, 250, "^batch_size = 256: must be larger for .*_batch_size = 250.* enough for 14"),
    ],
)
def test_expected_batch_that_is_too_large_is_refused(
    samples: int, expected: int, message: str
) -> None:
    settings = {
        "samples": samples, "batch_size": 256, "seed": 1, "shuffle": True, "buffer_size": None,
        "drop_remainder": True, "repeat": 1,
    }  # fmt: skip
    assert make_poisson_order(settings, 1e-5, 100).batches_per_repetition == samples // 100
    with pytest.raises(ValueError, match=message):
        make_poisson_order(settings, 1e-5, expected)


def test_step_can_draw_zero_samples() -> None:
    batches = make_order(samples=50, expected=1).batches(0, 40)
    assert 0 in batches.counts
    assert (batches.indices[batches.counts == 0] == 0).all()
