"""Arrays whose axes lie in another order: every operation gives what numpy gives."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models.torch_graph.operator_table import (
    NHWC,
    TorchTensor,
    align,
    drop_axes,
    permute_axes,
    reshape_axes,
    to_tensor,
)


@st.composite
def make_tensors(draw: st.DrawFn) -> TorchTensor:
    """An array of 1 to 4 axes that lie in any order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = tuple(draw(st.permutations(range(len(sizes)))))
    values = np.arange(math.prod(sizes), dtype=np.float32).reshape(sizes)
    return TorchTensor(np.transpose(values, order), order)


def plain(x: TorchTensor) -> np.ndarray:
    """The array in PyTorch's order, by numpy: XLA would compile a program for every shape."""
    return np.transpose(np.asarray(x.array), np.argsort(x.order))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(make_tensors(), st.data())
def test_permutation_matches_numpy(x: TorchTensor, data: st.DataObject) -> None:
    numbers = data.draw(st.permutations(range(x.ndim)))
    found = permute_axes(x, numbers)
    np.testing.assert_array_equal(found.plain(), np.transpose(plain(x), numbers))
    assert found.array is x.array


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(make_tensors(), st.data())
def test_reshape_matches_numpy(x: TorchTensor, data: st.DataObject) -> None:
    size = math.prod(x.shape)
    shape: list[int] = []
    while size > 1:
        factor = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        shape.append(factor)
        size //= factor
        if len(shape) == 5:
            shape.append(size)
            break
    found = reshape_axes(x, shape)
    np.testing.assert_array_equal(plain(found), plain(x).reshape(shape))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(make_tensors(), make_tensors())
def test_sum_broadcasts_as_in_numpy(x: TorchTensor, other: TorchTensor) -> None:
    one, two = plain(x), plain(other)
    try:
        expected = one + two
    except ValueError:
        return
    (first, second), order = align((x, other))
    np.testing.assert_array_equal(plain(TorchTensor(first + second, order)), expected)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(make_tensors(), st.data())
def test_reduction_matches_numpy(x: TorchTensor, data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.sampled_from(range(x.ndim)), unique=True))
    found = drop_axes(x, numbers, x.array.sum(x.axes(numbers)))
    np.testing.assert_array_equal(plain(found), plain(x).sum(tuple(numbers)))


def test_nhwc_pixels_become_tokens_without_a_transposition() -> None:
    images = TorchTensor(jnp.zeros((2, 4, 5, 3)), NHWC)
    tokens = permute_axes(reshape_axes(images, (2, 3, 20)), (0, 2, 1))
    assert tokens.order == (0, 1, 2)
    assert tokens.array.shape == (2, 20, 3)


def test_channels_in_nhwc_are_split_in_memory_order() -> None:
    found = reshape_axes(TorchTensor(jnp.zeros((2, 4, 5, 6)), NHWC), (2, 3, 2, 4, 5))
    assert found.order == (0, 3, 4, 1, 2)


def test_invalid_shapes_and_axes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3\) can't become \(4, 2\)"):
        reshape_axes(to_tensor(jnp.zeros((2, 3))), (4, 2))
    with pytest.raises(ValueError, match="axis 2 of an array with 2 axes"):
        to_tensor(jnp.zeros((2, 3))).axis(2)
