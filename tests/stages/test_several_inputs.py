"""Runs of a network that reads an image and numbers beside it, from training to its exports."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.stages.export.prediction import make_predict
from pipeline.stages.record.trained_run import read_trained_run
from tests import outcome
from tests.command_line import export, infer, report
from tests.whole_run import run

pytestmark = pytest.mark.usefixtures("optimized_programs_of_module")

INPUTS = (
    "model.layers=[{name: branches, inputs: [image, place], branches: ["
    "[{name: conv, features: 3, kernel: 3}, relu, flatten], [{name: dense, features: 4}, tanh]]},"
    "{name: dense, features: $classes}]"
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of noise, and two numbers of which the class is the sign of the first."""
    draw = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 64), ("test", 24)):
        numbers = draw.normal(size=(count, 2))
        arrays[f"x_{split}"] = draw.integers(0, 256, (count, 4, 4, 1), np.uint8)
        arrays[f"place_{split}"] = numbers
        arrays[f"y_{split}"] = (numbers[:, 0] > 0).astype(np.int64)
    path = tmp_path_factory.mktemp("inputs") / "data.npz"
    np.savez(path, **arrays)
    return path


def compose_inputs(cache: Path, archive: Path, *overrides: str) -> Recipe:
    ops = "[{name: rescale, factor: 0.004, shift: 0.0}]"
    settings = [
        "dataset=numpy",
        f"dataset.root={archive}",
        "dataset.columns=[place]",
        f"dataset.train.ops={ops}",
        f"dataset.eval.ops={ops}",
        "model=layers",
        INPUTS,
        "optimizer=adam",
        "schedule=constant",
        "train.optimizer.lr=0.02",
        "train.batch_size=16",
        "train.steps=60",
        "monitor.tensorboard=false",
    ]
    return load_recipe("lenet5_digits", [*settings, f"cache.root={cache}", *overrides])


@pytest.mark.slow
def test_network_learns_from_two_columns(cache: Path, archive: Path, tmp_path: Path) -> None:
    """The images are noise, so that only the other column can be learnt from."""
    for sink in (7, 60):
        recipe = compose_inputs(cache, archive, f"train.sink_size={sink}")
        summary = run(recipe, tmp_path / str(sink))
        assert summary.metrics["accuracy"] > 0.85
    assert outcome.metrics(tmp_path / "7") == outcome.metrics(tmp_path / "60")


@pytest.mark.medium
def test_missing_column_is_named(cache: Path, archive: Path, tmp_path: Path) -> None:
    recipe = compose_inputs(cache, archive, "dataset.columns=[]", "stages=[data,build]")
    expected = r"the network reads image, place: there is no column 'place'; the columns are"
    with pytest.raises(RecipeError, match=expected):
        run(recipe, tmp_path)


@pytest.fixture(scope="module")
def trained(cache: Path, archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    run(compose_inputs(cache, archive), run_dir)
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("is_exported", [False, True])
def test_both_columns_are_read_from_a_file(
    is_exported: bool, trained: Path, archive: Path, tmp_path: Path, capsys: Any
) -> None:
    """Of a run and of its export, the predictions of the network."""
    with np.load(archive) as arrays:
        data = dict(arrays)
    columns = {"image": data["x_test"], "place": data["place_test"].astype(np.float32)}
    np.savez(tmp_path / "new.npz", **columns)
    source = trained
    if is_exported:
        source = tmp_path / "exported"
        assert export([str(trained), str(source)]) == 0
        described = json.loads((source / "model.json").read_text())["columns"]
        assert described["place"] == {"shape": [2], "dtype": "float32"}
    capsys.readouterr()
    assert infer([str(source), str(tmp_path / "new.npz"), "--json"]) == 0
    predicted = [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()]
    own = read_trained_run(trained)
    logits = np.asarray(make_predict(own)(own.arrays, columns))
    assert predicted == logits.argmax(-1).tolist()
    assert len(set(predicted)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"place": None}, r"lacks place; must be an .npz file with image, place"),
        ({"place": np.zeros((23, 2), np.float32)}, "equally many samples, at least one, not"),
        ({"place": np.zeros((24, 3), np.float32)}, r"place is float32 of shape \(24, 3\); must be"),
    ],
)
def test_columns_that_do_not_fit_are_named(
    changes: dict[str, Any], message: str, trained: Path, archive: Path, tmp_path: Path
) -> None:
    with np.load(archive) as arrays:
        data = dict(arrays)
    columns = {"image": data["x_test"], "place": data["place_test"].astype(np.float32)} | changes
    columns = {name: array for name, array in columns.items() if array is not None}
    np.savez(tmp_path / "new.npz", **columns)
    with pytest.raises(DataError, match=message):
        infer([str(trained), str(tmp_path / "new.npz")])


