"""Laws of the cost model: what a price depends on, and how it grows."""

from __future__ import annotations

import math
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import Array

from pipeline.backends.ascend.chip.options import ExecutionConfig
from pipeline.backends.ascend.chip.tasks import (
    Permutation,
    Task,
    TaskGraph,
    VectorWork,
    simplify_permutation,
)
from pipeline.backends.ascend.cost.task_time import compute_floor_us, price_tasks
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from tests.backends.ascend.made_up import HW
from tests.backends.ascend.products import (
    buffer,
    convolution,
    feature_map_task,
    graph_of,
    matmul,
    row_task,
    stream,
)
from tests.backends.ascend.steps import gradient_step, of, only

TASK_US = compute_floor_us(HW.ai_cores_count, HW)
lengths = st.integers(1, 4)


def us(graph: TaskGraph) -> float:
    return sum(time.us for time in price_tasks(graph, HW))


def transpose_task(shape: tuple[int, ...], order: tuple[int, ...], dtype: str) -> TaskGraph:
    """A transpose alone, its buffers cold."""
    result = tuple(shape[axis] for axis in order)
    buffers = (buffer(0, shape, dtype), buffer(1, result, dtype))
    task = Task(
        "TransposeD", "net", "vector", "forward", "transpose", (0,), (1,),
        vector=VectorWork(math.prod(shape), dtype), permutation=simplify_permutation(shape, order),
    )  # fmt: skip
    return TaskGraph(buffers, (task,))


