"""Comparisons of two sides, from the command to the verdict."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.cli import train
from pipeline.cli.better import describe_sides
from pipeline.cli.better import main as compare_sides
from pipeline.cli.commands.root import ROOT
from pipeline.core.errors import UsageError
from pipeline.core.files.safe_yaml import read_yaml
from pipeline.study.sweep.jobs import Job
from tests import outcome
from tests.conftest import MLP, TINY
from tests.forked import start_forked

Better = Callable[..., int]
LENGTH = ("train.steps=12", "eval.every_epochs=null")


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
def test_learning_side_beats_side_without_learning(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["+recipe=lenet5_digits", "model=mlp", "model.hidden=[16]", "train.epochs=1"]
    words += ["eval.every_epochs=null", "monitor.tensorboard=false", f"cache.root={cache}"]
    words += ["train.optimizer.lr=0.000001", "hydra.sweep.dir=mine", "--metric", "train_loss"]
    words += ["--out", "page.html"]

    def compare(rate: float) -> int:
        return main(["better", *words, "--json", "--", f"train.optimizer.lr={rate}"])

    assert compare(0.04) == 0
    output = capsys.readouterr()
    facts = json.loads(output.out)
    assert facts["better"] == "B"
    assert facts["low"] <= facts["difference"] <= facts["high"] < 0
    assert f"B is better by {-facts['difference']:.2g} in train_loss (95 %:" in output.err
    assert "12 jobs by one program" in output.err
    assert facts["sweep"] == "mine"

    page = (tmp_path / "page.html").read_text()
    assert f"{facts['verdict']}." in page
    assert f"<dd>{facts['difference']:.3g}</dd>" in page
    assert "Side B also has train.optimizer.lr=0.04." in page
    contrast = "A has train.optimizer.lr=1e-06; B has train.optimizer.lr=0.04"
    assert f"<p>{contrast}. Result: " in page
    assert contrast in output.err.splitlines()[:3]

    sweep = tmp_path / "mine"
    differences = []
    for pair in range(facts["pairs"]):
        sides = [outcome.read_summary(sweep / str(2 * pair + side)) for side in (0, 1)]
        assert {summary["seed"] for summary in sides} == {1 + pair}
        losses = [summary["metrics"]["train_loss"] for summary in sides]
        differences.append(losses[1] - losses[0])
    assert facts["difference"] == pytest.approx(sum(differences) / len(differences))

    before = summaries(sweep)
    assert compare(0.04) == 0
    assert json.loads(capsys.readouterr().out) == facts, "the command again runs nothing"
    assert summaries(sweep) == before
    assert compare(0.05) == 1
    assert "mine: has another sweep: job 1: train.optimizer.lr" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("change", ["train.sink_size=5", "device=ascend910"])
def test_equivalent_change_has_zero_difference(
    better: Better, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert better("hydra.sweep.dir=mine", "--", change) == 0
    assert "the difference is exactly 0 in all metrics after 6 pairs: keep A" in (
        capsys.readouterr().out
    )


@pytest.mark.slow
def test_component_of_side_b_does_not_change_side_a(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that the command names drops the recipe's section, on side B alone."""
    monkeypatch.chdir(tmp_path)
    recipe = "defaults: [lenet5_digits]\nmodel: {init: {dense: zeros}}\n"
    (tmp_path / "mine.yaml").write_text(f"# @package _global_\n{recipe}")
    keys = ["+recipe=mine.yaml", *TINY, *LENGTH, f"cache.root={cache}"]
    words = ["--pairs", "6", "hydra.sweep.dir=mine", "--", "model=mlp", "model.hidden=[4]"]
    words.append("name=${model.name}_b")
    assert main(["better", *keys, *words]) == 0
    recipes = [read_yaml(tmp_path / "mine" / str(job) / "recipe.yaml") for job in (0, 1)]
    assert [recipe["name"] for recipe in recipes] == ["mine", "mlp_b"]
    assert [recipe["model"]["name"] for recipe in recipes] == ["lenet5", "mlp"]
    rules = [recipe["model"]["init"]["dense"]["name"] for recipe in recipes]
    assert rules == ["zeros", "he_uniform"]


