"""Runs of the recipes of series: sinks, resume, devices, predictions, exports and reports."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pipeline import load_recipe
from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.stages.data import load_data
from pipeline.stages.export.prediction import make_predict
from pipeline.stages.record.trained_run import read_trained_run
from tests import outcome
from tests.command_line import convert_records, export, infer, report
from tests.whole_run import run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized_programs_of_module")]

SHORT = ["train.epochs=null", "train.steps=20", "eval.every_epochs=null", "eval.every_steps=10"]
SHORT += ["checkpoint.every_steps=10", "monitor.tensorboard=false", "train.batch_size=8"]
SMALL = "model.layers=[{use: conv_block, with: {features: 8, kernel: 5}}, {name: max_pool1d, "
SMALL += "kernel: 2}, mean_token, {name: dense, features: $classes}]"
LOCAL = ["dataset.package=null", "dataset.root=FILE"]
KEYS = {
    "mnist1d_cnn": ["train.epochs=null"],
    "fcn_series": [*LOCAL, SMALL],
    "forecast_linear": [*LOCAL, "dataset.time_column=time"],
}


def save_series(file: Path) -> Path:
    """Save waves of two frequencies, whose values have another scale in each channel."""
    draw = np.random.default_rng(0)
    label = np.arange(60) % 2
    steps = np.arange(24)
    waves = np.sin((label[:, None] + 1) * steps / 3 + draw.uniform(0, 6, (60, 1)))
    series = np.stack([100 + 20 * waves, 0.01 * draw.normal(size=waves.shape)], axis=-1)
    np.savez(file, series=series, label=np.array(["slow", "fast"])[label])
    return file


def save_rows(file: Path) -> Path:
    """Save a season of 11 steps with a trend."""
    steps = np.arange(120)
    values = 500 + steps + 40 * np.sin(2 * np.pi * steps / 11)
    lines = [f"{step},{value:.4f}" for step, value in zip(steps, values, strict=True)]
    file.write_text("\n".join(["time,v", *lines]) + "\n")
    return file


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The file of each recipe that reads one."""
    folder = tmp_path_factory.mktemp("files")
    return {
        "fcn_series": save_series(folder / "a.npz"),
        "forecast_linear": save_rows(folder / "a.csv"),
    }


def compose(name: str, files: dict[str, Path], cache: Path, *overrides: str) -> Recipe:
    keys = [key.replace("FILE", str(files.get(name))) for key in KEYS[name]]
    return load_recipe(name, [*SHORT, *keys, f"cache.root={cache}", *overrides])


@pytest.fixture(scope="module", params=KEYS)
def whole(
    request: pytest.FixtureRequest,
    files: dict[str, Path],
    cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Path]:
    """A recipe's name, and its run in one sink."""
    run_dir = tmp_path_factory.mktemp(request.param) / "run"
    summary = run(compose(request.param, files, cache, "train.sink_size=-1"), run_dir)
    assert summary.status == "done"
    return request.param, run_dir


def test_series_runs_do_not_depend_on_sinks_and_resume(
    whole: tuple[str, Path], files: dict[str, Path], cache: Path, tmp_path: Path
) -> None:
    name, run_dir = whole
    for size in (1, 7):
        run(compose(name, files, cache, f"train.sink_size={size}"), tmp_path / str(size))
        outcome.assert_same_run(tmp_path / str(size), run_dir)
    resumed = tmp_path / "resumed"
    shutil.copytree(run_dir, resumed)
    shutil.rmtree(make_checkpoint_path(resumed / "checkpoints", 20))
    run(compose(name, files, cache, f"train.resume={resumed}"))
    outcome.assert_same_run(resumed, run_dir)


@pytest.mark.parametrize("name", KEYS)
def test_series_runs_have_the_same_bits_on_two_devices(
    name: str, files: dict[str, Path], cache: Path, tmp_path: Path
) -> None:
    for devices in (1, 2):
        keys = ["parallel.mode=data", f"parallel.devices={devices}"]
        run(compose(name, files, cache, *keys), tmp_path / str(devices))
    outcome.assert_same_run(tmp_path / "2", tmp_path / "1")


