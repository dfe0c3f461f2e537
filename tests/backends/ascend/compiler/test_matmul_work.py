"""Sizes of products by closed forms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pipeline.backends.ascend.chip.tasks import CubeWork, TaskGraph
from tests.backends.ascend.steps import gradient_step, macs, of, only

BATCH, SIDE = 2, 16


def convolve(x: Any, kernel: Any, stride: int = 1, groups: int = 1) -> Any:
    axes = "DHW"[5 - x.ndim :] if x.ndim < 5 else "DHW"
    numbers = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride,) * len(axes), "SAME", dimension_numbers=numbers,
        feature_group_count=groups,
    )  # fmt: skip


def tasks_of(stride: int = 1, groups: int = 1, channels: int = 32, inner: int = 16) -> TaskGraph:
    """A convolution after another, so that its input has a gradient."""

    def forward(p: Any, x: Any) -> Any:
        return convolve(jnp.tanh(convolve(x, p["first"])), p["kernel"], stride, groups)

    shapes = {"first": of(1, 1, 4, inner), "kernel": of(3, 3, inner // groups, channels)}
    return gradient_step(forward, shapes, of(BATCH, SIDE, SIDE, 4)).tasks("O2")


def work(graph: TaskGraph, cost_class: str) -> CubeWork:
    """The second convolution's work."""
    found = [task.cube for task in only(graph, cost_class) if task.cube]
    return max(found, key=lambda cube: cube.macs)


def test_convolution_and_its_gradients_have_matmul_sizes() -> None:
    graph = tasks_of()
    positions = BATCH * SIDE * SIDE
    forward = work(graph, "conv")
    assert (forward.m, forward.k, forward.n) == (positions, 9 * 16, 32)
    back = work(graph, "conv_input_grad")
    assert (back.m, back.k, back.n) == (positions, 9 * 32, 16)
    kernel = work(graph, "conv_kernel_grad")
    assert (kernel.m, kernel.k, kernel.n) == (9 * 16, positions, 32)
    assert forward.macs == back.macs == kernel.macs == positions * 9 * 16 * 32


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 4])
def test_convolution_and_gradients_have_equal_multiply_adds(stride: int, groups: int) -> None:
    graph = tasks_of(stride, groups)
    expected = BATCH * (SIDE // stride) ** 2 * 9 * 16 * 32 // groups
    for cost_class in ("conv", "conv_input_grad", "conv_kernel_grad"):
        assert work(graph, cost_class).macs == expected
        assert work(graph, cost_class).batch == groups


def test_depthwise_convolutions_have_separate_cost_classes() -> None:
    graph = tasks_of(groups=16, channels=16)
    for cost_class in ("depthwise", "depthwise_input_grad", "depthwise_kernel_grad"):
        assert work(graph, cost_class).macs == BATCH * SIDE**2 * 9 * 16


@pytest.mark.parametrize("rank", [1, 3])
def test_convolutions_of_any_rank_are_counted(rank: int) -> None:
    def forward(p: Any, x: Any) -> Any:
        return convolve(x, p)

    graph = gradient_step(forward, of(*[3] * rank, 8, 8), of(BATCH, *[8] * rank, 8)).tasks("O2")
    assert macs(graph) == 2 * BATCH * 8**rank * 3**rank * 64


def test_transposed_convolution_skips_inserted_zeros() -> None:
    def forward(p: Any, x: Any) -> Any:
        return jax.lax.conv_transpose(x, p, (2, 2), "SAME")

    graph = gradient_step(forward, of(4, 4, 16, 8), of(BATCH, 8, 8, 16)).tasks("O2")
    assert macs(graph) == 2 * BATCH * 8 * 8 * 16 * 16 * 8


@pytest.mark.parametrize(
    ("formula", "left", "right", "sizes"),
    [
        ("ij,jk->ik", (4, 5), (5, 6), (1, 4, 5, 6)),
        ("bhqd,bhkd->bhqk", (2, 3, 4, 8), (2, 3, 5, 8), (6, 4, 8, 5)),
        ("bsd,dhk->bshk", (2, 7, 8), (8, 3, 4), (1, 14, 8, 12)),
        ("i,j->ij", (4,), (5,), (1, 4, 1, 5)),
        ("i,i->", (7,), (7,), (1, 1, 7, 1)),
    ],
)
def test_matrix_products_have_their_sizes(
    formula: str, left: tuple[int, ...], right: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    def forward(p: Any, x: Any) -> Any:
        return jnp.einsum(formula, x, p)

    graph = gradient_step(forward, of(*right), of(*left)).tasks("O2")
    cube = next(task.cube for task in graph.tasks if task.cube)
    found = (cube.batch, *sorted((cube.m, cube.n)), cube.k)
    assert found == (sizes[0], *sorted((sizes[1], sizes[3])), sizes[2])
    assert cube.macs == cube.batch * cube.m * cube.k * cube.n
