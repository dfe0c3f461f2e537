"""Conversions that the compiler inserts: around products, under O0, around layer norm on images.

Types and casts under O1, apex's casts at each call.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from pipeline.backends.ascend.chip.options import Precision
from pipeline.backends.ascend.chip.tasks import Task, TaskGraph
from pipeline.backends.ascend.cost.vector_work import count_bias_cores
from tests.backends.ascend.compiler.test_fusion import convolutional
from tests.backends.ascend.made_up import HW
from tests.backends.ascend.steps import find_round_trips, gradient_step, macs, normalised, of, only

TOKENS, FEATURES = 512, 64
NORMALISED = ("conv", "conv_input_grad", "conv_kernel_grad", "bn_reduce", "bn_update")


def attention(p: dict[str, Array], x: Array) -> Array:
    """Self-attention of 4 heads, its heads moved by einsum alone."""
    heads = (*x.shape[:2], 4, x.shape[2] // 4)
    query, key, value = ((x @ p[name]).reshape(heads) for name in ("q", "k", "v"))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape) @ p["o"]


def lowered(tokens: int, *, by_op: bool = False) -> TaskGraph:
    parameters = {name: of(256, 256) for name in ("q", "k", "v", "o")}
    return gradient_step(attention, parameters, of(32, tokens, 256)).tasks("O2", by_op=by_op)


def converted(graph: TaskGraph) -> list[Task]:
    """The conversions of activations: those of weights come with their Cast, of gradients late."""
    return [
        task
        for task in only(graph, "trans_data")
        if task.phase != "optimizer"
        and all(len(graph.buffers[index].shape) > 2 for index in task.reads)
    ]


@pytest.mark.medium
def test_tokens_are_converted_unless_a_multiple_of_16() -> None:
    whole, odd = lowered(48), lowered(50)
    assert not only(whole, "transpose")
    assert len(converted(odd)) > len(converted(whole)) + 15
    assert len(only(odd, "transpose")) >= 8


def test_transposes_of_heads_move_whole_rows() -> None:
    transposes = only(lowered(50), "transpose")
    assert transposes
    for task in transposes:
        assert task.permutation is not None
        assert task.permutation.keeps_rows
        assert task.permutation.lengths[-1] == 64


def test_eager_frameworks_convert_every_product() -> None:
    assert len(converted(lowered(48, by_op=True))) > 3 * len(converted(lowered(48)))


@pytest.mark.parametrize("by_op", [False, True])
@pytest.mark.parametrize("tokens", [48, 50])
def test_layouts_are_converted_once_in_a_row(tokens: int, by_op: bool) -> None:
    graph = lowered(tokens, by_op=by_op)
    assert not find_round_trips(graph)


def test_slices_of_a_product_share_one_conversion() -> None:
    """Two slices of a product share its conversion; softmax and the next product read blocks."""

    def sliced(p: dict[str, Array], x: Array) -> Array:
        y = jax.nn.softmax(x @ p["w"])
        return (y @ p["w"])[:, :64] * y[:, 32:96] * y[:, 64:128]

    graph = gradient_step(sliced, {"w": of(256, 256)}, of(32, 192, 256)).tasks("O2")
    softmax = next(task for task in only(graph, "rows", "forward"))
    assert graph.buffers[softmax.writes[0]].layout == "FRACTAL_NZ"
    moves = only(graph, "copy", "forward")
    sources = {index for task in moves for index in task.reads}
    assert len(moves) == 3
    assert {graph.buffers[index].layout for index in sources} == {"ND"}
    assert len(sources) == 2


@pytest.mark.medium
def test_image_positions_are_the_rows_of_a_matrix() -> None:
    def dense(p: dict[str, Array], x: Array) -> Array:
        return jax.nn.gelu(x @ p["w"]) @ p["w"]

    def count(*shape: int) -> int:
        return len(converted(gradient_step(dense, {"w": of(256, 256)}, of(*shape)).tasks("O2")))

    assert count(32, 28, 28, 256) == count(32, 784, 256) < count(32, 7, 7, 256)


def test_conversions_have_no_separate_launch() -> None:
    assert not any(task.launched for task in converted(lowered(48, by_op=True)))


def test_cube_reads_and_writes_transposed_operands() -> None:
    def turned(p: dict[str, Array], x: Array) -> Array:
        return jnp.swapaxes(x @ p["w"], -1, -2) @ x

    step = gradient_step(turned, {"w": of(256, 256)}, of(8, 192, 256))
    assert not only(step.tasks("O2"), "transpose")


@pytest.mark.parametrize("precision", ["O0", "O2", "O3"])
def test_products_run_on_the_cube_under_every_level(precision: Any) -> None:
    def product(p: dict[str, Array], x: Array) -> Array:
        return x @ p["w"]

    graph = gradient_step(product, {"w": of(256, 256)}, of(512, 256)).tasks(precision)
    cubes = [task.cube for task in only(graph, "matmul")]
    assert {cube.dtype for cube in cubes if cube} == {"float16"}
    results = {graph.buffers[task.writes[0]].dtype for task in only(graph, "matmul", "forward")}
    assert results == ({"float32"} if precision == "O0" else results)
    casts = [task for task in only(graph, "cast") if task.phase == "forward"]
    assert len(casts) >= (2 if precision == "O0" else 1)


def test_layer_norm_on_images_is_transposed_to_nhwc_and_back() -> None:
    def block(p: dict[str, Array], x: Array) -> Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, p["in"], (1, 1), "SAME", dimension_numbers=numbers)
        x = normalised(x, p["scale"], p["shift"], (3,))
        return jax.lax.conv_general_dilated(x, p["out"], (1, 1), "SAME", dimension_numbers=numbers)

    parameters = {
        "in": of(3, 3, 64, 64), "out": of(3, 3, 64, 64), "scale": of(64), "shift": of(64),
    }  # fmt: skip
    graph = gradient_step(block, parameters, of(8, 32, 32, 64)).tasks("O2")
    forward = only(graph, "transpose", "forward")
    assert [task.permutation.lengths for task in forward if task.permutation] == [
        (8, 64, 1024),
        (8, 1024, 64),
    ]
    assert only(graph, "transpose", "backward")


@pytest.mark.parametrize(
    ("channels", "images", "plane", "cores"),
    [(64, 32, 57 * 57, 8), (192, 32, 169, 24), (256, 32, 169, 32), (128, 32, 28 * 28, 32),
     (64, 16, 400 * 400 + 1, 32)],
)  # fmt: skip
def test_bias_gradient_core_count_matches_the_trace(
    channels: int, images: int, plane: int, cores: int
) -> None:
    assert count_bias_cores(channels, images, 2.0 * plane, HW) == cores


def encode(weights: Any, tokens: jax.Array) -> jax.Array:
    """Add positions, then a product with softmax and a product with GELU, each with a shortcut."""
    tokens = tokens @ weights["embed"] + weights["positions"]
    tokens = tokens + jax.nn.softmax(tokens @ weights["mix"])
    return tokens + jax.nn.gelu(tokens @ weights["mix"], approximate=False) @ weights["mix"]


def trace_encoder(level: Precision = "O1") -> TaskGraph:
    weights = {
        "embed": of(FEATURES, FEATURES),
        "mix": of(FEATURES, FEATURES),
        "positions": of(TOKENS, FEATURES),
    }
    return gradient_step(encode, weights, of(TOKENS, FEATURES)).tasks(level, by_op=True)


def list_dtypes(graph: TaskGraph, task: Task) -> set[str]:
    """Return the types of the token matrices that a task reads and writes."""
    buffers = [graph.buffers[index] for index in (*task.reads, *task.writes)]
    return {buffer.dtype for buffer in buffers if buffer.shape == (TOKENS, FEATURES)}


def test_listed_functions_and_sums_with_float32_compute_in_float32() -> None:
    graph = trace_encoder()
    listed = [task for task in graph.tasks if {"erfc", "exp"}.intersection(task.fused)]
    assert Counter(task.phase for task in listed) == {"forward": 2, "backward": 2}
    added = [task for task in graph.tasks if task.type == "Add" and task.phase == "forward"]
    assert len(added) == 3
    for task in (*listed, *added):
        assert list_dtypes(graph, task) == {"float32"}


def test_products_are_float16_and_have_the_work_of_o2() -> None:
    graph = trace_encoder()
    products = [task for task in graph.tasks if task.cube is not None]
    operands = [graph.buffers[index] for task in products for index in task.reads]
    assert {buffer.dtype for buffer in operands} == {"float16"}
    assert macs(graph) == macs(trace_encoder("O2"))


def test_values_are_cast_once_to_a_type() -> None:
    graph = trace_encoder()
    casts = [task for task in graph.tasks if task.type == "Cast"]
    pairs = Counter((task.reads, graph.buffers[task.writes[0]].dtype) for task in casts)
    assert pairs
    assert set(pairs.values()) == {1}
    assert all(task.launched for task in casts)


def test_convolutions_and_batch_normalisation_are_as_under_o2() -> None:
    traced = convolutional()
    graphs = [traced.tasks(level, by_op=True) for level in ("O1", "O2")]
    convolutions, maps = (
        [[task.type for task in graph.tasks if task.cost_class in NORMALISED] for graph in graphs],
        [
            Counter(buffer.dtype for buffer in graph.buffers if len(buffer.shape) == 4)
            for graph in graphs
        ],
    )
    assert convolutions[0] == convolutions[1] != []
    assert maps[0]["float16"] >= maps[1]["float16"] > 0


def test_exponentials_widen_and_tanh_keeps_float16() -> None:
    def count_float32(function: Any) -> int:
        def forward(weights: Any, x: jax.Array) -> jax.Array:
            return function(x @ weights) @ weights

        step = gradient_step(forward, of(FEATURES, FEATURES), of(TOKENS, FEATURES))
        graph = step.tasks("O1", by_op=True)
        return sum(
            list_dtypes(graph, task) == {"float32"}
            for task in graph.tasks
            if task.cost_class == "elementwise"
        )

    assert count_float32(jnp.exp) > count_float32(jnp.tanh)
