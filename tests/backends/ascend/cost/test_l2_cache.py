"""Traffic of tasks through the L2: every byte is read once, from one of two places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.ascend.chip.tasks import TaskGraph
from pipeline.backends.ascend.cost.l2_cache import measure_traffic, read_bytes
from tests.backends.ascend.memory_graphs import buffer, graphs, task


@pytest.mark.medium
@given(graph=graphs(), l2_bytes=st.integers(1, 20_000))
def test_bytes_are_read_from_the_l2_or_from_memory(graph: TaskGraph, l2_bytes: int) -> None:
    traffic = measure_traffic(graph, l2_bytes, 0.5, 1.5)
    assert len(traffic) == len(graph.tasks)
    for task_, moved in zip(graph.tasks, traffic, strict=True):
        total = sum(read_bytes(task_, graph.buffers, index) for index in task_.reads)
        assert moved.read_bytes == pytest.approx(total)
        assert moved.l2_bytes >= 0
        assert moved.hbm_bytes >= 0
        assert moved.write_bytes == sum(graph.buffers[index].nbytes for index in task_.writes)


@pytest.mark.slow
@given(graph=graphs(), l2_bytes=st.integers(1, 20_000))
def test_larger_cache_never_has_fewer_hits(graph: TaskGraph, l2_bytes: int) -> None:
    small, large = (measure_traffic(graph, size, 0.5, 1.5) for size in (l2_bytes, 2 * l2_bytes))
    for before, after in zip(small, large, strict=True):
        assert after.l2_bytes >= before.l2_bytes - 1e-9


def test_recent_output_is_read_only_from_the_l2() -> None:
    buffers = tuple(buffer(index, 100) for index in range(3))
    graph = TaskGraph(buffers, (task([0], [1]), task([1], [2])))
    first, second = measure_traffic(graph, 10_000, 0.5, 1.5)
    assert (first.l2_bytes, first.hbm_bytes) == (0, 100)
    assert (second.l2_bytes, second.hbm_bytes) == (100, 0)


def test_tiny_cache_has_no_hits() -> None:
    buffers = tuple(buffer(index, 1000) for index in range(3))
    graph = TaskGraph(buffers, (task([0], [1]), task([1], [2])))
    assert measure_traffic(graph, 10, 0.5, 1.5)[1].l2_bytes == 0


def test_gather_reads_as_many_bytes_as_it_writes() -> None:
    buffers = (buffer(0, 1000), buffer(1, 40))
    assert read_bytes(task([0], [1], cost_class="gather"), buffers, 0) == 40
    assert read_bytes(task([0], [1]), buffers, 0) == 1000


def test_partial_read_leaves_the_rest_of_its_buffer_in_memory() -> None:
    """A gather of 40 bytes brings no 1,000 into the L2, and a complete read does."""
    buffers = (buffer(0, 1000), buffer(1, 40), buffer(2, 1))
    for first, l2_bytes in (("gather", 0), ("elementwise", 1000)):
        graph = TaskGraph(buffers, (task([0], [1], cost_class=first), task([0], [2])))
        assert measure_traffic(graph, 10_000, 0.5, 1.5)[1].l2_bytes == l2_bytes


@pytest.mark.parametrize(("row", "read"), [(512, 1024), (32, 4096)])
def test_short_row_slice_reads_the_complete_buffer(row: int, read: int) -> None:
    wide = buffer(0, 4096, shape=(2, 2048) if row == 512 else (32, 128))
    part = buffer(1, 1024, shape=(2, 512) if row == 512 else (32, 32))
    assert read_bytes(task([0], [1], cost_class="copy"), (wide, part), 0) == read
