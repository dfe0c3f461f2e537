"""Swin-T: its parameters, its windows, and what its priced step converts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.backends.ascend.published.swin import (
    MASKED,
    PatchMerging,
    Swin,
    WindowAttention,
    index_distances,
    join_windows,
    mask_shifted,
    split_windows,
)
from pipeline.backends.ascend.published.workloads import load_published_steps, trace_row
from tests.backends.ascend.steps import find_round_trips, only
from tests.models.build import count, shapes


@pytest.mark.slow
def test_parameter_count_matches_torchvision() -> None:
    """torchvision's swin_t has 28,288,354."""
    assert count(shapes(Swin(1000), (224, 224, 3))) == 28_288_354


@pytest.mark.medium
def test_joined_windows_equal_the_tokens_before_the_split() -> None:
    tokens = jnp.arange(2 * 14 * 21 * 3).reshape(2, 14, 21, 3)
    windows = split_windows(tokens)
    assert windows.shape == (2 * 2 * 3, 49, 3)
    np.testing.assert_array_equal(windows[1, 0], tokens[0, 0, 7])
    np.testing.assert_array_equal(join_windows(windows, 2, 14, 21), tokens)


def test_distance_index_is_over_rows_and_columns() -> None:
    distances = index_distances()
    assert distances.shape == (49, 49)
    assert (np.diag(distances) == 6 * 13 + 6).all()
    assert len(np.unique(distances)) == 13**2


def test_shifted_mask_allows_only_former_neighbours() -> None:
    mask = mask_shifted(14, 14, 3)
    assert mask.shape == (4, 49, 49)
    assert not mask[0].any()
    assert set(np.unique(mask[3])) == {MASKED, 0.0}
    assert (mask[3] == 0).sum() == 16**2 + 12**2 * 2 + 9**2


@pytest.mark.medium
def test_mindcv_attention_with_the_joined_weights_equals_the_authors() -> None:
    windows = jax.random.normal(jax.random.key(0), (4, 49, 64))
    mask = mask_shifted(14, 14, 3)
    authors = WindowAttention()
    joined = authors.init(jax.random.key(1), windows, mask)["params"]
    kernels = jnp.split(joined["qkv"]["kernel"], 3, -1)
    split = {"bias": joined["bias"], "project": joined["project"]}
    for name, kernel in zip(("query", "key", "value"), kernels, strict=True):
        split[name] = {"kernel": kernel, "bias": jnp.zeros(64)}
    np.testing.assert_allclose(
        WindowAttention(mindcv=True).apply({"params": split}, windows, mask),
        authors.apply({"params": joined}, windows, mask),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.medium
def test_mindcv_merging_equals_the_authors() -> None:
    tokens = jax.random.normal(jax.random.key(0), (2, 4, 6, 8))
    params = PatchMerging().init(jax.random.key(1), tokens)
    merged = [PatchMerging(mindcv).apply(params, tokens) for mindcv in (False, True)]
    assert merged[0].shape == (2, 2, 3, 16)
    np.testing.assert_array_equal(*merged)


@pytest.mark.slow
@pytest.mark.parametrize("by_op", [False, True])
def test_tokens_are_not_converted_back_to_convolution_blocks(by_op: bool) -> None:
    row = next(row for row in load_published_steps() if row.model == "swin_t")
    graph = trace_row(row).tasks("O2", by_op=by_op)
    blocked = [
        task
        for task in only(graph, "trans_data")
        if "NC1HWC0" in {graph.buffers[index].layout for index in (*task.reads, *task.writes)}
    ]
    assert len(blocked) <= 4
    assert not find_round_trips(graph)
