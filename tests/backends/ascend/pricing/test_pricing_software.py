"""Prices of a step under several software stacks."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.backends.ascend import price
from pipeline.backends.ascend.chip.options import OptionError
from tests.backends.ascend.dense_step import ALIGNED, BATCH, WEIGHTS, step
from tests.backends.ascend.made_up import HW


def test_a_stack_has_its_own_launches() -> None:
    graph, mindspore, torch = (
        price(step, WEIGHTS, BATCH, software=software)
        for software in ("mindspore_graph", "mindspore_eager", "pytorch_eager")
    )
    assert (graph.config.mode, mindspore.config.mode) == ("loop_sink", "op_by_op")
    launches = [report.timeline.host_us - HW.host_step_us for report in (mindspore, torch)]
    assert launches[0] / launches[1] == pytest.approx(230 / 80, rel=0.15)
    assert graph.step_ms < torch.step_ms < mindspore.step_ms
    assert graph.step_ms == price(step, WEIGHTS, BATCH).step_ms


def test_eager_products_convert_matrices_that_graphs_keep_in_blocks() -> None:
    graph, eager = (
        price(step, WEIGHTS, ALIGNED, software=software)
        for software in ("mindspore_graph", "pytorch_eager")
    )
    converted = [
        sum(task.us for task in report.tasks if task.type == "TransData")
        for report in (graph, eager)
    ]
    assert converted[1] > 2.5 * converted[0]


def test_tokens_that_are_no_whole_sixteens_cost_more_than_more_of_them() -> None:
    odd, whole = (price(step, WEIGHTS, batch).device_ms for batch in (BATCH, ALIGNED))
    assert odd > 1.2 * whole


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"software": "caffe"},
            "software = 'caffe': must be None (MindSpore) or one of mindspore_graph, ",
        ),
        (
            {"software": "pytorch_eager", "mode": "loop_sink"},
            "mode = loop_sink: must be op_by_op for software = pytorch_eager",
        ),
        (
            {"software": "mindspore_graph", "mode": "op_by_op"},
            "mode = op_by_op: must be graph_sink or loop_sink for software = mindspore_graph",
        ),
    ],
)
def test_a_stack_that_is_not_known_or_has_no_such_mode(given: Any, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        price(step, WEIGHTS, BATCH, **given)
    assert message in str(caught.value)
    assert caught.value.exit_status == 2