@pytest.mark.slow
def test_single_array_is_not_enough(trained: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros((4, 4, 1), np.uint8))
    with pytest.raises(DataError, match=r"lacks image, place; must be an .npz file"):
        infer([str(trained), str(tmp_path / "one.npy")])


HALVES = ["train.epochs=null", "train.steps=20", "eval.every_epochs=null", "eval.every_steps=10"]
HALVES += ["checkpoint.every_steps=10", "monitor.tensorboard=false"]


def compose_halves(cache: Path, *overrides: str) -> Recipe:
    return load_recipe("digit_halves", [*HALVES, f"cache.root={cache}", *overrides])


@pytest.fixture(scope="module")
def halves(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the shipped recipe in one sink."""
    run_dir = tmp_path_factory.mktemp("halves") / "run"
    assert run(compose_halves(cache, "train.sink_size=-1"), run_dir).status == "done"
    return run_dir


@pytest.mark.slow
def test_digit_halves_do_not_depend_on_sinks_and_resume(
    halves: Path, cache: Path, tmp_path: Path
) -> None:
    for size in (1, 7):
        run(compose_halves(cache, f"train.sink_size={size}"), tmp_path / str(size))
        outcome.assert_same_run(tmp_path / str(size), halves)
    resumed = tmp_path / "resumed"
    shutil.copytree(halves, resumed)
    shutil.rmtree(make_checkpoint_path(resumed / "checkpoints", 20))
    run(compose_halves(cache, f"train.resume={resumed}"))
    outcome.assert_same_run(resumed, halves)


@pytest.mark.slow
def test_digit_halves_have_the_same_bits_on_two_devices(cache: Path, tmp_path: Path) -> None:
    for devices in (1, 2):
        keys = ["parallel.mode=data", f"parallel.devices={devices}"]
        run(compose_halves(cache, *keys), tmp_path / str(devices))
    outcome.assert_same_run(tmp_path / "2", tmp_path / "1")


@pytest.mark.slow
def test_report_of_two_columns_has_the_accuracy_of_the_run(halves: Path, tmp_path: Path) -> None:
    assert report([str(halves), "--out", str(tmp_path)]) == 0
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    right = sum(row["label"] == row["prediction"] for row in rows)
    assert len(rows) == 359
    assert right / 359 == outcome.read_summary(halves)["metrics"]["accuracy"]


@pytest.mark.slow
def test_two_views_of_an_image_do_not_depend_on_sinks(cache: Path, tmp_path: Path) -> None:
    """Both are changed by draws of the same epoch and sample, and infer needs one image."""
    crops = ["{name: random_crop, size: [4, 8], padding: [0, 0, 2, 2]}"]
    crops += ["{name: random_crop, column: view, size: [4, 8], padding: [0, 0, 2, 2]}"]
    scales = ["{name: type_cast, column: image, dtype: float32}"]
    scales += ["{name: type_cast, column: view, dtype: float32}"]
    copy = "{name: copy, to: view}"
    keys = [f"dataset.train.ops=[{','.join([copy, *crops, *scales])}]"]
    keys += [f"dataset.eval.ops=[{','.join([copy, *scales])}]"]
    keys += [
        "model.layers=[{name: branches, inputs: [image, view], branches: [[flatten], [flatten]]},"
        "{name: dense, features: $classes}]"
    ]
    for size in (1, 20):
        run(compose_halves(cache, *keys, f"train.sink_size={size}"), tmp_path / str(size))
    outcome.assert_same_run(tmp_path / "1", tmp_path / "20")
    assert list(read_trained_run(tmp_path / "1").samples.columns) == ["image"]


@pytest.mark.slow
def test_export_to_onnx_reads_both_columns(halves: Path, tmp_path: Path, capsys: Any) -> None:
    """ONNX Runtime's logits are those of the run, also in int8 and by the script."""
    pytest.importorskip("onnxruntime")
    assert export([str(halves), str(tmp_path / "net"), "--to", "onnx", "--int8"]) == 0
    described = json.loads((tmp_path / "net" / "model.json").read_text())["onnx"]
    assert described["inputs"] == ["features", "image"]
    trained = read_trained_run(halves)
    split = trained.recipe.dataset.read(Path()).eval
    columns = {name: np.asarray(split.columns[name][:9]) for name in described["inputs"]}
    np.savez(tmp_path / "new.npz", **columns)
    expected = np.asarray(make_predict(trained)(trained.arrays, columns)).argmax(-1)
    script = [sys.executable, str(tmp_path / "net" / "predict.py"), str(tmp_path / "new.npz")]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    found = [line.split(": ")[1].split()[0] for line in printed.splitlines()]
    assert found == [str(label) for label in expected]
    np.save(tmp_path / "one.npy", columns["image"])
    ended = subprocess.run([*script[:2], str(tmp_path / "one.npy")], capture_output=True, text=True)
    assert "the network reads features, image: give an .npz file with them" in ended.stderr
