"""Cross-validation as a command: each fold is the run alone, and what it writes outlives a kill."""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.__main__ import main
from pipeline.cli.commands.root import ROOT
from pipeline.core.errors import RecipeError, UsageError
from tests import outcome
from tests.conftest import TINY
from tests.forked import start_forked

OPS = "[{name: rescale, factor: 0.0625, shift: 0.0}]"
DIGITS = [
    *("+recipe=lenet5_digits", "model=mlp", "model.hidden=[8]", "schedule=constant"),
    *(f"dataset.train.ops={OPS}", f"dataset.eval.ops={OPS}", "train.optimizer.lr=0.1"),
    *("monitor.tensorboard=false", "monitor.sample_images=0", "train.batch_size=32"),
    *("train.steps=45", "eval.every_steps=20"),
]
STEPS = 3000
"""Steps of a run that is killed before its end."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder, of sweeps and runs."""
    folder = tmp_path_factory.mktemp("folds")
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def swept(folder: Path, cache: Path) -> Path:
    """Three folds of the digits."""
    sweep = [*DIGITS, f"cache.root={cache}", "hydra.sweep.dir=folds"]
    assert main(["folds", "--k", "3", *sweep]) == 0
    return folder / "folds"


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.mark.medium
def test_metrics_are_aggregated_over_the_folds(swept: Path) -> None:
    found = {row["metric"]: row for row in rows(swept / "folds.csv")}
    metrics = [outcome.read_summary(swept / str(fold))["metrics"] for fold in range(3)]
    assert [part["count"] for part in metrics] == [480, 479, 479]
    values = [part["accuracy"] for part in metrics]
    row = found["accuracy"]
    assert [float(row[f"fold_{fold}"]) for fold in range(3)] == values
    assert float(row["mean"]) == pytest.approx(np.mean(values))
    assert float(row["std"]) == pytest.approx(np.std(values, ddof=1))
    assert "count" not in found
    assert {"loss", "train_loss", "f1"} <= set(found)


@pytest.mark.medium
def test_each_training_sample_has_the_prediction_of_its_fold(swept: Path) -> None:
    predictions = rows(swept / "out_of_fold.csv")
    assert [int(row["index"]) for row in predictions] == list(range(1438))
    for fold in range(3):
        own = [row for row in predictions if row["fold"] == str(fold)]
        metrics = outcome.read_summary(swept / str(fold))["metrics"]
        right = sum(row["label"] == row["prediction"] for row in own)
        assert right / len(own) == pytest.approx(metrics["accuracy"])


