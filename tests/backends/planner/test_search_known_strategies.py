"""Strategies that are known to be good: chosen, or priced within 5 % of what is chosen.

Most are those that MindSpore's unit tests assert (tests/ut/python/parallel). A strategy is written
as the shardings that it allows; its price is that of the best plan of them under the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pipeline.backends.ascend.cost.collectives import AscendRates
from pipeline.backends.ascend.pricing.pricing import chipset
from pipeline.backends.planner.blocks import LossToPlan, OperatorUse, StepBlocks
from pipeline.backends.planner.decisions import Decisions, ShardingPrices, is_data_parallel_sharding
from pipeline.backends.planner.dimension_groups import Layout, Mesh, list_meshes
from pipeline.backends.planner.find_blocks import find_blocks
from pipeline.backends.planner.parallel_plan import ParallelPlan
from pipeline.backends.planner.search import GIB, MIN_GAIN, find_best_plan, search
from pipeline.backends.rates import Rates
from pipeline.core.errors import RecipeError
from tests.backends.planner.networks import (
    GPU_LIKE,
    MindSporeRates,
    conv_and_head,
    embedding,
    gpt,
    mlp,
)
from tests.backends.planner.recipes import network_to_plan

Known = Callable[[StepBlocks, OperatorUse, Layout], bool]
NEAR = 1.05
ASCEND = AscendRates(chipset("ascend910").hardware)


def path(blocks: StepBlocks, use: OperatorUse) -> str:
    return blocks.weights[use.weight].path


def roles(use: OperatorUse, sharding: Layout) -> set[str]:
    return {use.operator.dims[dim].role for dim in sharding if dim is not None}


def data_parallel(_: StepBlocks, use: OperatorUse, sharding: Layout) -> bool:
    return is_data_parallel_sharding(use, sharding)


def classes_sharded(blocks: StepBlocks, use: OperatorUse, sharding: Layout) -> bool:
    """Convolutions by samples, the last layer by its output."""
    if path(blocks, use).startswith(("head", "dense")):
        return roles(use, sharding) == {"output"}
    return is_data_parallel_sharding(use, sharding)


def rows_sharded(blocks: StepBlocks, use: OperatorUse, sharding: Layout) -> bool:
    if use.operator.kind == "look_up":
        return "contracted" in roles(use, sharding)
    return True


def best_of(
    blocks: StepBlocks, step: LossToPlan, devices: int, rates: Rates, known: Known
) -> ParallelPlan:
    """The best plan of shardings that a strategy allows, over all meshes."""
    ratio = step.state_bytes / blocks.parameter_bytes
    plans = []
    for mesh in list_meshes(devices):
        decisions = Decisions(
            ShardingPrices(blocks, mesh, rates, ratio),
            lambda use, sharding: known(blocks, use, sharding),
        )
        # On a mesh of one axis a strategy may have nothing to shard along the other.
        if (plan := find_best_plan(decisions)) is not None:
            plans.append(plan)
    return min(plans, key=lambda plan: plan.step_ms)


def is_near(step: LossToPlan, devices: int, rates: Rates, known: Known) -> ParallelPlan:
    """Check that a strategy costs little more than what is chosen, and return that."""
    blocks = find_blocks(step)
    found = search(step, devices, rates).best
    good = best_of(blocks, step, devices, rates, known)
    assert found.step_ms <= good.step_ms * (1 + MIN_GAIN)
    assert good.step_ms <= NEAR * found.step_ms, (found, good)
    return found


def specs(plan: ParallelPlan) -> dict[str, list[str]]:
    return {rule.pattern: ["+".join(names) for names in rule.axes] for rule in plan.specs}


@pytest.mark.parametrize(
    ("classes", "beta", "known"),
    [(32768, 400.0, data_parallel), (65536, 400.0, classes_sharded), (8192, 50.0, classes_sharded)],
)
def test_head_strategy_matches_mindspore_rates(classes: int, beta: float, known: Known) -> None:
    step = conv_and_head(256, classes, side=112)
    found = is_near(step, 8, MindSporeRates(beta), known)
    if classes == 65536:
        assert found.batch == ("data", "model")
        assert specs(found)["head/kernel"] == ["", "model"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "beta", "known"),
    [(32768, 400.0, data_parallel), (65536, 400.0, classes_sharded), (8192, 50.0, classes_sharded)],
)
def test_resnet50_strategy_matches_mindspore_rates(classes: int, beta: float, known: Known) -> None:
    step, _ = network_to_plan(("model=resnet50",), classes, (256, 224, 224, 3))
    assert is_near(step, 8, MindSporeRates(beta), known).mesh.devices == 8


@pytest.mark.slow
def test_resnet50_of_1001_classes_is_data_parallel() -> None:
    step, _ = network_to_plan(("model=resnet50",), 1001, (256, 224, 224, 3))
    assert is_near(step, 8, ASCEND, data_parallel).is_data_parallel
    step, _ = network_to_plan(("model=resnet50",), 100_000, (256, 224, 224, 3))
    found = is_near(
        step, 8, ASCEND, lambda *given: classes_sharded(*given) or data_parallel(*given)
    )
    assert any("model" in axes for pattern, axes in specs(found).items() if "dense" in pattern)


def test_two_dense_layers_are_data_parallel() -> None:
    found = is_near(mlp(128, 32, 64, 64), 16, MindSporeRates(), data_parallel)
    assert found.is_data_parallel


def test_table_with_more_rows_than_samples_is_sharded() -> None:
    is_near(embedding(64, 1, 1 << 22, 128), 8, MindSporeRates(), rows_sharded)
    # By its columns on the Ascend, whose collectives of a few bytes take 56 us and not nothing.
    assert specs(search(embedding(64, 1, 1 << 22, 128), 8, ASCEND).best) == {
        "table/rows": ["", "model"]
    }


@pytest.mark.medium
def test_wide_block_with_few_samples_is_sharded_as_in_megatron() -> None:
    step = gpt(2, 256, 4096, 32)
    found = search(step, 8, GPU_LIKE).best
    assert found.mesh == Mesh(1, 8)
    assert found.batch == ()
    axes_by_pattern = specs(found)
    for name in ("query", "key", "value", "up"):
        assert axes_by_pattern[f"block*/{name}/kernel"] == ["", "model"]
    for name in ("out", "down"):
        assert axes_by_pattern[f"block*/{name}/kernel"] == ["model", ""]
    # Forward an all-reduce after `out` and `down`, backward one each for query, key, value and up,
    # of 2 x 256 x 4096 float32 in both blocks; nothing else.
    assert found.collective_bytes == {"all_reduce": 2 * 6 * 2 * 256 * 4096 * 4}


@pytest.mark.medium
def test_narrow_block_with_many_samples_is_data_parallel() -> None:
    for rates in (GPU_LIKE, ASCEND):
        assert search(gpt(256, 128, 256, 4), 8, rates).best.is_data_parallel


@pytest.mark.medium
def test_attention_on_a_mesh_of_2_x_8_is_sharded_by_samples_and_heads() -> None:
    """PanGu-alpha's strategy, [[2, 8, 1, 1], ...] (batch, heads), where the mesh is given."""
    step = gpt(16, 512, 4096, 32)
    blocks = find_blocks(step)
    rates = replace(GPU_LIKE, per_server=16)
    plan = find_best_plan(Decisions(ShardingPrices(blocks, Mesh(2, 8), rates, 1.0)))
    assert plan is not None
    assert plan.batch == ("data",)
    for name in ("query", "key", "value"):
        assert specs(plan)[f"block*/{name}/kernel"] == ["", "model"]
    assert specs(plan)["block*/out/kernel"] == ["model", ""]


