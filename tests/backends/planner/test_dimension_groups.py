"""Dimensions that a reshape keeps together."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.planner.dimension_groups import pair_reshaped_dims


@pytest.mark.parametrize(
    ("source", "target", "factors"),
    [
        ((6, 4), (6, 4), [([0], [0]), ([1], [1])]),
        ((6, 4), (24,), [([0, 1], [0])]),
        ((24,), (6, 1, 4), [([0], [0, 2])]),
        ((6, 4, 5), (2, 3, 20), [([0], [0, 1]), ([1, 2], [2])]),
        ((1, 1), (1,), []),
    ],
)
def test_reshape_factors_are_minimal(
    source: tuple[int, ...], target: tuple[int, ...], factors: list[tuple[list[int], list[int]]]
) -> None:
    assert pair_reshaped_dims(source, target) == factors


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw two shapes of as many elements, each with products of neighbours of the same sizes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))

    def join() -> tuple[int, ...]:
        shape = [sizes[0]]
        for size in sizes[1:]:
            if draw(st.booleans()):
                shape.append(size)
            else:
                shape[-1] *= size
        return tuple(shape)

    return join(), join()


@pytest.mark.medium
@given(shapes=reshapes())
def test_factor_has_equal_elements_on_both_sides(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    source, target = shapes
    factors = pair_reshaped_dims(source, target)
    for left, right in factors:
        assert prod(source[dim] for dim in left) == prod(target[dim] for dim in right)
    for side, shape in enumerate(shapes):
        listed = [dim for factor in factors for dim in factor[side]]
        assert listed == [dim for dim, size in enumerate(shape) if size > 1]