def test_members_share_a_program(swept: Path) -> None:
    logs = [(swept / str(fold) / "run.log").read_text() for fold in range(3)]
    assert not any("separate programs" in log for log in logs)
    # Only the first member writes what a compilation took.
    assert sum("a step takes" in log for log in logs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("size", ["-1", "1", "7"])
def test_fold_equals_separate_run_at_any_sink_size(
    swept: Path, folder: Path, cache: Path, size: str
) -> None:
    alone = folder / f"alone_{size}"
    keys = ["dataset.folds.count=3", "dataset.folds.index=1", f"cache.root={cache}"]
    # The folds have the sink size of the recipe.
    sink = [] if size == "-1" else [f"train.sink_size={size}"]
    assert main([*DIGITS, *keys, *sink, f"hydra.run.dir={alone}"]) == 0
    assert outcome.metrics(alone) == outcome.metrics(swept / "1")
    evaluations = outcome.read_lines(alone / "evals.jsonl")
    assert evaluations == outcome.read_lines(swept / "1" / "evals.jsonl")
    outcome.assert_equal_arrays(outcome.arrays(alone), outcome.arrays(swept / "1"))


@pytest.mark.slow
def test_folds_with_different_constants_have_separate_programs(folder: Path, cache: Path) -> None:
    """Weights of classes are computed from the labels of the fold's training samples."""
    keys = [*DIGITS, f"cache.root={cache}", "train.loss.class_weights=balanced"]
    assert main(["folds", "--k", "2", *keys, "hydra.sweep.dir=weighted"]) == 0
    fold = ["dataset.folds.count=2", "dataset.folds.index=1"]
    assert main([*keys, *fold, "hydra.run.dir=weighted_alone"]) == 0
    found, expected = (
        (folder / name / "metrics.jsonl").read_bytes() for name in ("weighted/1", "weighted_alone")
    )
    assert found == expected


@pytest.mark.slow
def test_regression_folds_of_eager_recipe_are_separate_jobs(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An eager recipe can't be in a population, so its folds are jobs one after the other."""
    keys = ["+recipe=diabetes_mlp", "train.steps=4", "train.mode=eager", f"cache.root={cache}"]
    length = ["train.epochs=null", "train.epochs=null", "eval.every_steps=null"]
    command = ["folds", "--k", "2", *keys, *length, "hydra.sweep.dir=numbers", "--json"]
    assert ROOT(command) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["folds"] == 2
    assert len(facts["metrics"]["mae"]["values"]) == 2
    predictions = rows(folder / "numbers" / "out_of_fold.csv")
    assert len(predictions) == len({row["index"] for row in predictions}) == 354
    names = ("progression", "predicted progression")
    true, predicted = ([float(row[name]) for row in predictions] for name in names)
    assert np.abs(np.subtract(true, predicted)).mean() == pytest.approx(
        facts["metrics"]["mae"]["mean"], rel=0.02
    )


@pytest.mark.slow
def test_samples_have_the_numbers_that_exclude_reads(folder: Path, cache: Path) -> None:
    (folder / "wrong.csv").write_text("index\n0\n7\n")
    keys = [*DIGITS, f"cache.root={cache}", "dataset.train.select=[{name: skip, samples: 5}]"]
    keys += ["dataset.exclude=wrong.csv", "train.ledger=true", "hydra.sweep.dir=numbered"]
    assert main(["folds", "--k", "2", *keys]) == 0
    predictions = rows(folder / "numbered" / "out_of_fold.csv")
    numbers = [int(row["index"]) for row in predictions]
    assert numbers == [number for number in range(5, 1438) if number != 7]
    assert main(["report", "numbered/1"]) == 0
    suspicious = rows(folder / "numbered" / "1" / "report" / "suspicious_labels.csv")
    labels = {row["index"]: row["label"] for row in suspicious}
    assert labels == {row["index"]: row["label"] for row in predictions if row["fold"] == "0"}


@pytest.mark.slow
def test_killed_folds_are_resumed(folder: Path, cache: Path) -> None:
    own = ("train.steps", "eval.every_steps")
    keys = [*(key for key in DIGITS if not key.startswith(own)), f"cache.root={cache}"]
    keys += [f"train.steps={STEPS}", "train.sink_size=100"]
    keys += ["eval.every_steps=500", "checkpoint.every_steps=500"]
    command = ["folds", "--k", "3", *keys]
    assert main([*command, "hydra.sweep.dir=whole"]) == 0
    killed = [*command, "hydra.sweep.dir=killed"]
    lines = [folder / "killed.txt"] * 2
    process = start_forked([*killed, "--quiet"], folder, os.environ, lines)
    until = time.monotonic() + 120
    while not list(folder.glob("killed/*/checkpoints/[0-9]*")) and time.monotonic() < until:
        time.sleep(0.02)
    assert process.is_alive(), "the folds ended before they were killed"
    process.kill()
    process.join()
    assert not (folder / "killed" / "out_of_fold.csv").exists()
    assert main(killed) == 0
    for name in ("folds.csv", "out_of_fold.csv"):
        found, expected = ((folder / way / name).read_bytes() for way in ("killed", "whole"))
        assert found == expected
    for fold in range(3):
        outcome.assert_equal_arrays(
            outcome.arrays(folder / "killed" / str(fold)),
            outcome.arrays(folder / "whole" / str(fold)),
        )


@pytest.mark.medium
def test_more_folds_than_samples_of_a_class_are_refused(cache: Path) -> None:
    problem = r"dataset.folds.count = 128: must be at most 127, the training samples of class '8'"
    with pytest.raises(RecipeError, match=problem):
        ROOT(["folds", "--k", "128", *DIGITS, f"cache.root={cache}"])
    assert main(["folds", "--k", "128", *DIGITS, f"cache.root={cache}"]) == 2


@pytest.mark.parametrize(
    ("keys", "problems"),
    [
        (["seed=1,2"], ["seed: has several values; folds train one recipe"]),
        (["dataset.folds.index=1"], ["dataset.folds.index: is set by --k and --seed"]),
        (["hydra/sweeper=optuna"], ["hydra/sweeper: must be left out; folds are a grid"]),
        (["stages=[data,build]"], ["stages: must have train, checkpoint and eval"]),
        (["train.foo=1", "model.bar=2"], ["train.foo = 1: there is no such key", "model.bar"]),
    ],
)
def test_wrong_recipes_are_refused(keys: list[str], problems: list[str], folder: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        ROOT(["folds", *TINY, *keys])
    for problem in problems:
        assert problem in str(caught.value)
    assert not list(folder.glob("outputs/*"))


@pytest.mark.parametrize("count", ["1", "0", "two"])
def test_fewer_than_two_folds_are_refused(count: str) -> None:
    with pytest.raises(UsageError, match=f"--k {count}: must be a whole number from 2"):
        ROOT(["folds", "--k", count, "+recipe=lenet5_digits"])


def probabilities(printed: str) -> np.ndarray:
    """The probability of each class, by the lines of `infer --json`."""
    found: list[dict[str, Any]] = [json.loads(line) for line in printed.splitlines()]
    table = np.zeros((len(found), 10))
    for row, line in zip(table, found, strict=True):
        for entry in line["top"]:
            row[entry["label"]] = entry["probability"]
    return table


@pytest.mark.slow
def test_ensemble_of_folds_averages_their_probabilities(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a folder, as several runs, and after an export."""
    images = np.random.default_rng(0).integers(0, 17, (4, 8, 8, 1), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    inputs = [str(tmp_path / "images.npy"), "--json", "--top", "10"]
    runs = [str(swept / str(fold)) for fold in range(3)]
    capsys.readouterr()

    def predict(*sources: str) -> np.ndarray:
        assert ROOT(["infer", *sources, *inputs]) == 0
        return probabilities(capsys.readouterr().out)

    expected = np.mean([predict(source) for source in runs], axis=0)
    np.testing.assert_allclose(predict(str(swept)), expected, atol=2e-6)
    np.testing.assert_allclose(predict(*runs), expected, atol=2e-6)
    assert ROOT(["export", str(swept), str(tmp_path / "export"), "--quiet"]) == 0
    np.testing.assert_allclose(predict(str(tmp_path / "export")), expected, atol=2e-6)
    description = json.loads((tmp_path / "export" / "model.json").read_text())
    assert description["members"] == ["mlp of step 45"] * 3
    with pytest.raises(UsageError, match="--to ckpt: writes the files of one run, not of 3"):
        ROOT(["export", str(swept), str(tmp_path / "ckpt"), "--to", "ckpt"])


@pytest.mark.slow
def test_report_compares_the_ensemble_with_its_members(
    swept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the evaluation split of the recipe, which no fold has."""
    capsys.readouterr()
    assert ROOT(["report", str(swept), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["samples"] == "359"
    text = (swept / "report" / "index.html").read_text()
    assert "ensemble of 3 runs of mlp on digits" in text
    assert all(str(swept / str(fold)) in text for fold in range(3))
    found = rows(swept / "report" / "predictions.csv")
    accuracy = sum(row["label"] == row["prediction"] for row in found) / len(found)
    assert facts["accuracy"] == f"{accuracy:.4f}"
    runs = [str(swept / str(fold)) for fold in range(2)]
    with pytest.raises(UsageError, match="several runs need --out FOLDER"):
        ROOT(["report", *runs])
    assert ROOT(["report", *runs, "--out", str(swept.parent / "two")]) == 0


def test_sweep_without_a_finished_job_has_no_ensemble(tmp_path: Path) -> None:
    (tmp_path / "sweep" / "0").mkdir(parents=True)
    (tmp_path / "sweep" / "0" / "overrides.yaml").write_text("seed: 1\n")
    assert main(["report", str(tmp_path / "sweep")]) == 2
