"""`convert records`: any dataset becomes files from which training gives the same, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.__main__ import main
from pipeline.backends.loading import loader as loader_module
from pipeline.core.errors import DataError, RecipeError, RunError, UsageError
from pipeline.data.records import record_writer
from pipeline.data.records.record_format import DESCRIPTION
from tests import outcome
from tests.command_line import convert_records
from tests.conftest import MLP, OPS, STEPS
from tests.image_folders import save_images, save_masks
from tests.whole_run import run

CROP = OPS.replace("[{", "[{name: random_crop, size: [8, 8], padding: [1, 1, 1, 1]}, {", 1)
SOURCE = [
    "dataset.name=synthetic",
    "+dataset.like=digits",
    "+dataset.train_size=96",
    "+dataset.eval_size=40",
]
SAME = [
    *MLP,
    f"dataset.train.ops={CROP}",
    f"dataset.eval.ops={OPS}",
    "schedule=constant",
    "train.batch_size=16",
    "train.optimizer.lr=0.01",
    "monitor.tensorboard=false",
    "monitor.sample_images=0",
    "eval.every_steps=9",
    STEPS,
]


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of 31 images of 64 bytes and one, so that there are several; windows of 4 steps."""
    monkeypatch.setattr(record_writer, "FILE_BYTES", 2000)
    monkeypatch.setattr(record_writer, "NARROW_BYTES", 8)
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 4)


@pytest.mark.slow
@pytest.mark.usefixtures("small_files")
def test_training_from_records_equals_training_from_source(cache: Path, tmp_path: Path) -> None:
    """D-13: losses, evaluations and weights, bit for bit, resident and streamed, in any sink."""
    out = tmp_path / "records"
    assert convert_records([str(out), *SOURCE, f"cache.root={cache}"]) == 0
    assert len(list(out.glob("train-image-*"))) == 4

    def train(name: str, *overrides: str) -> Path:
        recipe = load_recipe("lenet5_digits", [*SAME, f"cache.root={cache}", *overrides])
        run(recipe, tmp_path / name)
        return tmp_path / name

    records = ["dataset=records", f"dataset.root={out}"]
    source = train("source", *SOURCE)
    for kind, sink in (("resident", "7"), ("stream", "-1"), ("stream", "45")):
        same = train(f"{kind}{sink}", *records, f"train.feed={kind}", f"train.sink_size={sink}")
        outcome.assert_same_run(source, same)


def save_small(folder: Path) -> Path:
    return save_images(folder, {"train": 9, "eval": 2}, (7, 6, 3), seed=3)


def save_table(folder: Path) -> Path:
    files = sorted(folder.rglob("*.png"))
    rows = [f"{file.relative_to(folder)},{number / 3}" for number, file in enumerate(files)]
    (folder / "ages.csv").write_text("\n".join(["file,age", *rows]))
    return folder / "ages.csv"


def save_arrays(file: Path) -> Path:
    rng = np.random.default_rng(4)
    images, labels = rng.random((11, 5, 4), np.float32), np.arange(11) % 3
    np.savez(file, x_train=images, y_train=labels, x_test=images[:4], y_test=labels[:4])
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        lambda folder: ["dataset=digits"],
        lambda folder: ["dataset=numpy", f"dataset.root={save_arrays(folder / 'a.npz')}"],
        lambda folder: ["dataset=image_folder", f"dataset.root={save_small(folder / 'images')}"],
        lambda folder: [
            "dataset=image_folder",
            f"dataset.root={save_small(folder / 'images')}",
            "dataset.image_size=[4,4]",
        ],
        lambda folder: [
            "dataset=image_folder",
            f"dataset.root={save_small(folder / 'images')}",
            f"dataset.labels_csv={save_table(folder / 'images')}",
            "dataset.split=0.3",
        ],
        lambda folder: [
            "dataset=image_masks",
            f"dataset.root={save_masks(folder / 'images', 7)}",
            "dataset.split=0.3",
        ],
    ],
    ids=["digits", "numpy", "image_folder", "resized", "table", "masks"],
)
def test_records_equal_their_source(
    source: Callable[[Path], list[str]], cache: Path, tmp_path: Path
) -> None:
    overrides, out = [*source(tmp_path), f"cache.root={cache}"], tmp_path / "records"
    convert_records([str(out), *overrides])
    before = load_recipe(overrides=overrides).dataset.read(cache)
    records = ["dataset=records", f"dataset.root={out}", f"cache.root={cache}"]
    records.append(
        f"dataset.ignore_index={'255' if 'dataset=image_masks' in overrides else 'null'}"
    )
    after = load_recipe(overrides=records).dataset.read(cache)
    assert after.targets == before.targets
    for one, other in ((before.train, after.train), (before.eval, after.eval)):
        assert one.columns.keys() == other.columns.keys()
        for name, column in one.columns.items():
            assert np.dtype(column.dtype) == np.dtype(other.columns[name].dtype)
            assert np.array_equal(column[:], other.columns[name][:])


