"""Dimensions that a reshape keeps together, and operations tie."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.graph.tracing import make_graph
from pipeline.backends.planner.dimension_groups import DimensionGroups, pair_reshaped_dims


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


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: jax.lax.sort((x, y), dimension=1, num_keys=1),
        lambda x, y: jnp.fft.fft(x + 1j * y),
        lambda x, y: jax.lax.linalg.cholesky(x * y),
        lambda x, y: jax.lax.linalg.eigh(x * y),
        lambda x, y: jax.lax.linalg.triangular_solve(x, y, left_side=True),
    ],
)
def test_only_samples_of_sorted_or_decomposed_arrays_are_divisible(
    function: Callable[..., Any],
) -> None:
    arrays = [jax.ShapeDtypeStruct((8, 6, 6), jnp.float32)] * 2
    axes = (1,) if "sort" in str(jax.make_jaxpr(function)(*arrays)) else (-1,)
    graph = make_graph(jax.jit(function).trace(*arrays))
    groups = DimensionGroups(graph, (), ())
    values = {value for node in graph.nodes for value in (*node.inputs, *node.outputs)}
    rows = [groups.get(value) for value in values if groups.shapes[value]]
    assert len({row[0] for row in rows}) == 1
    assert rows[0][0] not in groups.indivisible
    assert all(row[axis] in groups.indivisible for row in rows for axis in axes)
