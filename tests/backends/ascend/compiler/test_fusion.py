"""Buffer fusion: fewer bytes, the same products, gradients where they were."""

from __future__ import annotations

import jax
import pytest
from jax import Array

from pipeline.backends.ascend.chip.tasks import CubeWork, Task, TaskGraph, VectorWork
from pipeline.backends.ascend.compiler.fusion import fuse_kernels
from pipeline.backends.ascend.compiler.primitives import load_patterns
from pipeline.backends.ascend.pricing.traced_step import TracedStep
from tests.backends.ascend.products import buffer
from tests.backends.ascend.steps import (
    ROWS,
    WIDTH,
    gradient_step,
    macs,
    nbytes,
    normalised,
    of,
    perceptron,
)

FUSIONS = tuple(fusion.name for fusion in load_patterns().fusions)


def convolutional() -> TracedStep:
    """Two convolutions, each with batch normalisation and a ReLU."""

    def forward(p: dict[str, Array], x: Array) -> Array:
        for name in ("a", "b"):
            numbers = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, p[name], (1, 1), "SAME", dimension_numbers=numbers)
            x = jax.nn.relu(normalised(x, p["g"], p["s"], (0, 1, 2)))
        return x

    shapes = {"a": of(3, 3, 16, 16), "b": of(3, 3, 16, 16), "g": of(16), "s": of(16)}
    return gradient_step(forward, shapes, of(4, 32, 32, 16))


@pytest.mark.parametrize("name", FUSIONS)
@pytest.mark.parametrize("traced", [perceptron(), convolutional()], ids=["dense", "conv"])
def test_disabled_fusion_never_saves_bytes(traced: TracedStep, name: str) -> None:
    fused, apart = traced.tasks("O2"), traced.tasks("O2", without=frozenset({name}))
    assert nbytes(apart) >= nbytes(fused)
    assert len(apart.tasks) >= len(fused.tasks)
    assert macs(apart) == macs(fused)


def test_bias_and_relu_are_fused_into_their_product() -> None:
    traced = perceptron(2)
    fused = traced.tasks("O2")
    apart = traced.tasks("O2", without=frozenset(FUSIONS))
    assert any("matmul_eltwise" in task.fused for task in fused.tasks)
    assert nbytes(apart) - nbytes(fused) >= 2 * 2 * ROWS * WIDTH


def test_batch_statistics_are_fused_into_the_convolution() -> None:
    graph = convolutional().tasks("O2")
    joined = [task for task in graph.tasks if "conv_bnreduce" in task.fused]
    assert len(joined) == 2
    assert all(len(task.writes) == 2 for task in joined)


def test_gradients_refer_to_the_tasks_that_write_them() -> None:
    for without in (frozenset[str](), frozenset(FUSIONS)):
        graph = convolutional().tasks("O2", without=without)
        assert graph.gradients
        for _, size, place in graph.gradients:
            assert size in {graph.buffers[index].nbytes for index in graph.tasks[place].writes}


@pytest.mark.parametrize("first", ["reduce", "other"])
def test_product_is_not_moved_behind_its_first_reader(first: str) -> None:
    """A fused task runs where the kernel that it takes in ran."""
    work = VectorWork(4096, "float16")
    product = Task(
        "Conv2D", "", "cube", "forward", "conv", (0,), (1,), cube=CubeWork(1, 64, 64, 64, 64**3)
    )
    readers = {
        "reduce": Task(
            "BNTrainingReduce", "", "vector", "forward", "bn_reduce", (1,), (2,), vector=work
        ),
        "other": Task("Exp", "", "vector", "forward", "elementwise", (1,), (3,), vector=work),
    }
    later = readers["other" if first == "reduce" else "reduce"]
    buffers = tuple(buffer(index, (64, 64)) for index in range(4))
    graph = TaskGraph(buffers, (product, readers[first], later), outputs=(2, 3))
    fused = fuse_kernels(graph, load_patterns())
    assert len(fused.tasks) == (2 if first == "reduce" else 3)
    written: set[int] = {0}
    for task in fused.tasks:
        assert written.issuperset(task.reads)
        written.update(task.writes)


def test_norm_gradient_is_fused_into_the_weight_gradient() -> None:
    """The gradient of a map stays in memory for the input gradient, which comes later."""
    graph = convolutional().tasks("O2")
    joined = [place for place, task in enumerate(graph.tasks) if task.type == "FusedDbnDw"]
    assert joined
    written = set(range(len(graph.buffers))) - {i for task in graph.tasks for i in task.writes}
    for place, task in enumerate(graph.tasks):
        assert written.issuperset(task.reads)
        written.update(task.writes)
        if place in joined:
            assert len(task.writes) >= 2
            before = [other.writes for other in graph.tasks[:place] if other.type == "MemSet"]
            assert (task.writes[0],) in before
