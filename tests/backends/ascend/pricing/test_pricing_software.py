"""Prices of a step under several software stacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import strategies as st

from pipeline.backends.ascend import Report, price
from pipeline.backends.ascend.chip.options import OptionError
from tests.backends.ascend.dense_step import ALIGNED, BATCH, WEIGHTS, step
from tests.backends.ascend.made_up import HW
from tests.backends.ascend.steps import gradient_step, of

Function = Callable[[jax.Array], jax.Array]
CALLS: tuple[Function, ...] = (
    lambda x: jnp.sin(x),
    lambda x: jnp.tanh(x),
    lambda x: 0.5 * x,
    lambda x: x + 1.5,
    lambda x: jnp.exp(x),
)


def test_launch_cost_depends_on_the_software_stack() -> None:
    graph, mindspore, torch = (
        price(step, WEIGHTS, BATCH, software=software)
        for software in ("mindspore_graph", "mindspore_eager", "pytorch_eager")
    )
    assert (graph.config.mode, mindspore.config.mode) == ("loop_sink", "op_by_op")
    launches = [report.timeline.host_us - HW.host_step_us for report in (mindspore, torch)]
    assert launches[0] / launches[1] == pytest.approx(230 / 80, rel=0.15)
    assert graph.step_ms < torch.step_ms < mindspore.step_ms
    assert graph.step_ms == price(step, WEIGHTS, BATCH).step_ms


def test_eager_products_are_converted_more_than_in_a_graph() -> None:
    graph, eager = (
        price(step, WEIGHTS, ALIGNED, software=software)
        for software in ("mindspore_graph", "pytorch_eager")
    )
    converted = [
        sum(cost.us for cost in report.tasks if cost.task.type == "TransData")
        for report in (graph, eager)
    ]
    assert converted[1] > 2.5 * converted[0]


def test_unaligned_tokens_cost_more_than_more_aligned_tokens() -> None:
    odd, whole = (price(step, WEIGHTS, batch).device_ms for batch in (BATCH, ALIGNED))
    assert odd > 1.2 * whole


def count_launches(activation: Function, rows: int) -> int:
    """Count the launches of both passes of an activation between two products."""

    def forward(weights: Any, batch: jax.Array) -> jax.Array:
        return activation(batch @ weights[0]) @ weights[1]

    graph = gradient_step(forward, [of(32, 32), of(32, 8)], of(rows, 32)).tasks("O2", by_op=True)
    return sum(
        task.launched and task.cube is None and task.cost_class == "elementwise"
        for task in graph.tasks
        if task.phase in ("forward", "backward")
    )


@pytest.mark.medium
@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(
    st.lists(st.sampled_from(CALLS), min_size=1, max_size=8), st.sampled_from((16, 1024))
)
def test_activation_of_n_eager_calls_is_at_least_n_launches(
    calls: list[Function], rows: int
) -> None:
    def activation(x: jax.Array) -> jax.Array:
        for call in calls:
            x = call(x)
        return x

    assert count_launches(activation, rows) >= count_launches(lambda x: x, rows) + len(calls)


@pytest.mark.parametrize("activation", [jax.nn.gelu, jax.nn.silu, jax.nn.hard_swish])
def test_framework_activation_is_one_launch_in_each_pass(activation: Function) -> None:
    by_itself = count_launches(lambda x: x, 1024)
    assert count_launches(activation, 1024) == by_itself + 2


def test_gelu_formula_takes_more_launches_than_framework_gelu() -> None:
    def written_out(x: jax.Array) -> jax.Array:
        return 0.5 * x * (1.0 + jnp.tanh(0.8 * (x + 0.0447 * x**3)))

    formula, function = (count_launches(act, 1024) for act in (written_out, jax.nn.gelu))
    assert formula >= function + 7


def price_update(optimizer: optax.GradientTransformation, software: str) -> Report:
    """Price a step that updates four matrices."""
    weights = [of(256, 256)] * 4

    def update(state: Any, batch: jax.Array) -> Any:
        gradients = jax.grad(lambda w: (batch @ w[0] @ w[1] @ w[2] @ w[3]).mean())(state[0])
        updates, moments = optimizer.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), None

    state = (weights, jax.eval_shape(optimizer.init, weights))
    return price(update, state, of(64, 256), parameters=lambda s: s[0], software=software)


def test_adamw_of_mindcv_is_a_kernel_for_each_op() -> None:
    fused, composed = (
        price_update(optax.adamw(1e-3), name) for name in ("mindspore_graph", "mindcv_graph")
    )
    updates = [
        [task for task in report.graph.tasks if task.phase == "optimizer"]
        for report in (fused, composed)
    ]
    assert [task.type for task in updates[0]].count("ApplyAdam") == 4
    # mindcv/optim/adamw.py has 17 ops a parameter, and a copy of each result.
    assert 4 * 15 <= len(updates[1]) <= 4 * 20
    assert composed.step_ms > fused.step_ms
    for report, tasks in zip((fused, composed), updates, strict=True):
        written = {buffer for task in tasks for buffer in task.writes}
        assert set(report.graph.aliases) <= written


def test_momentum_of_mindcv_is_one_kernel_a_parameter() -> None:
    sgd = optax.sgd(0.1, momentum=0.9)
    steps = [price_update(sgd, name).step_ms for name in ("mindspore_graph", "mindcv_graph")]
    assert steps[0] == steps[1]


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
def test_unknown_stack_or_mode_is_refused(given: Any, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        price(step, WEIGHTS, BATCH, **given)
    assert message in str(caught.value)
    assert caught.value.exit_status == 2


def test_memory_is_one_pool_in_eager_stacks_and_newer_mindspore() -> None:
    limits = {}
    for name in ("mindspore_graph", "mindspore_graph@1.5", "pytorch_eager"):
        pools = price(step, WEIGHTS, BATCH, software=name).memory.pools
        limits[name] = round(pools["parameters"].limit_bytes / 2**30)
    assert limits == {"mindspore_graph": 5, "mindspore_graph@1.5": 31, "pytorch_eager": 31}
