"""Blocks, and the groups of dimensions that they are made of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pipeline.backends.planner.blocks import LossToPlan, OperatorUse, PartialSum, StepBlocks
from pipeline.backends.planner.dimension_groups import pair_reshaped_dims
from pipeline.backends.planner.find_blocks import find_blocks
from tests.backends.planner.networks import conv_and_head, embedding, gpt, mlp, shapes, to_plan


def dims(use: OperatorUse) -> list[tuple[str, int]]:
    return [(dim.role, dim.size) for dim in use.operator.dims]


def one_dense(apply: Any, shape: tuple[int, ...], width: int) -> StepBlocks:
    """Blocks of a dense layer after some function of the input."""
    params = {"dense": shapes(kernel=(width, 8)), "scale": shapes(kernel=shape[1:])}

    def loss(params: Any, batch: Any) -> jax.Array:
        x = apply(batch[0] * params["scale"]["kernel"])
        return jnp.mean(jnp.square(x @ params["dense"]["kernel"]))

    return find_blocks(to_plan(loss, params, (shape, jnp.float32)))


def operand_groups(blocks: StepBlocks) -> tuple[int | None, ...]:
    return blocks.operators[0].operator.operand.groups


def test_chain_of_dense_layers_is_a_chain_of_regions() -> None:
    blocks = find_blocks(mlp(32, 16, 64, 10))
    assert [(use.source, use.target) for use in blocks.operators] == [(0, 2), (2, 1)]
    assert [region.sizes for region in blocks.regions] == [(32, 16), (32, 10), (32, 64)]
    assert all(region.samples == 0 for region in blocks.regions)
    assert dims(blocks.operators[0]) == [("batch", 32), ("contracted", 16), ("output", 64)]
    assert [use.operator.flops for use in blocks.operators] == [2 * 32 * 16 * 64, 2 * 32 * 64 * 10]
    assert [use.operator.operand_gradient for use in blocks.operators] == [False, True]
    biases = {parameter.path: parameter.groups for parameter in blocks.parameters}
    assert biases == {"dense_0/bias": (1,), "dense_1/bias": (1,)}
    # Softmax over sharded classes: maximum and sum, the picked class, and backward the gradient.
    sums = {(p.groups, p.summed): p.count for p in blocks.regions[1].sums}
    assert sums[(0,), (1,)] >= 3


@pytest.mark.medium
def test_residual_stream_is_one_region_and_blocks_are_shared() -> None:
    blocks = find_blocks(gpt(4, 32, 64, 8, blocks=3))
    assert len(blocks.regions) == 1 + 2 * 3
    assert len(set(blocks.regions)) == 3
    assert len(blocks.operators) == 6 * 3
    assert len({use.operator for use in blocks.operators}) <= 6
    assert {use.source for use in blocks.operators if use.target != 0} == {0}
    attention = blocks.regions[blocks.operators[0].target]
    assert attention.sizes == (4, 32, 8, 32)  # samples, queries, heads, keys
    assert attention.work[-1].groups


def test_heads_are_the_outer_part_of_features() -> None:
    blocks = find_blocks(gpt(4, 32, 64, 8, blocks=1))
    query = blocks.operators[0].operator
    assert [dim.size for dim in query.dims if dim.role == "output"] == [64]
    assert query.result.groups == (0, 1, 2)  # 64 features in group 2, in 8 pieces at most


def test_embedding_look_up_is_an_operator_contracted_over_rows() -> None:
    blocks = find_blocks(embedding(8, 3, 100, 20))
    assert blocks.operators[0].operator.kind == "look_up"
    assert dims(blocks.operators[0]) == [
        *(("batch", 8), ("batch", 3)),
        *(("contracted", 100), ("output", 20)),
    ]


def test_convolutions_are_sharded_only_by_samples() -> None:
    blocks = find_blocks(conv_and_head(16, 100))
    assert [dims(use) for use in blocks.operators[:2]] == [[("batch", 16)], [("batch", 16)]]
    assert blocks.regions[0].sizes == (16,)


@pytest.mark.parametrize(
    ("apply", "shape", "width", "groups"),
    [
        (lambda x: x.reshape(8, -1), (8, 4, 6), 24, (0, 1)),  # in 4 pieces
        (lambda x: x[:, 1:], (8, 7), 6, (0, None)),
        (lambda x: jnp.concatenate([x, x], 1), (8, 6), 12, (0, None)),
        (lambda x: jnp.cumsum(x, 1), (8, 6), 6, (0, None)),
        (lambda x: jnp.pad(x, ((0, 0), (1, 1))), (8, 6), 8, (0, None)),
        (lambda x: x @ x.T, (8, 6), 8, (None, None)),
        (lambda x: x.T.reshape(2, 3, 8).transpose(2, 0, 1).reshape(8, 6), (8, 6), 6, (0, 1)),
        (lambda x: jnp.sort(x, 0), (8, 6), 6, (None, 0)),
    ],
)
def test_dimensions_are_tracked_or_left_unsharded(
    apply: Any, shape: tuple[int, ...], width: int, groups: tuple[int | None, ...]
) -> None:
    assert operand_groups(one_dense(apply, shape, width)) == groups


def test_reshaped_dimensions_are_paired() -> None:
    assert pair_reshaped_dims((8, 4, 6), (8, 24)) == [([0], [0]), ([1, 2], [1])]
    assert pair_reshaped_dims((24, 5), (4, 6, 1, 5)) == [([0], [0, 1]), ([1], [3])]
    assert pair_reshaped_dims((6, 4), (4, 6)) == [([0, 1], [0, 1])]
    assert pair_reshaped_dims((1, 1), (1,)) == []


def norm_over_samples(sync_batch_norm: bool) -> LossToPlan:
    params = {"dense": shapes(kernel=(16, 8)), "norm": shapes(scale=(8,))}

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch[0] @ params["dense"]["kernel"]
        return jnp.mean(jnp.square(x - x.mean(0)) * params["norm"]["scale"])

    given = ((32, 16), jnp.float32)
    return to_plan(loss, params, given, sync_batch_norm=sync_batch_norm)


def test_synchronised_batch_statistics_are_all_reduced() -> None:
    over_samples = [
        [p for p in find_blocks(norm_over_samples(sync)).regions[1].sums if p.summed == (0,)]
        for sync in (True, False)
    ]
    assert PartialSum((1,), (0,), 2 * 32, 2) in over_samples[0]  # the mean, and its gradient's sum
    assert over_samples[1] == []


def test_tied_table_is_one_weight_with_two_uses() -> None:
    params = {"tied": shapes(table=(64, 16))}

    def loss(params: Any, batch: Any) -> jax.Array:
        table = params["tied"]["table"]
        return jnp.mean(jnp.square(jnp.take(table, batch[0], axis=0) @ table.T))

    blocks = find_blocks(to_plan(loss, params, ((8, 4), jnp.int32)))
    assert [(weight.path, weight.uses) for weight in blocks.weights] == [("tied/table", 2)]
    look_up, product = (use.operator for use in blocks.operators)
    assert [(d.role, d.weight) for d in look_up.dims[2:]] == [("contracted", 0), ("output", 1)]
    assert [(d.role, d.weight) for d in product.dims[2:]] == [("contracted", 1), ("output", 0)]
