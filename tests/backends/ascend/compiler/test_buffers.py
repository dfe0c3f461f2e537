"""Elements that layouts store."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.ascend.chip.tasks import Layout
from pipeline.backends.ascend.compiler.buffers import (
    count_padded_elements,
    find_channel_axes,
)
from pipeline.backends.ascend.compiler.kernels import Kernels
from pipeline.backends.ascend.compiler.phases import find_phases
from pipeline.backends.graph.graph import Value
from pipeline.backends.graph.tracing import make_graph
from tests.backends.ascend.steps import of


@pytest.mark.parametrize(
    ("shape", "layout", "axis", "stored"),
    [
        ((2, 8, 8, 3), "NC1HWC0", 3, 2 * 8 * 8 * 16),
        ((2, 3, 8, 8), "NC1HWC0", 1, 2 * 16 * 8 * 8),
        ((2, 8, 8, 64), "NC1HWC0", 3, 2 * 8 * 8 * 64),
        ((30, 17), "FRACTAL_NZ", None, 32 * 32),
        ((17,), "FRACTAL_NZ", None, 17),
        ((7, 7, 3, 64), "FRACTAL_Z", None, 7 * 16 * 3 * 64),
        ((3, 3, 64, 64), "FRACTAL_Z", None, 9 * 64 * 64),
        ((30, 17), "ND", None, 30 * 17),
        ((), "ND", None, 1),
    ],
)  # fmt: skip
def test_padding(shape: tuple[int, ...], layout: Layout, axis: int | None, stored: int) -> None:
    assert count_padded_elements(Value(shape, "float16"), layout, axis) == stored


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=4),
    st.sampled_from(["ND", "NC1HWC0", "FRACTAL_NZ", "FRACTAL_Z"]),
)
def test_padding_never_loses_elements(sides: list[int], layout: Layout) -> None:
    stored = count_padded_elements(Value(tuple(sides), "float16"), layout, len(sides) - 1)
    assert math.prod(sides) <= stored <= math.prod(sides) * 256


def test_channels_follow_element_wise_work() -> None:
    def network(x: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = ("NCHW", "OIHW", "NCHW")
        made = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        return jnp.tanh(made + 1.0)

    graph = make_graph(jax.jit(network).trace(of(2, 3, 8, 8), of(4, 3, 3, 3)))
    kernels = Kernels(graph, find_phases(graph, ()), lambda index: 0.0)
    axes = find_channel_axes(graph, kernels.dataflow)
    assert axes[graph.outputs[0]] == 1


def test_a_reshaped_volume_has_an_axis_only_with_its_rank() -> None:
    """The reshape's source, with fewer axes, is the same value."""

    def network(x: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = ("NDHWC", "DHWIO", "NDHWC")
        volumes = x.reshape(2, 4, 4, 2, 3)
        return jax.lax.conv_general_dilated(
            volumes, kernel, (1, 1, 1), "SAME", dimension_numbers=numbers
        )

    graph = make_graph(jax.jit(network).trace(of(2, 8, 12), of(3, 3, 2, 3, 5)))
    kernels = Kernels(graph, find_phases(graph, ()), lambda index: 0.0)
    axes = find_channel_axes(graph, kernels.dataflow)
    assert axes[graph.outputs[0]] == 4
    assert all(axis < len(graph.values[index].shape) for index, axis in axes.items())
