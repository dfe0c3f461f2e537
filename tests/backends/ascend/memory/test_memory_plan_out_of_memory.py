"""The message for a step that does not fit: the kernel, the tensors, and the batch that would."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pipeline.backends.ascend.chip.chip_files import load_chip
from pipeline.backends.ascend.chip.hardware import Hardware, extract_hardware
from pipeline.backends.ascend.chip.tasks import TaskGraph
from pipeline.backends.ascend.memory.memory_plan import (
    GIB,
    estimate_largest_batch,
    explain_out_of_memory,
    find_largest_tensors,
    plan_memory,
)
from tests.backends.ascend.memory_graphs import buffer, chain, task


@pytest.fixture(scope="module")
def hw() -> Hardware:
    """A chip with 32 MiB: 5 for parameters, 26 for feature maps, 1 for communication."""
    chip = extract_hardware(load_chip("ascend910"))
    return replace(chip, hbm_gib=32 / 1024)


def test_out_of_memory_message_has_request_and_largest_tensors(hw: Hardware) -> None:
    graph = chain(batch=32)
    plan = plan_memory(graph, hw)
    assert plan.verdict == "out of memory"
    first, totals, heading, *rest = explain_out_of_memory(plan, graph, 32, 1).splitlines()
    found = re.fullmatch(
        r"Device\(id:0\) memory isn't enough: kernel name: (.+), alloc size: (\d+)B\.", first
    )
    assert found is not None
    assert re.fullmatch(r"layer\d/MatMul(Grad)?-op\d+", found[1]) or found[1] == "images"
    assert int(found[2]) == 32 * 200_000
    assert "of 0.03 GiB (feature maps)" in totals
    assert "saved activations 0.04 GiB" in totals
    assert heading.startswith("The largest tensors")
    tensors, advice = rest[:-1], rest[-1]
    assert len(tensors) == len(find_largest_tensors(plan)) <= 10
    assert tensors[0].split() == ["6.1", "MiB", "images", "32x100000", "float16", "ND"]
    assert (
        advice
        == f"A batch of {estimate_largest_batch(plan, graph, 32)} should fit (requested: 32)."
    )


def test_ten_largest_tensors_are_sorted_by_size(hw: Hardware) -> None:
    sizes = [512 * (1 + (7 * i) % 23) for i in range(23)]
    graph = TaskGraph(
        buffers=tuple(buffer(i, size) for i, size in enumerate(sizes)),
        tasks=(task([], range(23)),),
    )
    told = [placed.nbytes for placed in find_largest_tensors(plan_memory(graph, hw))]
    assert told == sorted(sizes, reverse=True)[:10]


@pytest.mark.parametrize("asked", [2, 17, 32, 64])
def test_reported_batch_fits_and_one_more_does_not(asked: int, hw: Hardware) -> None:
    """Planned again, with a sample more and with none: the estimate is not far off."""
    graph = chain(batch=asked)
    said = estimate_largest_batch(plan_memory(graph, hw), graph, asked)
    true = max(b for b in range(1, 65) if plan_memory(chain(b), hw).verdict != "out of memory")
    assert abs(said - true) <= 1


def test_batch_advice_is_none_if_parameters_do_not_fit() -> None:
    chip = extract_hardware(load_chip("ascend910"))
    held = (buffer(0, 6 * GIB, "parameter", name="table"), buffer(1, 64, "input", shape=(8, 8)))
    graph = TaskGraph(held, (task([0, 1], []),), inputs=(1,), parameters=(0,))
    plan = plan_memory(graph, chip)
    assert estimate_largest_batch(plan, graph, 8) == 0
    message = explain_out_of_memory(plan, graph, 8, 1)
    assert message.startswith(
        f"Device(id:0) memory isn't enough: kernel name: table, alloc size: {6 * GIB}B."
    )
    assert message.endswith(
        "No batch size fits (requested: 8): memory that doesn't depend on it is too large."
    )
    assert "It fits into one pool for parameters and feature maps, as MindSpore has" in message


def test_plan_that_no_pool_holds_names_no_other_pool() -> None:
    chip = extract_hardware(load_chip("ascend910"))
    graph = TaskGraph((buffer(0, 40 * GIB),), (task([], [0]),))
    for plan in (plan_memory(graph, chip), plan_memory(graph, chip).join_pools()):
        assert plan.verdict == "out of memory"
        assert "It fits" not in explain_out_of_memory(plan, graph, 8, 1)
        assert plan.join_pools().verdict == "out of memory"
