from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.recipe import Recipe
from pipeline.stages.record.summary import Summary, describe_start_up, list_versions
from tests import outcome
from tests.whole_run import run

Compose = Callable[..., Recipe]


def test_summary_repr_has_one_line() -> None:
    summary = Summary("mlp_mnist", "cpu", 1, ("data",), "outputs/one", steps=1200)
    assert repr(summary) == "<mlp_mnist: done, 1,200 steps; outputs/one>"
    by_class = {"macro": 0.5, "by_class": [0.5] * 100}
    summary.metrics = {"accuracy": 0.98765, "loss": 0.05, "f1": by_class, "count": 10_000}
    summary.data = {"classes": [str(label) for label in range(100)]}
    summary.status, summary.reason = "stopped", "SIGINT"
    assert repr(summary) == (
        "<mlp_mnist: stopped (SIGINT), 1,200 steps, accuracy 0.9877, loss 0.05; outputs/one>"
    )


@pytest.mark.slow
def test_run_reports_its_outcome(tiny: Compose, tmp_path: Path) -> None:
    """The contract that other programs read."""
    returned = run(tiny("train.sink_size=4", "eval.every_steps=45"), tmp_path)
    summary = outcome.read_summary(tmp_path)
    steps = outcome.metrics(tmp_path)
    (evaluation,) = outcome.read_lines(tmp_path / "evals.jsonl")

    assert summary["status"] == "done"
    assert (summary["reason"], summary["exit_status"]) == (None, 0)
    assert summary["recipe"] == "lenet5_digits"
    assert (summary["device"], summary["seed"]) == ("cpu", 1)
    assert summary["stages"] == ["data", "build", "compile", "train", "checkpoint", "eval"]
    assert summary["run_dir"] == str(tmp_path)
    assert (summary["steps"], summary["epochs"], summary["sinks"]) == (45, 7.5, 12)
    assert summary.pop("passes") == 7.5
    assert summary["sink"] == {
        "size": 4,
        "mechanism": "loop",
        "why": "one XLA program loops over the steps of a sink, its trip count an argument",
    }
    assert summary["parameters"] == 61_684
    assert summary["metrics"].pop("train_loss") == pytest.approx(steps[-1]["loss"])
    assert summary["metrics"] == {name: evaluation[name] for name in evaluation if name != "step"}
    assert (summary["modelled"], summary["resumed_from"]) == ({}, None)
    assert summary["versions"].keys() > {"python", "jax", "jaxlib", "flax", "numpy", "device"}
    assert summary.keys() == vars(returned).keys()

    times = summary["time"]
    start_up = {
        "start_s",
        "data_s",
        "build_s",
        "first_window_s",
        "compile_s",
        "sinks_s",
        "outlook_s",
        "first_dispatch_s",
    }
    start_up |= {"first_step_s"}
    speeds = {"step_ms", "median_step_ms", "images_per_s"}
    assert set(times) == start_up | speeds | {"train_s", "total_s"}
    assert all(times[name] >= 0 for name in start_up)
    assert sum(times[name] for name in start_up - {"first_step_s"}) <= times["first_step_s"]
    assert times["first_step_s"] < times["start_s"] + times["total_s"]
    assert 0 < times["compile_s"] < times["total_s"]
    assert 0 < times["train_s"] < times["total_s"]
    assert times["images_per_s"] == pytest.approx(1000 * 16 / times["step_ms"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "sink"),
    [
        (["train.sink=false", "train.sink_size=7"], {"size": None, "mechanism": "none"}),
        (["train.sink=false", "train.sink_size=-1"], {"size": None, "mechanism": "none"}),
        (["train.sink_size=3", "train.mechanism=soft"], {"size": 3, "mechanism": "soft"}),
    ],
    ids=["ignored", "off", "soft"],
)
@pytest.mark.mlp
def test_summary_has_the_sink_mechanism_and_reason(
    overrides: list[str], sink: dict[str, object], tiny: Compose, tmp_path: Path
) -> None:
    """S-07: an ignored size is reported, unless it is the default."""
    run(tiny(*overrides), tmp_path)
    section = outcome.read_summary(tmp_path)["sink"]
    assert section.pop("why")
    assert section == sink
    warned = "warning    train.sink_size = 7: ignored" in (tmp_path / "run.log").read_text()
    assert warned is ("train.sink_size=7" in overrides)


@pytest.mark.slow
@pytest.mark.mlp
def test_time_to_first_step_counts_from_the_command_start(tiny: Compose, tmp_path: Path) -> None:
    times = run(tiny(), tmp_path, started_at=time.perf_counter() - 100).time
    assert 100 <= times["start_s"] < times["first_step_s"]
    assert times["first_dispatch_s"] < times["total_s"] < 100
    (line,) = [
        line for line in (tmp_path / "run.log").read_text().splitlines() if " time  " in line
    ]
    assert line.partition(" time       ")[2] == describe_start_up(times)


def test_start_up_line_has_its_parts_and_the_remainder() -> None:
    """Time that has no part of its own is named too: the parts add up."""
    times = {"start_s": 1.5, "data_s": 0.25, "compile_s": 0.75, "outlook_s": 45.0}
    assert describe_start_up({**times, "first_dispatch_s": 0.125, "first_step_s": 48.0}) == (
        "first step after 48.00 s: imports and recipe 1.50 s, data 0.25 s, build 0.00 s, "
        "first data 0.00 s, compile 0.75 s, sinks 0.00 s, outlook 45.00 s, first dispatch 0.12 s, "
        "other 0.38 s"
    )


@pytest.mark.slow
def test_run_without_steps_has_no_first_step_time(tiny: Compose, tmp_path: Path) -> None:
    times = run(tiny("stages=[data,build]"), tmp_path).time
    assert set(times) == {"start_s", "data_s", "build_s", "total_s"}
    assert " time  " not in (tmp_path / "run.log").read_text()


def test_non_finite_metric_is_valid_json(tmp_path: Path) -> None:
    summary = Summary("mine", "cpu", 1, ("data",), None)
    summary.metrics["loss"] = float("inf")
    summary.write(tmp_path)
    text = (tmp_path / "summary.json").read_text()
    assert "Infinity" not in text
    assert json.loads(text)["metrics"] == {"loss": None}


def test_summary_file_is_replaced_atomically(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("something else, and longer than what comes\n" * 100)
    Summary("mine", "cpu", 1, ("data",), None).write(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["recipe"] == "mine"
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_versions_of_numeric_packages_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    section = list_versions({"device": "cpu:0", "jax": "9"})
    assert section.keys() == {
        "python",
        "recipe-pipeline",
        "flax",
        "grain",
        "numpy",
        "optax",
        "pillow",
        "scipy",
        "device",
        "jax",
    }
    assert section["jax"] == "9"


def test_uninstalled_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("pipeline.stages.record.summary.version", missing)
    assert list_versions({})["recipe-pipeline"] == "not installed"
