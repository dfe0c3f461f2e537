"""Comparisons of two sides, from the command to the verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.cli.better import main as compare_sides
from pipeline.cli.commands.root import ROOT
from pipeline.core.errors import UsageError
from tests import outcome
from tests.conftest import MLP, TINY

Better = Callable[..., int]
LENGTH = ("train.steps=12", "eval.every_passes=null")


@pytest.fixture
def better(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Better:
    """Call the command in a folder, with words before and after `--`."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> int:
        keys = ["+recipe=lenet5_digits", *TINY, *MLP, *LENGTH, f"cache.root={cache}"]
        return main(["better", *keys, *words])

    return run


def summaries(sweep: Path) -> dict[str, bytes]:
    return {file.parent.name: file.read_bytes() for file in sweep.glob("*/summary.json")}


@pytest.mark.slow
def test_a_side_that_learns_is_better_than_one_that_does_not(
    better: Better, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--json", "--metric", "train_loss", "train.optimizer.lr=0.000001")
    assert better(*words, "hydra.sweep.dir=mine", "--", "train.optimizer.lr=0.2") == 0
    output = capsys.readouterr()
    facts = json.loads(output.out)
    assert facts["better"] == "B"
    assert facts["low"] <= facts["difference"] <= facts["high"] < 0
    assert f"B is better by {-facts['difference']:.2g} in train_loss (95 %:" in output.err
    assert "12 jobs by one program" in output.err
    assert facts["sweep"] == "mine"

    sweep = tmp_path / "mine"
    differences = []
    for pair in range(facts["pairs"]):
        sides = [outcome.read_summary(sweep / str(2 * pair + side)) for side in (0, 1)]
        assert {summary["seed"] for summary in sides} == {1 + pair}
        losses = [summary["metrics"]["train_loss"] for summary in sides]
        differences.append(losses[1] - losses[0])
    assert facts["difference"] == pytest.approx(sum(differences) / len(differences))

    before = summaries(sweep)
    assert better(*words, "hydra.sweep.dir=mine", "--", "train.optimizer.lr=0.2") == 0
    assert json.loads(capsys.readouterr().out) == facts, "the command again runs nothing"
    assert summaries(sweep) == before
    assert better(*words, "hydra.sweep.dir=mine", "--", "train.optimizer.lr=0.3") == 1
    assert "mine: has another sweep: job 1: train.optimizer.lr" in capsys.readouterr().err


@pytest.mark.slow
def test_a_pair_starts_with_the_same_weights_and_order(better: Better, tmp_path: Path) -> None:
    """The first loss is before any update, of the first batch."""
    assert better("hydra.sweep.dir=mine", "--pairs", "6", "--", "train.optimizer.lr=0.2") == 0
    for pair in range(6):
        first = [
            json.loads((tmp_path / "mine" / str(job) / "metrics.jsonl").read_text().splitlines()[0])
            for job in (2 * pair, 2 * pair + 1)
        ]
        assert first[0]["loss"] == first[1]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["train.sink_size=5", "device=ascend910", "train.feed=stream"])
def test_what_changes_no_bit_differs_by_exactly_zero(
    better: Better, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert better("hydra.sweep.dir=mine", "--", change) == 0
    assert "the difference is exactly 0 in all metrics after 6 pairs: keep A" in (
        capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_component_of_side_b_leaves_the_recipe_of_side_a(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe has rules of initialisation, which a network that the command names drops."""
    monkeypatch.chdir(tmp_path)
    keys = ["+recipe=lenet5_digits", *TINY, *LENGTH, f"cache.root={cache}"]
    words = ["--pairs", "6", "hydra.sweep.dir=mine", "--", "model=mlp", "model.hidden=[4]"]
    assert main(["better", *keys, *words]) == 0
    recipes = [(tmp_path / "mine" / str(job) / "recipe.yaml").read_text() for job in (0, 1)]
    assert "conv: he_normal" in recipes[0]
    assert "name: lenet5\n" in recipes[0]
    assert "name: mlp\n" in recipes[1]
    assert "he_normal" not in recipes[1]


@pytest.mark.slow
def test_a_side_that_fails_has_no_verdict(
    better: Better, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert better("hydra.sweep.dir=mine", "--", "train.optimizer.lr=1e38") == 1
    output = capsys.readouterr()
    assert "no verdict: job 1 (side B, seed 1) failed: Invalid loss" in output.out
    assert "better" in output.out.splitlines()[-1], "the command that resumes it"
    assert "hydra.sweep.dir=./mine -- train.optimizer.lr=1e38" in output.out


@pytest.mark.slow
def test_little_time_stops_before_a_pair_that_would_not_end(
    better: Better, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["+recipe=lenet5_digits", *TINY, *MLP, *LENGTH, f"cache.root={cache}"]
    keys.append("hydra.sweep.dir=mine")
    result = compare_sides(keys, None, 16, 0.001, ["train.batch_size=8"])
    output = capsys.readouterr().out
    assert result.exit_status == 0
    assert "no time for another pair" in output
    assert f"{result.facts['verdict']}\n" in output
    assert "it takes at least 6" in result.facts["verdict"]
    assert better("hydra.sweep.dir=mine", "--pairs", "6", "--", "train.batch_size=8") == 0
    assert "after 6 pairs" in capsys.readouterr().out, "without a limit it goes on"


@pytest.mark.slow
def test_a_killed_comparison_goes_on_and_two_share_one(
    better: Better, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--json", "--", "train.optimizer.momentum=0.5", "--pairs", "8"]
    assert better("hydra.sweep.dir=whole", *words) == 0
    expected = json.loads(capsys.readouterr().out)
    keys = ["+recipe=lenet5_digits", *TINY, *MLP, *LENGTH, f"cache.root={cache}"]
    command = [sys.executable, "-m", "pipeline", "better", *keys, "hydra.sweep.dir=mine", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )

    killed = start()
    while killed.poll() is None and not summaries(tmp_path / "mine"):
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    both = [start(), start()]
    results = [json.loads(process.communicate(timeout=100)[0]) for process in both]
    for facts in results:
        assert {**facts, "sweep": "whole"} == expected


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ([], "must be followed by -- and the keys of side B"),
        (["--"], "must be followed by -- and the keys of side B"),
        (["--", "hydra.sweep.dir=x"], "hydra.sweep.dir=x: is about both sides; must be typed be"),
        (["--", "train.resume=auto"], "train.resume=auto: is about both sides"),
        (["--metric", "acuracy", "--", "train.steps=3"], "--metric acuracy"),
        (["--pairs", "5", "--", "train.steps=3"], "--pairs 5: must be a whole number from 6"),
        (
            ["--minutes", "0", "--", "train.steps=3"],
            "--minutes 0: must be a whole number from 1",
        ),
    ],
)
def test_wrong_arguments_are_refused(words: list[str], rule: str) -> None:
    with pytest.raises(UsageError) as error:
        ROOT(["better", "+recipe=lenet5_digits", *words])
    assert rule in str(error.value)


def test_a_wrong_side_starts_nothing(
    better: Better, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert better("--", "seed=2") == 2
    assert "seed = 2: was 1 on side A; must be equal" in capsys.readouterr().err
    assert better("--", "train.optimiser.lr=1") == 2
    assert "train.optimiser" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
