"""Image files, streamed, fast and slow, as a user meets them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.backends.loading import loader as loader_module
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError
from pipeline.data.sources.image_columns import ImageFiles
from tests import outcome
from tests.image_folders import save_images
from tests.whole_run import run

Compose = Callable[..., Recipe]

STEPS, WINDOW = 18, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 training images and 8 for evaluation, in two classes."""
    return save_images(tmp_path_factory.mktemp("images"), {"train": 24, "eval": 4})


@pytest.fixture
def images(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Compose:
    """A recipe that trains on the folder, six steps an epoch, in windows of four steps."""
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", WINDOW)

    def compose(*overrides: str) -> Recipe:
        settings = [
            "dataset=image_folder",
            f"dataset.root={folder}",
            "dataset.image_size=[8,8]",
            "dataset.train.ops=[{name: random_crop, size: [8, 8], padding: [1, 1, 1, 1]}]",
            "dataset.eval.ops=[]",
            "model=mlp",
            "model.hidden=[4]",
            "train.batch_size=8",
            f"train.steps={STEPS}",
            "monitor.tensorboard=false",
            "monitor.sample_images=0",
            f"cache.root={cache}",
        ]
        return load_recipe("lenet5_digits", [*settings, *overrides])

    return compose


@pytest.mark.slow
def test_streamed_and_resident_image_files_have_the_same_bits(
    images: Compose, tmp_path: Path
) -> None:
    """Bit for bit what training on images that were all decoded beforehand gives."""
    for kind in ("resident", "stream"):
        run(images(f"train.feed={kind}"), tmp_path / kind)
        feed = outcome.read_summary(tmp_path / kind)["feed"]
        assert feed["kind"] == kind
        assert 0 <= feed["wait_share"] <= 1
        assert 0 <= feed["queue_depth"] <= 1
    outcome.assert_same_run(tmp_path / "resident", tmp_path / "stream")
    assert feed["slowest_sample"]["name"].endswith(".png")
    assert set(feed["prepare_ms_per_step"]) == {"image", "label", "order", "transfer"}


@pytest.mark.slow
def test_slow_file_is_a_warning(
    images: Compose,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One file takes half a second in every epoch, in which training has 48 samples to work on."""
    decode = ImageFiles.sample

    def sluggish(files: ImageFiles, index: int) -> np.ndarray:
        if files.paths[index].endswith("train/ant/05.png"):
            time.sleep(0.5)
        return decode(files, index)

    monkeypatch.setattr(ImageFiles, "sample", sluggish)
    run(images("train.feed=stream"), tmp_path / "slow")
    feed = outcome.read_summary(tmp_path / "slow")["feed"]
    assert feed["starved"]
    assert feed["slowest_sample"]["sample"] == 5
    lines = [line for line in capsys.readouterr().out.splitlines() if "waits for data" in line]
    log = (tmp_path / "slow" / "run.log").read_text()
    assert 1 <= len(lines) <= STEPS // WINDOW
    assert lines[0].startswith("warning    training waits for data from step ")
    # Which one depends on the machine: real files take time, too.
    assert re.search(r"slowest sample: .*\.png", lines[0])
    assert log.count("waits for data") == len(lines)


@pytest.mark.slow
def test_unreadable_file_ends_the_run_with_its_name(
    images: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = ImageFiles.sample

    def broken(files: ImageFiles, index: int) -> np.ndarray:
        if index == 30:
            raise DataError(f"{files.paths[index]}: can't be read as an image")
        return decode(files, index)

    monkeypatch.setattr(ImageFiles, "sample", broken)
    with pytest.raises(DataError, match=r"owl/06\.png: can't be read as an image$"):
        run(images("train.feed=stream"), tmp_path)
    assert outcome.read_summary(tmp_path)["status"] == "failed"
