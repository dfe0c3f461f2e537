"""F-04: the recorded trace of a run is parsed after it, into the same files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from pipeline.__main__ import main
from pipeline.config.recipe import Recipe
from pipeline.inspect.profiler.profile_files import (
    RAW,
    RECORD,
    XSPACE,
    ProfileRecord,
    ProfileReport,
    read_report,
)
from tests.conftest import MLP, compose_tiny
from tests.whole_run import run

pytestmark = pytest.mark.slow

Compose = Callable[..., Recipe]
FILES = ("profile.json", "table.txt", "trace.json", "picture.svg")


@pytest.fixture(scope="module")
def profiled(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was profiled while it trained."""
    run_dir = tmp_path_factory.mktemp("profiled")
    run(compose_tiny(cache, *MLP, "train.steps=90", "profile.mode=on"), run_dir)
    return run_dir


@pytest.mark.parametrize("names_folder", [False, True], ids=["run", "folder"])
def test_recorded_trace_is_parsed_into_the_same_files(
    profiled: Path, tmp_path: Path, capsys: Any, names_folder: bool
) -> None:
    copied = Path(shutil.copytree(profiled, tmp_path / "run"))
    folder = copied / "profile"
    for name in FILES:
        (folder / name).unlink()
    assert main(["profile", str(folder if names_folder else copied)]) == 0
    assert "Verdict: " in capsys.readouterr().out
    for name in FILES:
        assert (folder / name).read_bytes() == (profiled / "profile" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (RECORD, b"{}", "isn't a record"),
        (RECORD, b"\xff", "isn't a record"),
        (XSPACE, b"no profile", "isn't a recorded trace"),
    ],
    ids=["empty", "binary", "trace"],
)
def test_damaged_record_is_reported(
    profiled: Path, tmp_path: Path, capsys: Any, name: str, content: bytes, message: str
) -> None:
    copied = Path(shutil.copytree(profiled, tmp_path / "run"))
    (copied / "profile" / RAW / name).write_bytes(content)
    assert main(["profile", str(copied)]) != 0
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_times_of_a_loaded_machine_are_doubtful(profiled: Path, tmp_path: Path) -> None:
    """Untraced steps that take longer than traced ones aren't a fact about the step."""
    folder = Path(shutil.copytree(profiled / "profile", tmp_path / "profile"))
    adapter = TypeAdapter(ProfileRecord)
    record = adapter.validate_json((folder / RAW / RECORD).read_bytes())

    def read(foreign_cores: float, untraced_ms: float) -> ProfileReport:
        dispatches = tuple(
            replace(item, end_s=item.begin_s + item.steps * untraced_ms / 1000, wait_s=0.0)
            if not item.traced
            else item
            for item in record.run.dispatches
        )
        run = replace(record.run, dispatches=dispatches, foreign_cores=foreign_cores, processors=2)
        (folder / RAW / RECORD).write_bytes(adapter.dump_json(replace(record, run=run)))
        return read_report(folder)

    iteration = read(0.3, 1).profiles[0].iteration
    assert iteration is not None
    quiet = read(0.3, iteration.iteration)
    assert quiet.profiles[0].doubts == ()
    assert "doubtful" not in str(quiet)
    loaded = read(1.3, 4 * iteration.iteration)
    profile = loaded.profiles[0]
    # The untraced steps, four times as long, scale no times.
    assert sum(phase.ms for phase in profile.phases) < 2 * iteration.iteration
    assert "other programs used 1.3 of 2 cores" in profile.doubts[0]
    assert "though a trace makes them longer" in profile.doubts[1]
    assert str(loaded).count("\n  doubtful   ") == 2
    assert str(loaded).endswith("; doubtful, as said above")


@pytest.mark.medium
def test_steps_of_a_done_run_are_profiled_from_its_state(
    profiled: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """In a fork that ends early, whose losses are the run's."""
    monkeypatch.chdir(tmp_path)
    keys = [f"cache.root={cache}", "profile.steps=20"]
    assert main(["profile", f"{profiled}@25", *keys]) == 0
    assert "Verdict: " in capsys.readouterr().out
    (folder,) = tmp_path.glob("outputs/*/*_fork")
    assert (folder / "profile" / "profile.json").is_file()
    logs = [(path / "metrics.jsonl").read_text().splitlines() for path in (folder, profiled)]
    losses = [[json.loads(line)["loss"] for line in lines] for lines in logs]
    assert losses[0] == losses[1]
    assert main(["profile", f"{profiled}@31"]) == 2
    assert "step 31: must be from 0 to 30, 60 before the last step" in capsys.readouterr().err


def test_run_without_a_record_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert main(["profile", str(tmp_path)]) == 2
    assert "has no recorded trace, profile/raw" in capsys.readouterr().err


def test_recorded_run_with_overrides_is_refused(profiled: Path, capsys: Any) -> None:
    assert main(["profile", str(profiled), "train.steps=3"]) == 2
    assert "must be left out" in capsys.readouterr().err
