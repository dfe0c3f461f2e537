"""The benchmark of streamed batches: that it streams, what it takes from a run, and the table."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from benchmarks import streamed_batches
from benchmarks.streamed_batches import LoaderCost, read_cost
from pipeline import run
from pipeline.config.recipe import Recipe
from pipeline.stages.record.summary import Summary

NETWORK = "lenet5_digits model=mlp model.hidden=[4] train.batch_size=4 monitor.tensorboard=false"


def summary(wait_ms_per_step: float | None) -> Summary:
    return Summary(
        "r",
        "cpu",
        1,
        ("train",),
        None,
        steps=3000,
        time={"median_step_ms": 2.0},
        feed={
            "wait_ms_per_step": wait_ms_per_step,
            "queue_depth": 0.75,
            "prepare_ms_per_step": {"image": 0.02, "label": 0.01, "order": 0.0, "transfer": 0.01},
        },
    )


def test_loader_wait_is_a_share_of_the_step() -> None:
    cost = read_cost("r", summary(0.01))
    assert cost == LoaderCost(step_ms=2.0, prepare_ms=0.04, wait_ms=0.01, ready=0.75)
    assert math.isclose(cost.wait_share, 0.005)


def test_run_of_one_window_reports_nothing() -> None:
    with pytest.raises(SystemExit, match="r: 3000 steps fit into one window; more are needed"):
        read_cost("r", summary(None))


@pytest.mark.slow
def test_run_streams_and_is_described_by_its_summary(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Summary] = []

    def listen(recipe: Recipe, run_dir: Path) -> Summary:
        done.append(run(recipe, run_dir))
        return done[-1]

    monkeypatch.setattr(streamed_batches, "run", listen)
    contestant = f"{NETWORK} cache.root={cache} train.steps=2060"
    monkeypatch.setattr(sys, "argv", ["streamed_batches", "--steps=9", "--rounds=1", contestant])
    assert streamed_batches.main() == 0
    (one,) = done
    assert (one.steps, one.feed["kind"]) == (2060, "stream")
    cost = read_cost(contestant, one)
    said = capsys.readouterr().out
    assert f"python -m benchmarks.streamed_batches --steps 9 --rounds 1 '{contestant}'\n" in said
    assert f"| {contestant} | {cost.step_ms:.3f} | {cost.prepare_ms:.4f} | " in said
    assert f" | {cost.wait_share:.3%} | " in said


def test_wrong_root_error_has_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["streamed_batches", "--root=/nowhere"])
    assert streamed_batches.main() == 1
    assert capsys.readouterr().err.startswith("benchmarks.streamed_batches: ")


def test_rows_are_medians_over_the_rounds() -> None:
    runs = [
        LoaderCost(2.0, 0.05, 0.001, 1.0),
        LoaderCost(4.0, 0.07, 0.004, 0.5),
        LoaderCost(3.0, 0.06, 0.009, 1.0),
    ]
    text = streamed_batches.report("--steps 4096 --rounds 3", {"a": runs})
    assert "| a | 3.000 | 0.0600 | 4.00 | 0.100% | 0.050% to 0.300% | 100% |" in text
