"""The self-test of an installation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.cli import self_test
from pipeline.cli.self_test import COMMANDS, STEPS, run_self_test


@pytest.mark.slow
def test_all_parts_work_and_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--self-test", "--details"]) == 0
    lines = capsys.readouterr().out.splitlines()
    works = [line.split()[1] for line in lines if line.endswith(" it works")]
    assert works == list(COMMANDS)


@pytest.mark.slow
def test_command_that_fails_is_a_failed_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "COMMANDS", {"train": ("train.steps=-1",)})
    assert main(["doctor", "--self-test"]) == 1
    assert "fail  train        status 2: " in capsys.readouterr().out


def test_other_losses_are_named_by_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "COMMANDS", {"sinks": ("--version",)})
    for name, last in (("run", 0.25), ("short", 0.5)):
        losses = [*(1 / step for step in range(1, STEPS)), last]
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps({"loss": loss}) + "\n" for loss in losses)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    ((name, problem),) = run_self_test(tmp_path)
    assert (name, problem) == (
        "sinks",
        "step 60 has the loss 0.25 in sinks of 20, and 0.5 in sinks of 7",
    )
    (tmp_path / "short/metrics.jsonl").write_text(lines * 2)
    ((_, problem),) = run_self_test(tmp_path)
    assert problem == "60 and 120 steps were logged instead of 60"


def test_command_without_an_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "COMMANDS", {"train": ()})
    monkeypatch.setattr(self_test, "LIMIT_S", 0.01)
    assert list(run_self_test(tmp_path)) == [("train", "it has run for 0.01 s")]
