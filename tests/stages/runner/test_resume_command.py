from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import load_recipe
from pipeline.__main__ import main
from pipeline.backends.xla import XlaExecutable
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.stages.runner.resume_command import (
    make_resume_overrides,
    make_resume_run_command,
    make_resume_sweep_command,
)
from tests.conftest import MLP, STEPS, TINY
from tests.whole_run import run

Compose = Callable[..., Recipe]
PYTHON = ["python", "-m", "pipeline"]


NAMES = """
outputs/2026-11-21/14-46-29_lenet5 run 1 1/2 auto null true 1e5 ~r -m a'b a\\ $HOME a=b,c [a] {a:1}
#a ä/ö a;b&c ( % "
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES.split(), "a b", "{a: 1}"])
def test_path_in_the_resume_command_round_trips(name: str) -> None:
    """Through a shell, Hydra and the check of the recipe."""
    words = shlex.split(make_resume_run_command(["seed=2"], Path(name), None))
    assert words[:-1] == [*PYTHON, "seed=2"]
    resume = load_recipe("lenet5_digits", words[3:]).train.resume
    assert resume is not None
    assert resume != "auto"
    assert Path(resume) == Path(name)


def test_facts_of_another_origin_are_omitted() -> None:
    typed = ["train.resume=auto", "+a=1", "hydra.run.dir=b", "checkpoint.restore=c", "model=mlp"]
    said = shlex.split(make_resume_run_command(typed, Path("d/e"), Path("c")))
    assert said == [*PYTHON, "+a=1", "model=mlp", "train.resume=d/e", "checkpoint.restore=null"]
    # A recipe may name the weights, against which the null was typed.
    again = make_resume_run_command(["checkpoint.restore=null"], Path("d/e"), None)
    assert shlex.split(again) == [*PYTHON, "checkpoint.restore=null", "train.resume=d/e"]
    assert (
        make_resume_overrides(Path("d/e"), Path("c")) == "train.resume=d/e checkpoint.restore=null"
    )


def test_resume_command_has_the_program_as_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    for typed, words in (
        (["python3", "-P", "-m", "pipeline", "seed=2"], ["python3", "-P", "-m", "pipeline"]),
        (["/my venv/python", "/bin/pipeline", "seed=2"], ["/my venv/python", "/bin/pipeline"]),
        (["pytest"], PYTHON),
        (["python", "mine.py", "seed=2"], ["python", "mine.py"]),
        (["pipeline", "former.key=2"], ["pipeline"]),
        (["pipeline", "fork", "run@3", "--plugin", "mine.py"], [*PYTHON, "--plugin", "mine.py"]),
    ):
        monkeypatch.setattr(sys, "orig_argv", typed)
        said = shlex.split(make_resume_run_command(["seed=2"], Path("d/e"), None))
        assert said == [*words, "seed=2", "train.resume=d/e"]
    monkeypatch.setattr(sys, "orig_argv", ["pipeline"])
    assert shlex.split(make_resume_run_command([], Path("d/e"), None)) == [
        "pipeline",
        "train.resume=d/e",
    ]
    monkeypatch.setattr(sys, "orig_argv", ["python", "mine.py"])
    assert shlex.split(make_resume_run_command([], Path("d/e"), None)) == [
        *PYTHON,
        "train.resume=d/e",
    ]


def end_at(monkeypatch: pytest.MonkeyPatch, step: int, end: Callable[[], Any]) -> None:
    """Call something behind the first dispatch that reaches a step, once."""
    original, left = XlaExecutable.run, [end]

    def go(self: XlaExecutable, state: Any, start: int, stop: int, *more: Any) -> Any:
        given = original(self, state, start, stop, *more)
        if stop >= step and left:
            left.pop()()
        return given

    monkeypatch.setattr(XlaExecutable, "run", go)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def break_down() -> None:
    raise RunError("the device is gone")


def resume_line(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The words of the one line that says how to go on; none where there is none."""
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resume  ")]
    assert len(lines) <= 1
    return shlex.split(lines[0])[1:] if lines else []


@pytest.mark.slow
@pytest.mark.parametrize("end", [terminate, break_down])
@pytest.mark.parametrize("sweep", [False, True], ids=["run", "sweep"])
def test_printed_command_resumes_the_run(
    end: Callable[[], Any],
    sweep: bool,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    end_at(monkeypatch, 30, end)
    where = ["-m", "seed=1"] if sweep else ["hydra.run.dir='my run'"]
    typed = [*TINY, *MLP, STEPS, f"cache.root={cache}", "checkpoint.every_steps=10", *where]
    assert main(typed) == (75 if end is terminate else 1)
    words = resume_line(capsys)
    assert words[:3] == PYTHON
    assert main(words[3:]) == 0
    (run_dir,) = tmp_path.glob("outputs/*/*/0") if sweep else [tmp_path / "my run"]
    log = (run_dir / "run.log").read_text()
    assert f"from step {30 if end is terminate else 20}" in log
    assert len(list(tmp_path.glob("outputs/*/*"))) == sweep


@pytest.mark.slow
@pytest.mark.mlp
def test_resume_hint_is_an_override_in_python(
    tiny: Compose,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    end_at(monkeypatch, 20, terminate)
    assert run(tiny(), tmp_path / "run").status == "stopped"
    (override,) = resume_line(capsys)
    assert run(tiny(override)).status == "done"
    assert resume_line(capsys)[0] == str(tmp_path / "run"), "where it went on from"


@pytest.mark.slow
@pytest.mark.mlp
@pytest.mark.parametrize(
    ("end", "overrides"),
    [
        (lambda: None, []),
        (break_down, []),
        (terminate, ["stages=[data,build,compile,train]"]),
    ],
    ids=["done", "failed with nothing saved", "nothing to save"],
)
def test_resume_is_not_offered_without_a_checkpoint(
    end: Callable[[], Any],
    overrides: list[str],
    tiny: Compose,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    end_at(monkeypatch, 20, end)
    try:
        run(tiny(*overrides), tmp_path / "run")
    except RunError:
        assert end is break_down
    assert resume_line(capsys) == []


def test_sweep_continues_in_its_directory() -> None:
    typed = ["-m", "seed=1,2", "hydra.sweep.dir=x", "train.resume=auto"]
    said = shlex.split(make_resume_sweep_command(typed, Path("x y")))
    assert said == [*PYTHON, "-m", "seed=1,2", "hydra.sweep.dir='./x y'"]
