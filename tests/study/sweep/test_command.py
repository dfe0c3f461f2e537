from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.study.sweep.command import Command, Sweeper, find_sweep, read_command, write_command

PLAIN = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8)
LIKE_NUMBERS = st.sampled_from(["1e-3", "2026-11-21", "1_0", "0x1", "~", "1:30", ".5", "null"])


@pytest.mark.slow
@given(st.lists(st.text(max_size=9)), st.dictionaries(st.text(max_size=5), PLAIN | LIKE_NUMBERS))
def test_command_round_trips(
    tmp_path_factory: pytest.TempPathFactory, overrides: list[str], settings: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("sweep")
    others = {key: value for key, value in settings.items() if key.isidentifier()}
    kept = Command(overrides=tuple(overrides), sweeper=Sweeper(**{**others, "name": "grid"}))
    write_command(folder, kept)
    assert read_command(folder) == kept


def command(*overrides: str, **sweeper: Any) -> Command:
    return Command(overrides=overrides, sweeper=Sweeper(**sweeper))


def test_newest_sweep_of_the_command_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with the others."""
    monkeypatch.chdir(tmp_path)
    grid, study = command("seed=1,2", name="grid"), command("seed=1,2", name="optuna")
    params = command(name="grid", params={"seed": "1,2"})
    for number, kept in enumerate((grid, study, params, grid)):
        folder = tmp_path / "outputs" / "day" / str(number)
        folder.mkdir(parents=True)
        write_command(folder, kept)
        os.utime(folder / "sweep.yaml", (number, number))
    for name, content in (("old", "overrides: ['seed=1,2']"), ("broken", "[")):
        folder = tmp_path / "outputs" / "day" / name
        folder.mkdir()
        (folder / "sweep.yaml").write_text(content)
    found = [find_sweep(asked) for asked in (grid, study, params)]
    assert [folder and folder.name for folder in found] == ["3", "1", "2"]
    assert find_sweep(command("seed=1,2", name="optuna", metric="loss")) is None


def test_extended_sweep_is_recognised_by_its_new_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("outputs", "day", "sweep")
    folder.mkdir(parents=True)
    for seeds in ("seed=1,2", "seed=1,2,3"):
        write_command(folder, command(seeds, name="grid"))
        assert find_sweep(command(seeds, name="grid")) == folder
    assert find_sweep(command("seed=1,2", name="grid")) is None