FIELDS = {"field_index": (128_000, 39), "field_value": (128_000, 39)}


@pytest.mark.slow
def test_wide_and_deep_is_data_parallel_unless_its_table_is_too_big() -> None:
    step, _ = network_to_plan(("model=wide_deep",), 2, FIELDS)
    assert search(step, 8, ASCEND, 26 * GIB).best.is_data_parallel
    huge = ("model=wide_deep", "model.vocabulary=20000000")
    step, _ = network_to_plan(huge, 2, FIELDS)
    found = search(step, 8, ASCEND, 10 * GIB)
    assert found.data_parallel is not None
    assert found.data_parallel.memory_bytes > 10 * GIB
    assert found.best.memory_bytes <= 10 * GIB
    assert specs(found.best)["deep"] == ["model", ""]  # rows


@pytest.mark.parametrize("bound_gib", [12.0, 6.0, 3.0, 2.3])
def test_plan_beyond_the_memory_bound_is_rejected(bound_gib: float) -> None:
    step = embedding(128_000, 39, 20_000_000, 80)
    found = search(step, 8, ASCEND, bound_gib * GIB)
    for plan in (found.best, *found.runners_up):
        assert plan.memory_bytes <= bound_gib * GIB
    assert found.data_parallel is not None
    assert found.data_parallel.memory_bytes > 12 * GIB


def test_error_without_a_fitting_plan_has_the_largest_tensor() -> None:
    step = embedding(128_000, 39, 20_000_000, 80)
    with pytest.raises(RecipeError) as error:
        search(step, 8, ASCEND, 1 * GIB)
    (problem,) = error.value.problems
    assert problem.startswith("parallel.devices = 8: no plan fits in 1.00 GiB a device; ")
    assert "the largest tensor is table/rows [20000000, 80], 5.96 GiB" in problem
