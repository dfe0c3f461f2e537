"""Prices of shardings that a recipe gives."""

from __future__ import annotations

import pytest

from pipeline.backends.ascend.cost.collectives import AscendRates
from pipeline.backends.ascend.pricing.pricing import chipset
from pipeline.backends.planner.blocks import LossToPlan
from pipeline.backends.planner.dimension_groups import Mesh
from pipeline.backends.planner.parallel_plan import ShardingRule
from pipeline.backends.planner.search import price_shardings, search
from pipeline.backends.rates import Rates
from tests.backends.planner.networks import GPU_LIKE, conv_and_head, embedding, gpt, mlp

ASCEND = AscendRates(chipset("ascend910").hardware)


@pytest.mark.medium
@pytest.mark.parametrize("rates", [GPU_LIKE, ASCEND], ids=["gpu", "ascend"])
@pytest.mark.parametrize(
    "step",
    [mlp(64, 32, 4096, 16), embedding(64, 4, 100_000, 16), gpt(8, 64, 256, 8)],
    ids=["mlp", "embedding", "gpt"],
)
def test_searched_plan_is_repriced_equally(step: LossToPlan, rates: Rates) -> None:
    found = search(step, 8, rates)
    for plan in (found.best, *found.runners_up):
        priced = price_shardings(step, plan.mesh, plan.batch, plan.specs, plan.constraints, rates)
        assert priced is not None
        assert priced[0].step_ms == pytest.approx(plan.step_ms)
        assert priced[1] == found.data_parallel


@pytest.mark.slow
def test_bound_by_shardings_is_not_above_the_time_of_a_plan() -> None:
    """The head reads the whole batch in some, without a sharding: these layers have no names."""
    step = conv_and_head(64, 4096)
    for devices in (2, 4, 8):
        found = search(step, devices, GPU_LIKE)
        for plan in (found.best, *found.runners_up):
            priced = price_shardings(step, plan.mesh, plan.batch, plan.specs, (), GPU_LIKE)
            assert priced is not None
            assert priced[0].step_ms >= plan.step_ms * (1 - 1e-9)


def test_column_and_row_sharded_layers_need_one_all_reduce_per_pass() -> None:
    """Megatron's pair (arXiv:1909.08053, section 3): one sum of activations forward, one back."""
    batch, width, hidden = 64, 128, 1024
    step = mlp(batch, width, hidden, width)
    columns, rows = ((), ("model",)), (("model",), ())
    specs = (ShardingRule("dense_0/kernel", columns), ShardingRule("dense_1/kernel", rows))
    priced = price_shardings(step, Mesh(1, 4), (), specs, (), GPU_LIKE)
    assert priced is not None
    assert {rule.pattern: rule.axes for rule in priced[0].specs if "kernel" in rule.pattern} == {
        "dense_0/kernel": columns,
        "dense_1/kernel": rows,
    }
    sums = priced[0].collective_bytes
    # The first layer's input is data, so that nothing is summed on the way back.
    assert sums["all_reduce"] == pytest.approx(4 * batch * width, rel=0.05)


def test_replicated_weights_have_the_data_parallel_price() -> None:
    step = mlp(64, 32, 4096, 16)
    priced = price_shardings(step, Mesh(8, 1), ("data",), (), (), ASCEND)
    assert priced is not None
    plan, data_parallel = priced
    assert plan == data_parallel


def test_impossible_shardings_have_no_price() -> None:
    """A weight that two axes shard along one dimension."""
    step = mlp(64, 32, 4096, 16)
    specs = (ShardingRule("dense_0/kernel", ((), ("data", "model"))),)
    assert price_shardings(step, Mesh(2, 4), ("data",), specs, (), ASCEND) is None
