"""Datasets in tars of samples: splits, series of shards, addresses, refusals, equal bits."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError
from pipeline.data.columns import RawData
from pipeline.data.records.tar_shard import scan_tar
from pipeline.data.sources.example_files import WebDataset
from tests import outcome
from tests.conftest import ROOT
from tests.data.records.test_tar_shard import Files, write_tar
from tests.data.section import section
from tests.whole_run import run

GOLDEN = ROOT / "tests/golden/webdataset"
SHARDS = 3
SAMPLES = 8


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), (value, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def make_files(numbers: range) -> Files:
    files = [(f"{n:04}.png", png(n)) for n in numbers]
    files += [(f"{n:04}.cls", str(n % 3).encode()) for n in numbers]
    return dict(sorted(files))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards to train on, and one to evaluate."""
    data = tmp_path / "data"
    data.mkdir()
    for shard in range(SHARDS):
        numbers = range(shard * SAMPLES, (shard + 1) * SAMPLES)
        write_tar(data / f"train-00{shard}.tar", make_files(numbers))
    write_tar(data / "val-000.tar", make_files(range(5)))
    return data


def read(root: Path, **settings: Any) -> RawData:
    return WebDataset(**section(root=root, **settings)).read(root / "cache")


def test_samples_are_in_the_order_of_the_shards(folder: Path) -> None:
    raw = read(folder)
    assert raw.train.files == (SAMPLES,) * SHARDS
    assert raw.targets.names == ("0", "1", "2")
    images = raw.train.columns["image"]
    assert images.shape == (SHARDS * SAMPLES, 4, 5, 3)
    assert [image.max() for image in images[np.array([23, 0, 9])]] == [23, 0, 9]
    assert raw.train.columns["label"][:4].tolist() == [0, 1, 2, 0]
    assert len(raw.eval) == 5


def test_single_tar_is_split(folder: Path) -> None:
    raw = read(folder / "train-000.tar", split=0.25)
    assert (len(raw.train), len(raw.eval)) == (5, 3)
    with pytest.raises(
        DataError, match=r"train-000.tar: is a single file; hold out a part of it by dataset.split"
    ):
        read(folder / "train-000.tar")


def test_numbers_without_a_point_are_read(folder: Path) -> None:
    numbers = ["2.5", "3", "-1.5", "4"]
    files = {f"{n}.cls": text.encode() for n, text in enumerate(numbers)}
    write_tar(folder / "train-000.tar", files | {f"{n}.png": png(n) for n in range(4)})
    raw = read(folder / "train-000.tar", split=0.25)
    labels = np.sort(np.concatenate([raw.train.columns["label"], raw.eval.columns["label"]])[:, 0])
    # Labels are standardized.
    shares = (labels - labels[0]) / (labels[-1] - labels[0])
    np.testing.assert_allclose(shares, [0, 4 / 5.5, 4.5 / 5.5, 1], rtol=1e-5)


def test_wrong_pattern_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"data: "):
        read(folder, train_files=".")


@pytest.mark.medium
def test_series_of_shards_must_be_complete(folder: Path) -> None:
    assert len(read(folder, train_files="train-{000..001}.tar").train) == 2 * SAMPLES
    with pytest.raises(DataError, match=r"lacks train-003.tar, train-004.tar of train-{000..004}"):
        read(folder, train_files="train-{000..004}.tar")
    with pytest.raises(DataError, match=r"has no files test-{0..1}.tar"):
        read(folder, train_files="test-{0..1}.tar")
    with pytest.raises(DataError, match="must stand for at most 100,000 names"):
        read(folder, train_files="train-{0..999999}.tar")


