from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import DataError
from pipeline.stages.record.run_directory import read_status
from pipeline.study.sweep.directory import (
    Command,
    Sweeper,
    find_sweep,
    read_command,
    read_overrides,
    read_summary,
    read_values,
    write_command,
)

FILES: dict[str, Callable[[Path], Any]] = {
    "sweep.yaml": read_command,
    "overrides.yaml": read_overrides,
    "summary.json": read_summary,
}
PLAIN = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8)
LIKE_NUMBERS = st.sampled_from(["1e-3", "2026-11-21", "1_0", "0x1", "~", "1:30", ".5", "null"])


@pytest.fixture(params=list(FILES))
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / request.param


def test_missing_file_returns_none(file: Path) -> None:
    assert FILES[file.name](file.parent) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[1, 2]", "must hold keys and values"),
        (b"\xff\xfe", "can't be read: 'utf-8' codec can't decode"),
        (b"[" * 100_000, "can't be read: "),
        (b"{", "can't be read: "),
    ],
)
def test_hostile_file_error_has_one_line(content: bytes, told: str, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        FILES[file.name](file.parent)
    assert str(caught.value).startswith(f"{file}: {told}")
    assert "\n" not in str(caught.value)
    assert read_status(file.parent) is None


def test_size_of_read_files_is_limited(file: Path) -> None:
    """A hole of 8 GiB: nothing near that is allocated."""
    with file.open("wb") as hole:
        hole.truncate(8 * 2**30)
    tracemalloc.start()
    with pytest.raises(DataError, match=r"can't be read: has more than .* bytes"):
        FILES[file.name](file.parent)
    assert read_status(file.parent) is None
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 200 * 2**20


def test_pipe_does_not_block_a_sweep(file: Path) -> None:
    os.mkfifo(file)
    with pytest.raises(DataError, match="can't be read: isn't a regular file"):
        FILES[file.name](file.parent)
    assert read_status(file.parent) is None


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("sweep.yaml", "sweeper: {}", "overrides: missing; it needs a value"),
        (
            "sweep.yaml",
            "{overrides: [], sweeper: {params: 3}}",
            "sweeper.params = 3: must be a sec",
        ),
        ("summary.json", "{}", "status: missing; it needs a value"),
        ("summary.json", '{"status": "done", "metrics": 3}', "metrics = 3: must be a section"),
        ("summary.json", '{"status": "done", "steps": "x"}', "steps = x: must be a whole number"),
        ("summary.json", '{"status": 1, "exit_status": []}', "status = 1: must be a text"),
    ],
)
def test_invalid_files_are_reported_with_the_key(
    name: str, content: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        FILES[name](tmp_path)
    assert f"{tmp_path / name}: {told}" in str(caught.value)


def test_override_values_are_parsed_as_in_the_overrides_file() -> None:
    overrides = ["a=1e-3", "b='1e-3'", "c=[1,x]", "d=2026-11-21", "e=", "f=*x"]
    values = [0.001, "1e-3", [1, "x"], "2026-11-21", None, "*x"]
    assert read_values(overrides, list("abcdef")) == dict(zip("abcdef", values, strict=True))


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