@pytest.mark.slow
def test_failed_side_has_no_verdict(
    better: Better, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert better("hydra.sweep.dir=mine", "--", "train.optimizer.lr=1e38") == 1
    output = capsys.readouterr()
    assert "no verdict: job 1 (side B, seed 1) failed: " in output.out
    assert "better" in output.out.splitlines()[-1], "the command that resumes it"
    assert "hydra.sweep.dir=./mine -- train.optimizer.lr=1e38" in output.out


@pytest.mark.slow
def test_time_limit_stops_before_an_unfinishable_pair(
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
def test_killed_comparison_resumes_and_is_shared_by_processes(
    better: Better, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--json", "--", "train.optimizer.momentum=0.5", "--pairs", "6"]
    assert better("hydra.sweep.dir=whole", *words) == 0
    expected = json.loads(capsys.readouterr().out)
    for pair in range(6):
        logs = [tmp_path / "whole" / str(2 * pair + side) / "metrics.jsonl" for side in (0, 1)]
        first = [json.loads(log.read_text().splitlines()[0])["loss"] for log in logs]
        assert first[0] == first[1], "the same weights and batch"
    keys = ["+recipe=lenet5_digits", *TINY, *MLP, *LENGTH, f"cache.root={cache}"]
    command = ["better", *keys, "hydra.sweep.dir=mine", *words]

    def start(name: str) -> ForkServerProcess:
        streams = [tmp_path / f"{name}.{stream}" for stream in ("out", "err")]
        return start_forked(command, tmp_path, os.environ, streams)

    killed = start("killed")
    while killed.is_alive() and not summaries(tmp_path / "mine"):
        time.sleep(0.02)
    assert killed.is_alive()
    killed.kill()
    killed.join()
    other = start("other")
    assert better("hydra.sweep.dir=mine", *words) == 0
    other.join(100)
    assert other.exitcode == 0
    for printed in (capsys.readouterr().out, (tmp_path / "other.out").read_text()):
        assert {**json.loads(printed), "sweep": "whole"} == expected


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ([], "must be followed by -- and the keys of side B"),
        (["--"], "must be followed by -- and the keys of side B"),
        (["--", "hydra.sweep.dir=x"], "hydra.sweep.dir=x: is about both sides; must be typed be"),
        (["--", "train.resume=auto"], "train.resume=auto: is about both sides"),
        (["--", "train.steps=3", "--pairs", "8", "hydra.sweep.dir=x"], "about both sides"),
        (["--", "train.steps=3", "--", "train.steps=4"], "must have -- once: there are two sides"),
        (["--metric", "acuracy", "--", "train.steps=3"], "--metric acuracy"),
        (["--out", "none/a.html", "--", "train.steps=3"], "--out none/a.html: must be a file in a"),
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


@pytest.mark.medium
def test_keys_between_options_belong_to_side_b(
    better: Better, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        better("--", "train.batch_size=4", "--pairs", "8", "seed=2", "--json", "eval.samples=9")
        == 2
    )
    message = capsys.readouterr().err
    assert "seed = 2: was 1 on side A" in message
    assert "eval.samples = 9: was all on side A" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.medium
def test_wrong_side_starts_no_run(
    better: Better, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert better("--", "seed=2") == 2
    assert "seed = 2: was 1 on side A; must be equal" in capsys.readouterr().err
    assert better("--", "train.optimiser.lr=1") == 2
    assert "train.optimiser" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_signal_before_the_first_job_stops_the_sweep(
    better: Better, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_hydra = train._run_hydra

    def interrupt(flags: list[str], typed: list[str], overrides: list[str], task: object) -> None:
        if isinstance(task, Job):
            raise KeyboardInterrupt
        run_hydra(flags, typed, overrides, task)  # type: ignore[arg-type]

    monkeypatch.setattr(train, "_run_hydra", interrupt)
    assert better("hydra.sweep.dir=mine", "--json", "--", "train.batch_size=4") == 75
    output = capsys.readouterr()
    assert json.loads(output.out)["verdict"] == "no verdict: no pair is done"
    assert "has no job" not in output.err


def test_page_shows_no_part_of_a_secret_value() -> None:
    """Values may have spaces, which separate words in a sentence, and characters of HTML."""
    secrets = ["++a.password=correct horse", "++a.token=hunter&two,three"]
    text = describe_sides(["+recipe=lenet5_digits", secrets[0]], secrets[1:])
    assert "+recipe=lenet5_digits" in text
    for part in ("correct", "horse", "hunter", "two", "three"):
        assert part not in text