def test_labels_are_names_numbers_or_fields() -> None:
    names = {"split": 0.5, "label_key": "txt", "classes": ["dog", "cat"]}
    raw = read(GOLDEN, **names)
    assert sorted(raw.train.columns["label"][:].tolist()) == [0, 0, 1, 1]
    assert raw.targets.names == ("dog", "cat")
    scores = read(GOLDEN, split=0.5, label_key="score")
    assert scores.targets.task == "regression"
    assert scores.train.columns["label"].shape[1:] == (1,)
    arrays = read(GOLDEN, split=0.5, image_key="npy")
    assert arrays.train.specs()["image"].dtype == "float32"
    assert arrays.train.columns["image"].shape[1:] == (5, 4, 1)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.png": png(0), "a.cls": b"0", "b.png": png(1)}, "sample b: record 1: label is missing"),
        (
            {"a.png": png(0)},
            "sample a: record 0: has no feature image/class/label or label; it has",
        ),
        ({"a.cls": b"0"}, "sample a: record 0: has no feature image/encoded or image or "),
        ({"a.png": png(0), "a.txt": b"cat"}, "record 0: label has bytes, b'cat'; a label mus"),
        (
            {"a.png": png(0), "a.cls": b"0", "b.png": png(1), "b.cls": b"x"},
            "label has bytes, b'x'; a ",
        ),
        ({"a.png": png(0), "a.jpg": png(0), "a.cls": b"0"}, "it has cls, jpg, label, png; set dat"),
        ({"a.png": png(0)[:20], "a.cls": b"0"}, "sample a: record 0: "),
        ({"a.png": b"x", "a.cls": b"0"}, "sample a: record 0: image isn't one of PNG, JPEG"),
    ],
)
def test_wrong_samples_are_refused(files: Files, message: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "train.tar", files)
    with pytest.raises(DataError) as refused:
        read(tmp_path, split=0.5)
    assert str(refused.value).startswith(f"{tmp_path}/train.tar: sample ")
    assert message in str(refused.value)


@pytest.mark.medium
def test_damaged_image_is_named_when_it_is_read(folder: Path) -> None:
    raw = read(folder)
    path = folder / "train-001.tar"
    (member,) = (member for member in scan_tar(path) if member.name == "0010.png")
    content = bytearray(path.read_bytes())
    content[member.offset_data : member.offset_data + 30] = bytes(30)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train-001.tar, record 2: cannot identify image"):
        raw.train.columns["image"][np.array([10])]
    path.write_bytes(content[: member.offset_data])
    with pytest.raises(DataError, match=r"train-001.tar, record 2: "):
        raw.train.columns["image"][np.array([10])]


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    """A local server, whose folders can't be listed by a client that wants files."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def make_recipe(root: str, *overrides: str) -> Recipe:
    rescale = "[{name:rescale,factor:0.0039,shift:0.0}]"
    return load_recipe(
        overrides=[
            *("dataset=webdataset", f"dataset.root='{root}'", "train.batch_size=4"),
            *(f"dataset.train.ops={rescale}", f"dataset.eval.ops={rescale}"),
            *("model=mlp", "schedule=constant", "monitor.tensorboard=false"),
            *overrides,
        ]
    )


def test_series_at_an_address_is_copied_and_read_offline(
    address: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("aiohttp", reason="the extra storage isn't installed")
    root = f"{address}/{{train-{{000..002}},val-000}}.tar"
    recipe = make_recipe(root, f"cache.root={tmp_path / 'cache'}")
    raw = recipe.dataset.load(tmp_path / "cache")
    assert (len(raw.train), len(raw.eval)) == (SHARDS * SAMPLES, 5)
    assert "4 files, " in capsys.readouterr().out
    for path in folder.iterdir():
        path.unlink()
    again = recipe.dataset.load(tmp_path / "cache")
    np.testing.assert_array_equal(again.train.columns["image"][:], raw.train.columns["image"][:])
    missing = make_recipe(f"{address}/train-{{000..009}}.tar").dataset
    with pytest.raises(DataError, match=r"/train-000.tar: can't be read: there is no such file"):
        missing.load(tmp_path / "cache")
    signed = make_recipe(f"{address}/train-{{000..002}}.tar?token=x").dataset
    with pytest.raises(DataError, match="must have no query, since braces make it a series"):
        signed.load(tmp_path / "cache")


@pytest.mark.slow
def test_training_is_equal_at_any_sink_and_resumed(folder: Path, tmp_path: Path) -> None:
    common = [f"cache.root={tmp_path / 'cache'}", "train.epochs=null", "dataset.train.interleave=2"]
    recipe = partial(make_recipe, str(folder), *common, "dataset.train.buffer_size=6")
    run(recipe("train.steps=20", "train.sink=false"), tmp_path / "off")
    for size, feed in ((7, "stream"), (20, "resident")):
        name = f"{size}_{feed}"
        keys = (f"train.sink_size={size}", f"train.feed={feed}")
        run(recipe("train.steps=20", *keys), tmp_path / name)
        outcome.assert_same_run(tmp_path / "off", tmp_path / name)
    run(recipe("train.steps=9"), tmp_path / "broken")
    run(recipe("train.steps=20", f"train.resume={tmp_path / 'broken'}"))
    assert outcome.metrics(tmp_path / "broken") == outcome.metrics(tmp_path / "off")
    assert json.loads((tmp_path / "off/summary.json").read_text())["status"] == "done"
