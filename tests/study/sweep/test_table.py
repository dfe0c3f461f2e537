"""Tables of sweeps, and the curve of steps against sink sizes."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pipeline.stages.record.run_directory import SUMMARY
from pipeline.study.population.groups import FOLD
from pipeline.study.sweep.directory import write_overrides
from pipeline.study.sweep.table import conclude_sweep, write_amortisation

RATE = "train.optimizer.lr"


def _elements(markup: str) -> ElementTree.Element:
    """Parse a page as XML; elements that HTML leaves open are closed first."""
    closed = re.sub(r"<(meta[^>]*)>", r"<\1/>", markup.removeprefix("<!doctype html>\n"))
    return ElementTree.fromstring(closed)


def test_curve_points_are_placed_correctly(tmp_path: Path) -> None:
    path = tmp_path / "curve.html"
    write_amortisation([(1, 40.0), (10, 22.0), (1000, 20.0)], path, title="Sinks & steps")
    root = _elements(path.read_text())
    dots = [
        (float(dot.get("cx", "nan")), float(dot.get("cy", "nan"))) for dot in root.iter("circle")
    ]
    (left, top), (middle, _), (right, bottom) = dots
    assert middle - left == pytest.approx((right - left) / 3, abs=0.02)
    assert top < bottom
    assert "2.00 times as fast" in path.read_text()


def _write_jobs(folder: Path, jobs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """Write done jobs with their changed keys and metrics."""
    for number, (changed, metrics) in enumerate(jobs):
        job = folder / str(number)
        job.mkdir(parents=True)
        write_overrides(job, changed)
        (job / SUMMARY).write_text(json.dumps({"status": "done", "metrics": metrics}))


def test_every_metric_of_a_job_is_a_column(tmp_path: Path) -> None:
    """Of segmentation, texts, `eval.metrics` and a user's class; not the number of samples."""
    metrics = {"mean_iou": 0.5, "perplexity": 3.0, "mine": 2, "f1": {"macro": 0.25}, "count": 9}
    _write_jobs(tmp_path, [({RATE: 0.1}, {"loss": 1.0}), ({RATE: 0.2}, metrics)])
    assert conclude_sweep(tmp_path) == 0
    with (tmp_path / "sweep.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first["metrics.loss"] == "1.0"
    found = {name: second[f"metrics.{name}"] for name in ("mean_iou", "perplexity", "mine", "f1")}
    assert found == {"mean_iou": "0.5", "perplexity": "3.0", "mine": "2.0", "f1": "0.25"}
    assert "metrics.count" not in second


def test_settings_are_ranked_by_their_mean_over_folds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best single fold, of rate 0.2, isn't the best; rate 0.3 lacks a fold."""
    accuracies = {0.1: (0.7, 0.6), 0.2: (0.8, 0.3), 0.3: (0.9,)}
    jobs = [
        ({FOLD: fold, RATE: rate}, {"accuracy": accuracy})
        for rate, values in accuracies.items()
        for fold, accuracy in enumerate(values)
    ]
    _write_jobs(tmp_path, jobs)
    conclude_sweep(tmp_path)
    printed = capsys.readouterr().out
    assert f"best: mean accuracy 0.65 of 2 folds: {RATE}=0.1\n" in printed


def test_settings_with_different_folds_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_rate = {0.1: {0: 0.9, 1: 0.9}, 0.2: {1: 0.95, 2: 0.5}}
    jobs = [
        ({FOLD: fold, RATE: rate}, {"accuracy": accuracy, "f1": accuracy})
        for rate, values in by_rate.items()
        for fold, accuracy in values.items()
    ]
    _write_jobs(tmp_path, jobs)
    conclude_sweep(tmp_path)
    printed = capsys.readouterr().out
    assert "best:" not in printed
    assert "f1" not in printed


def test_no_fold_is_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_jobs(tmp_path, [({FOLD: fold}, {"accuracy": fold / 2}) for fold in range(2)])
    conclude_sweep(tmp_path)
    assert "best:" not in capsys.readouterr().out