@st.composite
def written_twice(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Shape and order of a transpose, and the same with every axis split in two by a reshape."""
    factors = draw(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=4))
    order = tuple(draw(st.permutations(range(len(factors)))))
    shape = tuple(a * b for a, b in factors)
    split = tuple(length for pair in factors for length in pair)
    split_order = tuple(place for axis in order for place in (2 * axis, 2 * axis + 1))
    return shape, order, split, split_order


@pytest.mark.medium
@given(written_twice(), st.sampled_from(("float16", "float32")))
def test_transpose_price_depends_only_on_its_byte_permutation(
    written: tuple[tuple[int, ...], ...], dtype: str
) -> None:
    shape, order, split, split_order = written
    assert us(transpose_task(shape, order, dtype)) == us(transpose_task(split, split_order, dtype))


@pytest.mark.medium
@given(written_twice())
def test_simplified_permutation_moves_the_same_elements(
    written: tuple[tuple[int, ...], ...],
) -> None:
    shape, order, *_ = written
    moved = simplify_permutation(shape, order)
    numbers = np.arange(math.prod(shape))
    plain = numbers.reshape(shape).transpose(order).ravel()
    merged = numbers.reshape(moved.lengths).transpose(moved.order).ravel()
    assert (plain == merged).all()
    assert all(second != first + 1 for first, second in pairwise(moved.order))


def test_adjacent_axes_are_merged_in_a_permutation() -> None:
    assert simplify_permutation((8, 1, 49, 6, 32), (0, 1, 3, 2, 4)) == Permutation(
        (8, 49, 6, 32), (0, 2, 1, 3)
    )
    assert simplify_permutation((8, 7, 7, 6, 32), (0, 3, 1, 2, 4)) == Permutation(
        (8, 49, 6, 32), (0, 2, 1, 3)
    )
    assert simplify_permutation((4, 5), (0, 1)).keeps_bytes


@pytest.mark.parametrize("ways", ["windows", "matrices"])
def test_equivalent_transposes_cost_the_same(ways: str) -> None:
    """The windows of a Swin transformer, and squares beside almost squares."""

    def price(function: object, *shape: int) -> float:
        traced = gradient_step(function, {"w": of(*shape)}, of(*shape))  # type: ignore[arg-type]
        pricing = Pricing(traced, chipset("ascend910"))
        graph, times = pricing.tasks(ExecutionConfig(precision="O2"))
        turned = only(graph, "transpose")
        assert turned
        return sum(time.us for task, time in zip(graph.tasks, times, strict=True) if task in turned)

    if ways == "windows":

        def direct(p: dict[str, Array], x: Array) -> Array:
            return jnp.cumsum((p["w"] * x).transpose(0, 2, 1, 3), -1)

        def split(p: dict[str, Array], x: Array) -> Array:
            product = (p["w"] * x).reshape(256, 7, 7, 6, 32)
            return jnp.cumsum(product.transpose(0, 3, 1, 2, 4).reshape(256, 6, 49, 32), -1)

        one, other = price(direct, 256, 49, 6, 32), price(split, 256, 49, 6, 32)
        assert other == pytest.approx(one, rel=0.1)
        return

    def swapped(p: dict[str, Array], x: Array) -> Array:
        return jnp.cumsum((p["w"] * x).swapaxes(-1, -2), -1)

    square, wide = price(swapped, 3072, 64, 64), price(swapped, 3072, 64, 48)
    assert wide / square == pytest.approx(48 / 64, rel=0.1)


sizes = st.integers(1, 3000)


@pytest.mark.medium
@given(st.integers(2, 10**7), st.floats(0, 30), st.floats(0.05, 0.95))
def test_split_stream_is_never_cheaper(elements: int, simple: float, share: float) -> None:
    first = max(int(elements * share), 1)
    parts = us(stream("elementwise", first, simple)) + us(
        stream("elementwise", elements - first or 1, simple)
    )
    assert parts >= us(stream("elementwise", elements, simple)) * (1 - 1e-9)


@pytest.mark.medium
@given(st.integers(2, 64), st.integers(1, 60), st.integers(1, 300), st.data())
def test_feature_map_split_by_images_is_never_cheaper(
    images: int, edge: int, channels: int, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(("max_pool", "max_pool_grad", "avg_pool", "bias_grad")))
    first = data.draw(st.integers(1, images - 1))
    whole = us(feature_map_task(kind, images, edge, channels))
    parts = sum(
        us(feature_map_task(kind, count, edge, channels)) for count in (first, images - first)
    )
    assert parts >= whole * (1 - 1e-9)


def columns(rows: int, width: int, taken: int) -> TaskGraph:
    """A slice of `taken` of a matrix's columns."""
    return graph_of("copy", [((rows, width), "float16")], ((rows, taken), "float16"))


def along_rows(rows: int, width: int, operations: int) -> TaskGraph:
    """A kernel that works along rows."""
    work = VectorWork(rows * width, "float16", 3, 1, operations)
    return graph_of("rows", [((rows, width), "float16")], ((rows, width), "float16"), vector=work)


@pytest.mark.medium
@given(
    st.integers(2, 10**6), st.integers(2, 3000), st.integers(1, 20), st.floats(0.05, 0.95),
    st.booleans(),
)  # fmt: skip
@example(184_696, 64, 8, 0.5, True)
@example(153_600, 50, 6, 0.5, False)
def test_row_task_cost_is_subadditive(
    rows: int, width: int, number: int, share: float, slices: bool
) -> None:
    first = min(max(int(rows * share), 1), rows - 1)

    def price(count: int) -> float:
        if slices:
            return us(columns(count, width, min(number, width - 1)))
        return us(along_rows(count, width, number))

    whole = price(rows)
    assert price(first) + price(rows - first) >= whole * (1 - 1e-9)
    assert price(2 * rows) <= 2 * whole + TASK_US


@pytest.mark.medium
@settings(max_examples=50)
@given(st.integers(16, 2000), sizes, sizes)
def test_product_split_by_rows_is_never_cheaper(m: int, k: int, n: int) -> None:
    half = m // 2
    assert us(matmul(half, k, n)) + us(matmul(m - half, k, n)) >= us(matmul(m, k, n)) * (1 - 1e-9)


@pytest.mark.medium
@settings(max_examples=60)
@given(
    st.sampled_from(("conv", "conv_input_grad", "conv_kernel_grad", "depthwise")),
    st.integers(1, 32),
    st.integers(1, 60),
    st.integers(1, 300),
    st.integers(1, 300),
)
@example("conv_kernel_grad", 6, 52, 49, 129)
@example("conv_kernel_grad", 14, 25, 81, 225)
@example("conv", 8, 51, 289, 257)
def test_convolution_of_double_batch_costs_at_most_twice_plus_a_task(
    kind: str, images: int, edge: int, inner: int, outer: int
) -> None:
    once, twice = (
        us(convolution(kind, count, edge, inner, outer))  # type: ignore[arg-type]
        for count in (images, 2 * images)
    )
    assert twice <= 2 * once + TASK_US


@pytest.mark.medium
@given(
    st.sampled_from(("elementwise", "cast", "bn_update", "copy", "rows", "gather")),
    st.integers(1, 10**6),
    st.integers(1, 64),
)
def test_task_of_double_size_costs_at_most_twice_plus_a_task(
    kind: str, elements: int, width: int
) -> None:
    def task(count: int) -> TaskGraph:
        if kind == "gather":
            return row_task("gather", count, width)
        return stream(kind, count)  # type: ignore[arg-type]

    assert us(task(2 * elements)) <= 2 * us(task(elements)) + TASK_US
