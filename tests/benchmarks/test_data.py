"""The benchmark of input pipelines: what ours loads, who takes part, and the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.data import OURS, Contestant, LoaderError, compare, report
from benchmarks.loading import Work
from benchmarks.loading.ours import OPS, open_loader
from pipeline.data.order import SampleOrder
from pipeline.data.random import seed_words
from pipeline.data.transform import apply_ops

SAMPLES, BATCH = 40, 8


@pytest.fixture
def work(tmp_path: Path) -> Work:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (SAMPLES, 32, 32, 3), np.uint8)
    path = tmp_path / "images.npz"
    np.savez(path, images=images, labels=np.arange(SAMPLES, dtype=np.int32))
    return Work(path, BATCH, "resident", 2)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["resident", "stream"])
def test_loader_contestant_loads_the_training_batches(work: Work, way: str) -> None:
    loader = open_loader(replace(work, way=way))
    loader.load(4)
    loaded = loader.load(3)

    order = SampleOrder(
        seed=0,
        samples=SAMPLES,
        batch_size=BATCH,
        shuffle=True,
        buffer_size=None,
        drop_remainder=True,
        repeat=1,
    )
    batch = order.batches(6, 1)
    rows = batch.indices[0]
    columns = {"image": np.load(work.arrays)["images"][rows]}
    expected = apply_ops(np, OPS, columns, seed_words(0), batch.epochs[0], rows)["image"]
    np.testing.assert_allclose(loader._images, expected, rtol=1e-5, atol=1e-5)
    assert loader._labels.tolist() == rows.tolist()
    assert loaded.batches == 3
    assert (loaded.mean, loaded.std) == pytest.approx((expected.mean(), expected.std()), rel=1e-4)


@pytest.mark.slow
def test_installed_contestants_take_part_in_every_round(work: Work) -> None:
    lacking = Contestant("torch_loader", "numpy", ("a_package_that_is_not_there",))
    rates, absent = compare({**OURS, "lacking": lacking}, work, rounds=2, round_s=0.01)
    assert absent == {"lacking": "not installed: a_package_that_is_not_there"}
    assert list(rates) == list(OURS)
    assert all(len(each) == 2 and min(each) > 0 for each in rates.values())


@pytest.mark.slow
def test_failed_pipeline_is_reported(work: Work) -> None:
    broken = replace(work, arrays=work.arrays.with_name("nothing.npz"))
    with pytest.raises(LoaderError, match=r"^ours, .*: FileNotFoundError: .*nothing\.npz"):
        compare(OURS, broken, rounds=1, round_s=0.01)


def test_data_table_compares_the_first_row_with_other_rows(work: Work) -> None:
    text = report({"a": [300.0, 100.0, 200.0], "b": [50.0, 40.0, 60.0]}, {"c": "absent"}, work, 3)
    assert "| a | 200 | 100 to 300 | 5000.00 | 1.0x |" in text
    assert "| b | 50 | 40 to 60 | 20000.00 | 4.0x |" in text
    assert "| c | absent |  |  |  |" in text
