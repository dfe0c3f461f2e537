"""Shards of an epoch: what MindSpore gives to each, and the laws that hold for any (D-01, X-02)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.order import SampleOrder

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/sharding/mindspore.json").read_text())


def make_order(**changed: Any) -> SampleOrder:
    settings: dict[str, Any] = {
        "seed": 7,
        "samples": 13,
        "batch_size": 1,
        "shuffle": True,
        "buffer_size": None,
        "drop_remainder": True,
        "repeat": 1,
    }
    return SampleOrder(**{**settings, **changed})


def deal(samples: int, shards: int, shard: int) -> list[int]:
    """The places of a shard: every `shards`-th, from the first place again at the end."""
    return [(shard + n * shards) % samples for n in range(-(-samples // shards))]


def make_shards(epoch: int = 0, **settings: Any) -> list[list[int]]:
    """The samples of one epoch, shard by shard."""
    result = []
    for shard in range(settings["num_shards"]):
        order = make_order(**settings, shard_id=shard)
        steps = order.steps_per_epoch
        result.append(order.batches(epoch * steps, steps).indices.ravel().tolist())
    return result


@pytest.mark.parametrize("case", GOLDEN["in_order"], ids=str)
def test_unshuffled_shards_match_mindspore_golden(case: dict[str, Any]) -> None:
    """Equal and unequal lengths; NumpySlicesDataset(shuffle=False, num_shards, shard_id)."""
    own = make_shards(samples=case["samples"], num_shards=case["num_shards"], shuffle=False)
    assert own == case["shards"]


def test_cifar10_shards_match_mindspore_golden() -> None:
    """D-01: Cifar10Dataset deals as every other reader does."""
    case = GOLDEN["cifar10"]
    own = make_shards(samples=case["samples"], num_shards=case["num_shards"], shuffle=False)
    seen = [{"samples": len(shard), "first": shard[:4], "last": shard[-4:]} for shard in own]
    assert seen == case["shards"]


@pytest.mark.parametrize("case", GOLDEN["shuffled"], ids=lambda case: str(case["samples"]))
def test_shards_are_taken_from_one_shuffled_order_golden(case: dict[str, Any]) -> None:
    """MindSpore shuffles the whole first, alike in every run, and deals then; so it is here."""
    samples, shards = case["samples"], case["num_shards"]
    there = np.array(case["whole"])
    assert sorted(there) == list(range(samples))
    assert [there[deal(samples, shards, i)].tolist() for i in range(shards)] == case["shards"]
    (whole,) = make_shards(samples=samples, num_shards=1)
    here = [np.array(whole)[deal(samples, shards, i)].tolist() for i in range(shards)]
    assert make_shards(samples=samples, num_shards=shards) == here


@pytest.mark.parametrize(
    "case", GOLDEN["shuffled_behind_the_reader"], ids=lambda case: str(case["samples"])
)
def test_window_shuffles_within_its_shard_golden(case: dict[str, Any]) -> None:
    """D-08: `shuffle(buffer_size)` follows the reader, so a shard keeps its samples."""
    samples, shards = case["samples"], case["num_shards"]
    for epoch in range(3):
        own = make_shards(epoch, samples=samples, num_shards=shards, buffer_size=3)
        assert list(map(sorted, own)) == list(map(sorted, case["shards"]))
    dealt_in_order = [deal(samples, shards, shard) for shard in range(shards)]
    for files, there in zip(dealt_in_order, case["shards"], strict=True):
        assert sorted(files) == sorted(there)


SETTINGS = {
    "samples": st.integers(1, 60),
    "num_shards": st.integers(1, 9),
    "shuffle": st.booleans(),
    "buffer_size": st.none() | st.integers(1, 20),
    "seed": st.integers(0, 2**63 - 1),
}


@pytest.mark.medium
@given(epoch=st.integers(0, 2**20), settings=st.fixed_dictionaries(SETTINGS))
def test_shards_of_an_epoch_cover_the_data(epoch: int, settings: dict[str, Any]) -> None:
    """Every sample is dealt; shards are equally long, so the fewest possible are dealt again."""
    own = make_shards(epoch, **settings)
    samples, shards = settings["samples"], settings["num_shards"]
    assert {len(shard) for shard in own} == {-(-samples // shards)}
    counts = Counter(sample for shard in own for sample in shard)
    assert set(counts) == set(range(samples))
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.slow
@given(
    step=st.integers(0, 10_000),
    count=st.integers(0, 20),
    settings=st.fixed_dictionaries(SETTINGS),
    data=st.data(),
)
def test_shard_step_depends_only_on_its_number(
    step: int, count: int, settings: dict[str, Any], data: st.DataObject
) -> None:
    shard = data.draw(st.integers(0, settings["num_shards"] - 1))
    batch = data.draw(st.integers(1, 8))
    order = make_order(**settings, shard_id=shard, batch_size=batch, drop_remainder=False)
    run = order.batches(step, count)
    for position in range(count):
        one = order.batches(step + position, 1)
        assert np.array_equal(run.indices[position], one.indices[0])
        assert (run.epochs[position], run.counts[position]) == (one.epochs[0], one.counts[0])


def test_full_shuffle_changes_shard_samples_every_epoch() -> None:
    epochs = [make_shards(epoch, samples=40, num_shards=4) for epoch in range(3)]
    assert len({tuple(sorted(shards[0])) for shards in epochs}) == 3


def test_single_shard_is_the_whole_order() -> None:
    for buffer_size in (None, 5):
        settings = {"samples": 30, "buffer_size": buffer_size, "batch_size": 4}
        whole, shard = make_order(**settings), make_order(**settings, num_shards=1, shard_id=0)
        assert np.array_equal(whole.batches(3, 20).indices, shard.batches(3, 20).indices)


def test_batch_larger_than_a_shard_is_refused() -> None:
    expected = r"batch of 5 .* 4 samples of each of 4 shards, .* must be at most 4"
    with pytest.raises(ValueError, match=expected):
        make_order(batch_size=5, num_shards=4, shard_id=0)
