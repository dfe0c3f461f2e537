"""Runs are found and read from what they left, whatever that is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.core.errors import DataError
from pipeline.engine.monitors.log_lines import finite_number
from pipeline.inspect.report.origin import _list_lineage
from pipeline.study.runs.page import list_data_uses, list_links
from pipeline.study.runs.ranking import main_metric
from pipeline.study.runs.recorded_run import (
    MAX_POINTS,
    LoggedCurve,
    find_common_keys,
    find_runs,
    list_differing_keys,
    read_live_status,
    read_run,
    read_runs,
    sample_log,
)
from tests.study.runs.made_up import make_run


def test_runs_are_listed_at_any_depth_but_not_through_links(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "outputs", tmp_path / "elsewhere"
    runs = [make_run(root / where) for where in ("a", "2026-11-22/b", "sweep/0/c")]
    make_run(elsewhere / "d")
    (root / "link").symlink_to(elsewhere, target_is_directory=True)
    make_run(runs[0] / "checkpoints" / "inside")
    assert find_runs(root) == sorted(runs)


def test_run_is_read_from_its_files(tmp_path: Path) -> None:
    run = read_run(
        make_run(tmp_path / "a", lr=0.25, hidden=8, accuracy=0.75), tmp_path, curves=True
    )
    assert (run.name, run.status, run.problem) == ("a", "done", "")
    assert run.keys["train.optimizer.lr"] == 0.25
    assert run.keys["model.hidden"] == "[8]"
    assert run.figures["accuracy"] == 0.75
    assert run.figures["f1"] == 0.5
    assert run.curves["eval accuracy"].values == (0.75,)
    assert run.curves["learning_rate"].values[0] == 0.25
    assert (run.data, run.commits) == ("abababab", ("0123456789",))


def test_data_sizes_and_user_facts_are_in_the_lineage(tmp_path: Path) -> None:
    """I-02."""
    folder = make_run(tmp_path / "a", accuracy=0.75)
    summary = json.loads((folder / "summary.json").read_text())
    sizes = {"data": {"samples": {"train": 1438, "eval": 359}}}
    (folder / "summary.json").write_text(json.dumps({**summary, **sizes}))
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    facts = {"monitor": {"lineage": {"owner": "me", "attempt": 3}}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, **facts}))
    run = read_run(folder, tmp_path, curves=False)
    assert (run.figures["train_samples"], run.figures["eval_samples"]) == (1438, 359)
    assert main_metric([run.figures]) == "accuracy"
    rows = {row["what"]: row["name"] for row in _list_lineage(run)}
    assert (rows["train samples"], rows["eval samples"]) == ("1,438", "359")
    assert (rows["owner"], rows["attempt"]) == ("me", "3")
    other = read_run(make_run(tmp_path / "b", accuracy=0.5), tmp_path, curves=False)
    keys = {**other.keys, "monitor.lineage.owner": "you"}
    assert "monitor.lineage.owner" in list_differing_keys([run, replace(other, keys=keys)])


def test_killed_run_is_unfinished(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", status=None), tmp_path, curves=False)
    assert (run.status, run.figures) == ("unfinished", {})


@pytest.mark.parametrize("file", ["recipe.yaml", "summary.json", "provenance.json"])
@pytest.mark.parametrize("content", [b"[1, 2", b"\x00\xff\xfe", b"", b"[]", b"7"])
def test_damaged_file_is_reported_and_sound_files_are_read(
    file: str, content: bytes, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "a")
    (folder / file).write_bytes(content)
    run = read_run(folder, tmp_path, curves=True)
    assert file in run.problem
    assert run.curves["loss"].steps[0] == 1


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "9" * 400, "true", '"text"', "[1]"])
def test_non_finite_values_are_not_figures(number: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", steps=2)
    (folder / "evals.jsonl").write_text(f'{{"step": 2, "accuracy": {number}, "loss": 0.5}}\n')
    summary = f'{{"status": "done", "metrics": {{"accuracy": {number}, "loss": 0.5}}}}'
    (folder / "summary.json").write_text(summary)
    run = read_run(folder, tmp_path, curves=True)
    assert "accuracy" not in run.figures
    assert set(run.curves) == {"loss", "learning_rate", "eval loss"} or run.problem


def test_invalid_log_lines_are_skipped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", steps=3)
    with (folder / "metrics.jsonl").open("a") as log:
        log.write('nothing\n{"step": 4, "loss": 0.5}\n{"step": 5, "lo')
    assert read_run(folder, tmp_path, curves=True).curves["loss"].steps == (1, 2, 3, 4)


def test_long_log_is_sampled_including_both_ends(tmp_path: Path) -> None:
    curve = read_run(make_run(tmp_path / "a", steps=20_000), tmp_path, curves=True).curves["loss"]
    assert (curve.steps[0], curve.steps[-1]) == (1, 20_000)
    assert 40 <= len(curve.steps) <= 60
    gaps = [b - a for a, b in zip(curve.steps, curve.steps[1:], strict=False)]
    assert max(gaps) < 2 * 20_000 / len(curve.steps)


def test_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no run"):
        read_runs(tmp_path, curves=False)
    with pytest.raises(DataError, match="must be a folder"):
        read_runs(tmp_path / "missing", curves=False)


def test_differing_and_common_keys(tmp_path: Path) -> None:
    make_run(tmp_path / "a", lr=0.1)
    make_run(tmp_path / "b", lr=0.2, hidden=32)
    folder = make_run(tmp_path / "c", lr=0.3)
    recipe = json.loads(
        json.dumps({"name": "made_up", "seed": 1, "train": {"optimizer": {"lr": 0.4}}})
    )
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    runs = read_runs(tmp_path, curves=False)
    assert list_differing_keys(runs) == ["train.optimizer.lr", "model.hidden"]
    assert find_common_keys(runs) == {"name": "made_up", "seed": 1}


def test_lineage_names_the_origin_of_weights(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", restore="a/checkpoints/100")
    make_run(tmp_path / "c", restore="/elsewhere/w.safetensors")
    make_run(tmp_path / "10-00-00_made_up_reproduced")
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    resumed = {**summary, "resumed_from": {"step": 40}}
    (tmp_path / "a" / "summary.json").write_text(json.dumps(resumed))
    runs = read_runs(tmp_path, curves=False)
    found = list_links(runs)
    links = {(link.source, link.target) for link in found}
    assert ("a", "was resumed", "at step 40") in {(o.source, o.relation, o.target) for o in found}
    assert links == {
        ("a", "at step 40"),
        ("a, checkpoints/100", "b"),
        ("/elsewhere/w.safetensors", "c"),
        ("made_up", "10-00-00_made_up_reproduced"),
    }
    (use,) = list_data_uses(runs)
    assert (use.dataset, use.ops, len(use.runs)) == ("digits", "resize, rescale", 4)


STATUS = {"step": 3, "steps": 9, "loss": None, "step_ms": 2.0, "left_s": 1.0, "evaluation": None}


def write_status(folder: Path, written: datetime) -> None:
    (folder / "status.json").write_text(json.dumps({**STATUS, "written": written.isoformat()}))


def test_status_of_a_dead_run_is_ignored(tmp_path: Path) -> None:
    assert read_live_status(tmp_path) is None
    write_status(tmp_path, datetime.now(UTC))
    assert read_live_status(tmp_path) is not None
    write_status(tmp_path, datetime.now(UTC) - timedelta(seconds=61))
    assert read_live_status(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "Expecting value"),
        ("[]", "dictionary"),
        ("{", "Expecting property name"),
        ('{"step": 1e400}', "step"),
        (
            json.dumps({**STATUS, "left_s": math.nan, "written": "2026-11-26T09:00:00+00:00"}),
            "left_s = nan",
        ),
        (json.dumps({**STATUS, "written": "today"}), "Invalid isoformat"),
        (json.dumps({**STATUS, "written": "2026-11-26T09:00:00"}), "must have a time zone"),
    ],
    ids=["empty", "a list", "cut", "infinite", "not a number", "no date", "no time zone"],
)
def test_damaged_status_is_a_value_error(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "status.json").write_text(content)
    with pytest.raises(ValueError, match=problem):
        read_live_status(tmp_path)


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("steps", [1, 2, 48, 1000, 50_000])
def test_curve_has_both_ends_and_few_points(tmp_path: Path, steps: int) -> None:
    lines = [{"step": step, "epoch": 0, "loss": 1 / step} for step in range(1, steps + 1)]
    curves = sample_log(write(tmp_path / "metrics.jsonl", lines))
    assert set(curves) == {"loss"}
    curve = curves["loss"]
    assert (curve.steps[0], curve.steps[-1]) == (1, steps)
    assert list(curve.steps) == sorted(set(curve.steps))
    assert curve.values == tuple(1 / step for step in curve.steps)
    assert min(steps, 2) <= len(curve.steps) <= MAX_POINTS + 1
    gaps = [b - a for a, b in zip(curve.steps, curve.steps[1:], strict=False)]
    assert max(gaps, default=0) <= max(1, 3 * steps // MAX_POINTS)


def test_invalid_and_partial_lines_are_skipped(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b'{"step": 1, "loss": 2.0}\nno json\n{"step": 3, "loss": 1.0}\n{"step": 4, "l')
    assert sample_log(log) == {"loss": LoggedCurve((1, 3), (2.0, 1.0))}


def test_missing_log_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl: can't be read"):
        sample_log(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (2, 2),
        ({"macro": 0.5, "0": 1.0}, 0.5),
        ({"0": 1.0}, None),
        (True, None),
        ("2", None),
        (nan, None),
        (inf, None),
        (10**400, None),
        (None, None),
    ],
)
def test_finite_number_accepts_only_finite_numbers(value: Any, number: float | None) -> None:
    assert finite_number(value) == number
