"""Slices, concatenations and shuffles of channels: plain unless parts are whole blocks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from pipeline.backends.ascend.chip.tasks import Permutation, TaskGraph
from pipeline.backends.ascend.compiler.dataflow import (
    find_channel_axes,
    find_dataflow,
    find_map_permutation,
)
from pipeline.backends.ascend.compiler.phases import find_phases
from pipeline.backends.ascend.cost.task_time import price_tasks
from pipeline.backends.graph.tracing import make_graph
from tests.backends.ascend.made_up import HW
from tests.backends.ascend.steps import find_round_trips, gradient_step, of, only

NUMBERS = ("NHWC", "HWIO", "NHWC")
SIDE = 14


def convolved(x: Array, kernel: Array) -> Array:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS)


def split_network(*parts: int, by_op: bool = False) -> TaskGraph:
    """A convolution, one for each part of its channels, a concatenation and a convolution."""
    channels = sum(parts)

    def forward(p: dict[str, Any], x: Array) -> Array:
        x = convolved(x, p["in"])
        edges = [sum(parts[:place]) for place in range(len(parts) + 1)]
        slices = [x[..., begin:end] for begin, end in pairwise(edges)]
        joined = jnp.concatenate(
            [convolved(*pair) for pair in zip(slices, p["parts"], strict=True)], -1
        )
        return convolved(joined, p["out"])

    parameters = {
        "in": of(3, 3, 16, channels),
        "parts": [of(3, 3, part, part) for part in parts],
        "out": of(3, 3, channels, 16),
    }
    return gradient_step(forward, parameters, of(4, SIDE, SIDE, 16)).tasks("O2", by_op=by_op)


def count_conversions(graph: TaskGraph) -> int:
    """TransData of maps in the forward pass, but the images'."""
    sources = [task.reads[0] for task in only(graph, "trans_data", "forward")]
    return sum(len(graph.buffers[index].shape) == 4 for index in sources) - 1


@pytest.mark.parametrize("by_op", [False, True])
def test_split_at_whole_blocks_needs_no_conversion(by_op: bool) -> None:
    assert count_conversions(split_network(32, 48, by_op=by_op)) == 0


@pytest.mark.parametrize("by_op", [False, True])
def test_split_at_partial_blocks_is_converted_on_both_sides(by_op: bool) -> None:
    """Before and after the slices, before the concatenation of each part, and after it."""
    graph = split_network(26, 26, 28, by_op=by_op)
    assert count_conversions(graph) == 1 + 3 + 3 + 1
    for task in only(graph, "copy", "forward"):
        touched = {graph.buffers[index].layout for index in (*task.reads, *task.writes)}
        assert touched == {"ND"}


@pytest.mark.slow
@settings(max_examples=8)
@given(st.lists(st.integers(1, 70), min_size=2, max_size=4), st.booleans())
def test_split_costs_at_least_one_move_of_its_bytes(parts: list[int], by_op: bool) -> None:
    graph = split_network(*parts, by_op=by_op)
    moved = [task.cost_class in ("copy", "trans_data") for task in graph.tasks]
    times = price_tasks(graph, HW)
    pairs = zip(times, moved, strict=True)
    forward_bytes = 2 * 2 * 4 * SIDE**2 * sum(parts)
    l2_bytes_per_us = HW.ai_cores_count * HW.ai_core_clock_mhz
    l2_bytes_per_us *= HW.l2_read_bytes_per_cycle + HW.l2_write_bytes_per_cycle
    assert sum(time.us for time, is_move in pairs if is_move) >= forward_bytes / l2_bytes_per_us
    assert not find_round_trips(graph)


def test_channel_shuffle_has_no_redundant_conversions() -> None:
    def shuffled(p: dict[str, Array], x: Array) -> Array:
        x = convolved(x, p["in"])
        x = x.reshape(*x.shape[:3], 2, 29).swapaxes(3, 4).reshape(x.shape)
        left, right = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([left, convolved(right, p["out"])], -1)

    parameters = {"in": of(3, 3, 16, 58), "out": of(3, 3, 29, 29)}
    graph = gradient_step(shuffled, parameters, of(4, SIDE, SIDE, 16)).tasks("O2")
    (shuffle,) = only(graph, "transpose", "forward")
    assert shuffle.permutation == Permutation((4, 2, 29, SIDE**2), (0, 2, 1, 3))
    # The map, the right half before and after its convolution, and the result.
    assert count_conversions(graph) == 4
    assert not find_round_trips(graph)


@given(st.permutations(range(4)), st.integers(1, 3))
def test_transpose_of_outer_axes_keeps_channel_rows(order: list[int], first: int) -> None:
    shape = (2, 3, 5, 7)
    channels = 7 * 5 ** (first < 3) * 3 ** (first < 2)
    moved = find_map_permutation(shape, order, channels)
    fixed = order[:first] == list(range(first))
    assert sorted(moved.lengths) == sorted(moved.lengths[axis] for axis in moved.order)
    assert moved.keeps_rows >= (fixed and first > 1)


@pytest.mark.parametrize(("part", "conversions"), [(32, 0), (24, 4)])
def test_volume_splits_are_converted_like_image_splits(part: int, conversions: int) -> None:
    def convolved_volume(x: Array, kernel: Array) -> Array:
        numbers = ("NDHWC", "DHWIO", "NDHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1,) * 3, "SAME", dimension_numbers=numbers)

    def forward(p: dict[str, Array], x: Array) -> Array:
        x = convolved_volume(x, p["in"])
        x = jnp.concatenate([jax.nn.relu(x[..., :part]), x[..., part:]], -1)
        return convolved_volume(x, p["out"])

    parameters = {"in": of(3, 3, 3, 16, 64), "out": of(3, 3, 3, 64, 16)}
    graph = gradient_step(forward, parameters, of(2, 8, 8, 8, 16)).tasks("O2")
    sources = [graph.buffers[task.reads[0]] for task in only(graph, "trans_data", "forward")]
    assert sum(len(buffer.shape) == 5 for buffer in sources) - 1 == conversions


def test_channel_axis_survives_elementwise_work() -> None:
    def network(x: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = ("NCHW", "OIHW", "NCHW")
        made = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        return jnp.tanh(made + 1.0)

    graph = make_graph(jax.jit(network).trace(of(2, 3, 8, 8), of(4, 3, 3, 3)))
    axes = find_channel_axes(graph, find_dataflow(graph, find_phases(graph, ())))
    assert axes[graph.outputs[0]] == 1


def test_reshaped_volume_has_a_channel_axis_within_its_rank() -> None:
    """The reshape's source, with fewer axes, is the same value."""

    def network(x: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = ("NDHWC", "DHWIO", "NDHWC")
        volumes = x.reshape(2, 4, 4, 2, 3)
        return jax.lax.conv_general_dilated(
            volumes, kernel, (1, 1, 1), "SAME", dimension_numbers=numbers
        )

    graph = make_graph(jax.jit(network).trace(of(2, 8, 12), of(3, 3, 2, 3, 5)))
    axes = find_channel_axes(graph, find_dataflow(graph, find_phases(graph, ())))
    assert axes[graph.outputs[0]] == 4
    assert all(axis < len(graph.values[index].shape) for index, axis in axes.items())