def test_exported_series_network_predicts_as_the_run(
    whole: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of series in the units of the data."""
    _, run_dir = whole
    trained = read_trained_run(run_dir)
    samples = trained.recipe.dataset.read(Path()).eval.columns["series"][:6]
    np.save(tmp_path / "new.npy", samples)
    assert export([str(run_dir), str(tmp_path / "out"), "--to", "onnx"]) == 0
    printed = []
    for source in (run_dir, tmp_path / "out"):
        capsys.readouterr()
        assert infer([str(source), str(tmp_path / "new.npy"), "--json"]) == 0
        printed.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    assert len(printed[0]) == 6
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    (found,) = session.run(None, {"series": samples})
    expected = np.asarray(make_predict(trained)(trained.arrays, samples))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert expected.std() > 0
    for ours, exported in zip(*printed, strict=True):
        for key, value in ours.items():
            if isinstance(value, float):
                assert exported[key] == pytest.approx(value, rel=1e-3, abs=1e-3)


def test_new_series_are_read_from_files_of_the_dataset(
    whole: tuple[str, Path],
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also by an export, and from an .npz file that has labels too."""
    name, run_dir = whole
    if name not in files:
        return
    assert export([str(run_dir), str(tmp_path / "out")]) == 0
    printed = []
    for source in (run_dir, tmp_path / "out"):
        capsys.readouterr()
        assert infer([str(source), str(files[name])]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert len(printed[0].splitlines()) == {"fcn_series": 60, "forecast_linear": 1}[name]
    folder = files[name].parent
    if name == "fcn_series":
        with np.load(files[name]) as arrays:
            lines = (":".join(",".join(map(str, row)) for row in s.T) for s in arrays["series"])
            (tmp_path / "new.ts").write_text("\n".join(["@classLabel false", "@data", *lines]))
        assert infer([str(run_dir), str(tmp_path / "new.ts")]) == 0
        from_ts = capsys.readouterr().out
        assert from_ts.replace("new.ts", "a.npz") == printed[0].replace(str(folder), str(tmp_path))


def test_report_of_series_has_the_figures_of_the_run(
    whole: tuple[str, Path], tmp_path: Path
) -> None:
    name, run_dir = whole
    assert report([str(run_dir), "--out", str(tmp_path)]) == 0
    metrics = outcome.read_summary(run_dir)["metrics"]
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == metrics["count"]
    if name == "forecast_linear":
        page = (tmp_path / "index.html").read_text()
        naive_mae = metrics["mae"] / metrics["relative_mae"]
        assert f"{naive_mae:.4g}" in page.partition("seasonal naive MAE")[2][:200]
        return
    right = sum(row["label"] == row["prediction"] for row in rows)
    assert right / len(rows) == metrics["accuracy"]


def test_naive_forecast_is_compared_if_all_windows_are_evaluated(
    files: dict[str, Path], cache: Path
) -> None:
    def load(*overrides: str) -> Dataset:
        recipe = compose("forecast_linear", files, cache, *overrides)
        return load_data(recipe, Reporter(console=Console(file=io.StringIO())))

    assert load().targets.naive_mae is not None
    part = load("eval.samples=3")
    assert (len(part.eval), part.targets.naive_mae) == (3, None)


def test_forecast_is_better_than_the_seasonal_naive(
    files: dict[str, Path], cache: Path, tmp_path: Path
) -> None:
    recipe = compose("forecast_linear", files, cache, "train.steps=200")
    summary = run(recipe, tmp_path / "run")
    assert summary.metrics["relative_mae"] < 0.5
    said = (tmp_path / "run" / "run.log").read_text()
    assert "seasonal naive, the value of 11 steps before: mean absolute error" in said


def test_series_of_another_length_are_refused_by_infer(
    whole: tuple[str, Path], tmp_path: Path
) -> None:
    np.save(tmp_path / "new.npy", np.zeros((2, 5, 1), np.float32))
    with pytest.raises(DataError, match=r"it has shape \(2, 5, 1\); must be"):
        infer([str(whole[1]), str(tmp_path / "new.npy")])


def test_missing_package_is_one_message(cache: Path, tmp_path: Path) -> None:
    recipe = load_recipe(
        "fcn_series", [*SHORT, f"cache.root={cache}", "dataset.package=absent_package"]
    )
    with pytest.raises(DataError, match=r"isn't installed; .* pip install absent_package"):
        run(recipe, tmp_path)


def test_records_of_series_are_refused(files: dict[str, Path], tmp_path: Path) -> None:
    keys = ["dataset=series", f"dataset.root={files['fcn_series']}"]
    with pytest.raises(RecipeError, match="records can't hold means and deviations of series"):
        convert_records([str(tmp_path / "out"), *keys])
    assert not (tmp_path / "out").exists()


def test_weights_of_series_with_other_means_are_warned_of(
    files: dict[str, Path], cache: Path, tmp_path: Path
) -> None:
    run(compose("fcn_series", files, cache, "train.sink_size=-1"), tmp_path / "first")
    restore = f"checkpoint.restore={tmp_path / 'first'}"
    said = "was trained on series with other means or deviations"
    for split_seed, warned in ((0, False), (1, True)):
        keys = ["train.sink_size=-1", restore, f"dataset.split_seed={split_seed}"]
        run_dir = tmp_path / f"second{split_seed}"
        run(compose("fcn_series", files, cache, *keys), run_dir)
        assert (said in (run_dir / "run.log").read_text().replace("\n", " ")) == warned
