"""Arenas of a small recipe, from the command to the table, the page and the logs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.core.files.atomic_write import LOCK, lock_file
from tests.conftest import MLP, TINY

Arena = Callable[..., int]
KEYS = ("+recipe=lenet5_digits", *TINY, *MLP, "train.steps=12")
SMALL = ("--trials", "2", "--seeds", "6")
PLUS_RATE = ("--key", "++train.optimizer.lr", "--values", "0.1,0.2")


@pytest.fixture
def arena(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arena:
    """Call the command on a small recipe in a folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> int:
        return main(["arena", *KEYS, f"cache.root={cache}", *SMALL, *words])

    return run


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--optimizers", "adamw"], "must be 2 to 6 values"),
        (["--optimizers", "adamw,adamv"], "did you mean adam?"),
        (["--optimizers", "adamw,sgd", "--baseline", "lion"], "must be one of adamw, sgd"),
        (["--key", "model.act"], "must be given together"),
        (["--values", "a,b"], "must be given together"),
        (["--key", "seed", "--values", "1,2", "--optimizers", "adamw,sgd"], "must not be given"),
        (["--workloads", "digit"], "did you mean digits?"),
        (["--workloads", "digits", "+recipe=lenet5_digits"], "must not be given with a recipe"),
        (["--metric", "loss"], "must be given with a recipe"),
        (["--metric", "train_loss", "+recipe=lenet5_digits"], "there is no such metric"),
        (["--search", "lr=1"], "must be KEY=LOW,HIGH"),
        (["--key", "name", "--values", "<b>,<i>"], "must be typed in quotes, as"),
        (["--key", "name", "--values", "a,"], "must be values with commas between them"),
        (["--key", "name", "--values", "interval(0,1)"], "must be values, not a range"),
        (["--seeds", "5"], "must be a whole number from 6"),
        (["+recipe=lenet5_digits", "seed=3"], "seed: is set by arena"),
        (["+recipe=lenet5_digits", "dataset.folds.index=1"], "is set by arena"),
        (["+recipe=lenet5_digits", "train.minutes=3"], "must be a length in steps"),
        (["+recipe=lenet5_digits", "optimizer=sgd"], "is what arena compares"),
        (["--key", "", "--values", "1,2"], "must be a key of the recipe"),
        (["--key", "++", "--values", "1,2"], "must be a key of the recipe"),
        (["--key", "", "--values", "foo,bar", "+recipe=lenet5_digits"], "must be a key"),
        (["--key", "seed", "--values", "1,2"], "--key seed: must be another key: arena sets it"),
        (["--key", "train.steps", "--values", "9,8"], "must be another key: arena sets it"),
        (["--key", "optimizer", "--values", "adamw,adamw"], "--values adamw,adamw: must be diff"),
        (["--key", "optimizer", "--values", "adamw,adamv"], "did you mean adam?"),
        (["--key", "++optimizer", "--values", "adamw,adamv"], "did you mean adam?"),
        (
            [*PLUS_RATE, "+recipe=lenet5_digits", "train.optimizer.lr=0.1"],
            "train.optimizer.lr: is what arena compares",
        ),
    ],
)
def test_wrong_words_are_refused(
    words: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["arena", *words]) == 2
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_range_with_a_wrong_end_is_refused_before_the_first_run(
    arena: Arena, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though the first trial, near the middle, is valid."""
    words = ("--optimizers", "adam,adamw", "--seed", "1", "--trials", "6", "--out", "mine")
    assert arena(*words, "--search", "train.optimizer.b1=0.5,1.6") == 2
    assert "train.optimizer.b1 = " in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()


@pytest.mark.slow
def test_arena_repeats_to_the_bit_and_continues(
    arena: Arena, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--optimizers", "momentum,lion")
    assert arena(*words, "--out", "one", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["contest"]["baseline"] == "momentum"
    assert [item["value"] for item in facts["workloads"][0]["standings"]] == ["momentum", "lion"]
    results = (tmp_path / "one" / "results.json").read_bytes()
    page = (tmp_path / "one" / "arena.html").read_text()
    assert "http" not in re.sub(r'http-equiv="', "", page)

    assert arena(*words, "--out", "two") == 0
    assert (tmp_path / "two" / "results.json").read_bytes() == results
    output = capsys.readouterr().out
    assert "sweep      6 jobs by one program" in output

    # A run that is missing, and one whose process was killed: only they are run again.
    folder = tmp_path / "two" / "lenet5_digits" / "1_lion"
    seeds = sorted(folder.glob("trial_*_seed_*"))
    for run in seeds[:2]:
        (run / "summary.json").unlink()
    done_at = {run.name: (run / "summary.json").stat().st_mtime_ns for run in seeds[2:]}
    (tmp_path / "two" / "results.json").unlink()
    assert arena(*words, "--out", "two") == 0
    assert {run.name: (run / "summary.json").stat().st_mtime_ns for run in seeds[2:]} == done_at
    assert (tmp_path / "two" / "results.json").read_bytes() == results

    # More trials keep the first ones; another baseline is another arena.
    assert arena(*words, "--out", "two", "--trials", "3") == 0
    assert arena(*words, "--out", "two", "--baseline", "lion") == 1
    assert "has another arena: its baseline is" in capsys.readouterr().err


@pytest.mark.slow
def test_value_that_diverges_at_every_rate_stays_in_the_table(
    arena: Arena, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    searches = ("--search", "sgd:train.optimizer.lr=1e30,1e35")
    assert arena("--optimizers", "adam,sgd", *searches, "--out", "mine") == 0
    output = capsys.readouterr().out
    assert "diverges in" in output
    results = json.loads((tmp_path / "mine" / "results.json").read_text())
    sgd = results["workloads"][0]["standings"][1]
    assert (sgd["verdict"], sgd["diverged_trials"], sgd["mean"]) == ("diverged", 2, None)
    assert not list((tmp_path / "mine" / "lenet5_digits" / "1_sgd").glob("*seed*"))
    # Diverged runs are results, not failures to repeat.
    trial = tmp_path / "mine" / "lenet5_digits" / "1_sgd" / "trial_0" / "summary.json"
    written_at = trial.stat().st_mtime_ns
    assert arena("--optimizers", "adam,sgd", *searches, "--out", "mine") == 0
    assert trial.stat().st_mtime_ns == written_at


@pytest.mark.slow
def test_planted_handicap_of_a_rate_is_found(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate that is far too low is worse; a compared rate is trained as it is."""
    monkeypatch.chdir(tmp_path)
    keys = [key for key in KEYS if not key.startswith("train.optimizer.lr=")]
    words = ["--key", "train.optimizer.lr", "--values", "0.02,0.00002", "--metric", "loss"]
    assert main(["arena", *keys, f"cache.root={cache}", *SMALL, *words, "--out", "mine"]) == 0
    (workload,) = json.loads((tmp_path / "mine" / "results.json").read_text())["workloads"]
    assert [item["verdict"] for item in workload["standings"]] == ["baseline", "worse"]
    assert [item["num_trials"] for item in workload["standings"]] == [0, 0]


@pytest.mark.slow
def test_hostile_values_are_text_on_the_page(arena: Arena, tmp_path: Path) -> None:
    values = """'<b>x</b>','"><script>alert(1)</script>'"""
    words = ("--key", "checkpoint.directory", "--values", values, "--out", "mine")
    assert arena(*words, "--baseline", "'<b>x</b>'") == 0
    page = (tmp_path / "mine" / "arena.html").read_text()
    assert "&lt;b&gt;x&lt;/b&gt;" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<b>x" not in page
    assert "<script>alert" not in page
    assert '""><' not in page


@pytest.mark.slow
def test_metric_that_the_runs_lack_is_named(
    arena: Arena, capsys: pytest.CaptureFixture[str]
) -> None:
    assert arena("--optimizers", "adam,sgd", "--metric", "rmse", "--out", "mine") == 1
    assert "its evaluations have no rmse; they have accuracy," in capsys.readouterr().err


@pytest.mark.slow
def test_killed_arena_continues(cache: Path, tmp_path: Path) -> None:
    words = [*KEYS, f"cache.root={cache}", *SMALL, "--optimizers", "adam,sgd", "--out", "mine"]
    command = [sys.executable, "-m", "pipeline", "arena", *words]
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    environment = {**os.environ, **paths}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob("mine/*/*/trial_*_seed_*/run.log")):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "mine" / "results.json").exists()
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == 0
    words[-1] = "whole"
    again = subprocess.run(
        [*command[:4], *words], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL
    )
    assert again.returncode == 0
    results = [(tmp_path / name / "results.json").read_bytes() for name in ("mine", "whole")]
    assert results[0] == results[1]


@pytest.mark.slow
def test_second_arena_in_a_folder_is_refused(
    arena: Arena, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    with lock_file(tmp_path / "mine" / LOCK, wait=False):
        assert arena("--optimizers", "adam,sgd", "--out", "mine") == 1
    assert "another arena runs in it" in capsys.readouterr().err


@pytest.mark.slow
def test_folder_of_something_else_is_refused(
    arena: Arena, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    assert arena("--optimizers", "adam,sgd", "--out", "mine") == 1
    assert "has other files (thesis.tex)" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    assert arena("--optimizers", "adam,sgd", "--out", "link") == 2
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
