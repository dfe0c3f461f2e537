"""Elements that layouts store, and copies that kernels share."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.ascend.chip.tasks import Layout
from pipeline.backends.ascend.compiler.buffers import count_padded_elements
from pipeline.backends.graph.graph import Value
from pipeline.core.host.array_values import get_stored_bytes
from tests.backends.ascend.steps import gradient_step, normalised, of, only


@pytest.mark.parametrize(
    ("shape", "layout", "axes", "stored"),
    [
        ((2, 8, 8, 3), "NC1HWC0", (3,), 2 * 8 * 8 * 16),
        ((2, 3, 8, 8), "NC1HWC0", (1,), 2 * 16 * 8 * 8),
        ((2, 8, 8, 64), "NC1HWC0", (3,), 2 * 8 * 8 * 64),
        ((30, 17), "FRACTAL_NZ", (), 32 * 32),
        ((17,), "FRACTAL_NZ", (), 17),
        ((7, 7, 3, 64), "FRACTAL_Z", (2, 3), 7 * 7 * 16 * 64),
        ((3, 3, 64, 64), "FRACTAL_Z", (2, 3), 9 * 64 * 64),
        ((64, 3, 7, 7), "FRACTAL_Z", (0, 1), 64 * 16 * 7 * 7),
        ((7, 7, 1, 32), "FRACTAL_Z", (2, 3), 7 * 7 * 16 * 32),
        ((30, 17), "ND", (), 30 * 17),
        ((), "ND", (), 1),
    ],
)  # fmt: skip
def test_padded_elements_match_the_layout(
    shape: tuple[int, ...], layout: Layout, axes: tuple[int, ...], stored: int
) -> None:
    assert count_padded_elements(Value(shape, "float16"), layout, axes) == stored


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=4),
    st.sampled_from(["ND", "NC1HWC0", "FRACTAL_NZ", "FRACTAL_Z"]),
)
def test_padding_never_loses_elements(sides: list[int], layout: Layout) -> None:
    axes = range(len(sides) - (1 if layout == "NC1HWC0" else 2), len(sides))
    stored = count_padded_elements(Value(tuple(sides), "float16"), layout, axes)
    assert math.prod(sides) <= stored <= math.prod(sides) * 256


def convolve(p: Any, x: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.nn.relu(
        jax.lax.conv_general_dilated(x, p, (1, 1), "SAME", dimension_numbers=numbers)
    )


@pytest.mark.parametrize("core", ["joined", "split"])
def test_transposed_map_leaves_its_blocks_first(core: str) -> None:
    """The operand of a matrix product in half precision isn't the transpose's plain copy."""

    def forward(p: Any, x: jax.Array) -> jax.Array:
        return jnp.einsum("bhwc,cd->bhwd", convolve(p["kernel"], x), p["matrix"])

    parameters = {"kernel": of(3, 3, 32, 32), "matrix": of(32, 64)}
    graph = gradient_step(forward, parameters, of(8, 16, 16, 32)).tasks("O2", core=core)
    transposes = only(graph, "transpose", "forward")
    assert [graph.buffers[task.reads[0]].layout for task in transposes] == ["ND"]


def test_move_reads_a_weight_in_its_own_type() -> None:
    """An Add reads the weight's float16 copy, a concatenation with a float32 map the weight."""

    def forward(p: Any, x: jax.Array) -> jax.Array:
        maps = convolve(p["kernel"], x) + p["offset"]
        return jnp.concatenate([maps, p["offset"]], -1)

    parameters = {"kernel": of(3, 3, 32, 40), "offset": of(8, 16, 16, 40)}
    graph = gradient_step(forward, parameters, of(8, 16, 16, 32)).tasks("O2")
    (move,) = only(graph, "copy", "forward")
    assert {graph.buffers[index].dtype for index in (*move.reads, *move.writes)} == {"float32"}


def test_map_with_channels_last_has_no_padded_channels() -> None:
    def forward(p: Any, x: jax.Array) -> jax.Array:
        return jnp.abs(normalised(convolve(p["kernel"], x), p["scale"], p["shift"], (3,)))

    parameters = {"kernel": of(3, 3, 32, 40), "scale": of(40), "shift": of(40)}
    graph = gradient_step(forward, parameters, of(8, 64, 64, 32)).tasks("O2")
    maps = [buffer for buffer in graph.buffers if buffer.shape == (8, 64, 64, 40)]
    assert {buffer.layout for buffer in maps} == {"ND", "NC1HWC0"}
    for buffer in maps:
        channels = 40 if buffer.layout == "ND" else 48
        assert buffer.nbytes == 8 * 64 * 64 * channels * get_stored_bytes(buffer.dtype)


@pytest.mark.parametrize(
    ("numbers", "shape"),
    [(("NHWC", "HWIO", "NHWC"), (7, 7, 3, 64)), (("NHWC", "OIHW", "NHWC"), (64, 3, 7, 7))],
)
def test_kernel_and_its_gradient_have_padded_channels(
    numbers: tuple[str, str, str], shape: tuple[int, ...]
) -> None:
    """A stem's three input channels are stored as 16, wherever the kernel has them."""

    def forward(p: Any, x: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, p, (2, 2), "SAME", dimension_numbers=numbers)

    graph = gradient_step(forward, of(*shape), of(8, 32, 32, 3)).tasks("O2")
    kernels = [buffer for buffer in graph.buffers if sorted(buffer.shape) == sorted(shape)]
    assert {buffer.role for buffer in kernels} >= {"parameter", "gradient"}
    for buffer in kernels:
        assert buffer.nbytes == 16 * 64 * 7 * 7 * get_stored_bytes(buffer.dtype)


def test_products_on_transposed_maps_read_their_casts() -> None:
    """No Cast stays unread, and the cube multiplies no float32."""

    def multiply(p: Any, x: jax.Array) -> jax.Array:
        return jnp.einsum("bhwc,cd->bhwd", convolve(p["kernel"], x), p["matrix"])

    def normalise(p: Any, x: jax.Array) -> jax.Array:
        return normalised(convolve(p["kernel"], x), p["matrix"][:, 0], p["matrix"][:, 1], (3,))

    parameters = {"kernel": of(3, 3, 32, 32), "matrix": of(32, 64)}
    for forward in (multiply, normalise):
        graph = gradient_step(forward, parameters, of(8, 16, 16, 32)).tasks("O0")
        read = {index for task in graph.tasks for index in task.reads}
        products = [task for task in graph.tasks if task.engine == "cube"]
        operands = {graph.buffers[index].dtype for task in products for index in task.reads}
        assert read.issuperset(index for task in only(graph, "cast") for index in task.writes)
        assert operands == {"float16"}