@pytest.mark.medium
def test_written_records_are_reported(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert_records([str(tmp_path / "out"), *SOURCE, f"cache.root={cache}"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "convert    train-image: 96 of 96 samples"
    assert lines[-1].startswith(
        f"done       {tmp_path}/out: 96 training and 40 evaluation samples of synthetic in 4 files"
    )
    assert lines[-1].endswith(f"use it with dataset=records dataset.root={tmp_path}/out")
    assert json.loads((tmp_path / "out" / DESCRIPTION).read_text())["source"] == "synthetic"


@pytest.mark.slow
def test_records_are_overwritten_on_request(tmp_path: Path, cache: Path) -> None:
    arguments = [str(tmp_path / "out"), *SOURCE, f"cache.root={cache}"]
    convert_records(arguments)
    with pytest.raises(RunError, match="holds records already; name another folder, or add --over"):
        convert_records(arguments)
    assert convert_records(["--overwrite", *arguments]) == 0
    assert convert_records([*arguments, "--overwrite"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (
            UsageError,
            [],
            r"OUT is missing; convert records takes OUT dataset=NAME \[KEY=VALUE \.\.\.\]",
        ),
        (UsageError, ["dataset=digits"], r"dataset=digits: OUT must come first, a folder to write"),
        (
            UsageError,
            ["out", "--force"],
            r"--force: there is no such option\. Choose from --help, --json, --over",
        ),
        (
            RecipeError,
            ["out", "dataset=digitz"],
            r"dataset = digitz: there is no such dataset; did you mean di",
        ),
        (
            RecipeError,
            ["out", "dataset=numpy"],
            r"dataset\.root: missing; it must be an \.npz file",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    error: type[Exception],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        convert_records(arguments)
    assert list(tmp_path.iterdir()) == []


def test_uncreatable_folder_error_has_one_line() -> None:
    folder = "/proc/absent/out"
    with pytest.raises(RunError, match=f"^{folder}: can't be written: No such file or directory$"):
        convert_records([folder, "dataset=digits"])


@pytest.mark.medium
def test_unreadable_image_is_named_and_output_removed(tmp_path: Path) -> None:
    images = save_small(tmp_path / "images")
    (images / "train" / "owl" / "3.png").write_bytes(b"no image")
    overrides = ["dataset=image_folder", f"dataset.root={images}", "dataset.image_size=[7,6]"]
    with pytest.raises(DataError, match=r"owl/3\.png: can't be read as an image"):
        convert_records([str(tmp_path / "out"), *overrides])
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


@pytest.mark.slow
def test_convert_records_command_has_exit_statuses(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 0 done, 1 can't be written, 2 wrong arguments or data; one message each."""
    out = tmp_path / "out"
    command = ["convert", "records", str(out), *SOURCE, f"cache.root={cache}"]
    assert [main(command), main(command), main(["convert", "records"])] == [0, 1, 2]
    (out / "train-label-00000-of-00001.array_record").write_bytes(b"")
    again = ["convert", "records", str(tmp_path / "two"), "dataset=records", f"dataset.root={out}"]
    assert main(again) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in errors if line.startswith("error")] == ["error"] * 3
    assert "train-label-00000-of-00001.array_record: has 0 bytes instead of " in errors[-1]
