"""Real data: the digits of the package, and MNIST and CIFAR-10 where they are at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline import load_recipe
from tests import outcome
from tests.whole_run import run


@pytest.mark.slow
@pytest.mark.usefixtures("long_runs")
def test_lenet5_learns_the_bundled_digits(cache: Path, tmp_path: Path) -> None:
    """Real data that needs no download: 16 epochs over 1,438 digits."""
    overrides = ["train.epochs=16", "monitor.tensorboard=false", f"cache.root={cache}"]
    summary = run(load_recipe("lenet5_digits", overrides), tmp_path)
    assert summary.status == "done"
    assert summary.metrics["accuracy"] > 0.9


@pytest.mark.medium
@pytest.mark.usefixtures("long_runs")
def test_lenet5_learns_mnist(shared_data: Path, cache: Path, tmp_path: Path) -> None:
    """D-03, D-09: 1875 batches of 32 an epoch."""
    overrides = [
        f"dataset.root={shared_data / 'mnist'}",
        "train.steps=60",
        "train.sink_size=20",
        "model.init.conv=he_normal",
        "model.init.dense=he_uniform",
        "model.init.bias=zeros",
        "eval.samples=512",
        "monitor.tensorboard=false",
        f"cache.root={cache}",
    ]
    summary = run(load_recipe("lenet5_mnist", overrides), tmp_path)
    losses = [line["loss"] for line in outcome.metrics(tmp_path)]
    assert len(losses) == 60
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.1
    assert summary.epochs == 60 / 1875
    assert summary.metrics["count"] == 512
    assert (
        "60,000 training and 512 of 10,000 evaluation images 28x28x1, read as 32x32x1, 10 classes"
        in ((tmp_path / "run.log").read_text())
    )


@pytest.mark.slow
def test_resnet20_trains_on_cifar10(
    shared_data: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """D-01, D-02: 390 full batches of 128 an epoch. Unpacking takes seconds, so that is kept."""
    cache = pytestconfig.cache.mkdir("real_data") if pytestconfig.cache else tmp_path / "cache"
    archive = shared_data / "cifar10" / "cifar-10-binary.tar.xz"
    overrides = [
        "model=lenet5",
        f"dataset.root={archive}",
        "train.steps=3",
        "eval.samples=128",
        "monitor.tensorboard=false",
        f"cache.root={cache}",
    ]
    summary = run(load_recipe("resnet20_cifar10", overrides), tmp_path)
    assert (summary.status, summary.steps, summary.epochs) == ("done", 3, 3 / 390)
    assert summary.metrics["count"] == 128
