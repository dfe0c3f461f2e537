"""Sharding as a recipe names it (D-01, X-02): what a run of one shard sees, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from rich.console import Console

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.reporter import Reporter
from pipeline.stages.data import load_data

Compose = Callable[..., Recipe]


def quiet() -> Reporter:
    return Reporter(console=Console(file=io.StringIO()))


def shard(number: int, of: int) -> list[str]:
    return [f"dataset.train.num_shards={of}", f"dataset.train.shard_id={number}"]


@pytest.mark.slow
def test_shards_cover_the_data_once_per_epoch(tiny: Compose) -> None:
    seen = []
    for number in range(3):
        order = load_data(tiny(*shard(number, 3)), quiet()).train_order
        assert order.steps_per_epoch == 2
        seen.append(order.batches(2, 2).indices.ravel())
    assert sorted(np.concatenate(seen)) == list(range(96))


@pytest.mark.medium
def test_shard_evaluates_the_complete_split(tiny: Compose) -> None:
    dataset = load_data(tiny(*shard(1, 3)), quiet())
    assert len(dataset.eval) == dataset.eval_order.samples == 40
    assert dataset.eval_order.num_shards == 1


def test_shard_is_reported(tiny: Compose, capsys: pytest.CaptureFixture[str]) -> None:
    load_data(tiny(*shard(2, 5)), Reporter())
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith("; 1 step an epoch in shard 2 of 5")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["dataset.train.num_shards=4"],
            "dataset.train: num_shards = 4: needs shard_id, 0 to 3",
        ),
        (
            ["dataset.train.shard_id=0"],
            "dataset.train: shard_id = 0: needs num_shards, how many shards there are",
        ),
        (
            shard(4, 4),
            "dataset.train: shard_id = 4: must be 0 to 3, below num_shards = 4",
        ),
        (
            shard(-1, 4),
            "dataset.train.shard_id = -1: must be greater than or equal to 0",
        ),
        (
            shard(0, 0),
            "dataset.train.num_shards = 0: must be greater than 0",
        ),
        (
            shard(0, 7),
            "train.batch_size = 16: must be at most the 14 training samples of each of 7 shards; "
            "give a smaller batch, or dataset.train.drop_remainder=false",
        ),
    ],
)
def test_invalid_shard_is_refused(overrides: list[str], problem: str, tiny: Compose) -> None:
    with pytest.raises(RecipeError) as caught:
        tiny(*overrides)
    assert caught.value.problems == (problem,)
