"""Types and casts under O1, apex's casts at each call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.backends.ascend.chip.options import Precision
from pipeline.backends.ascend.chip.tasks import Task, TaskGraph
from tests.backends.ascend.compiler.test_fusion import convolutional
from tests.backends.ascend.steps import gradient_step, macs, of

TOKENS, FEATURES = 512, 64
NORMALISED = ("conv", "conv_input_grad", "conv_kernel_grad", "bn_reduce", "bn_update")


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
