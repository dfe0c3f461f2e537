from __future__ import annotations

import hashlib
import os
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.core.files.compile_cache import enable_compile_cache
from pipeline.core.host.jax_private import keep_from_cache
from pipeline.models.lowerings.formulas import onednn
from tests.engine.monitors.disk import files_end_at
from tests.models.lowerings.engines import require

CONFIGURED = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def reported(tmp_path: Path) -> Iterator[list[str]]:
    """The lines that the user gets about the cache in `tmp_path`."""
    before = {name: jax.config.values[name] for name in CONFIGURED}
    lines: list[str] = []
    enable_compile_cache(tmp_path, lines.append)
    yield lines
    enable_compile_cache(None, print)
    for name, value in before.items():
        jax.config.update(name, value)


def compile_again() -> str:
    """Compile one function, as a process that has just started would: hit, miss or neither."""
    events = []

    def listen(event: str, **_: object) -> None:
        events.append(event.rpartition("/")[2])

    jax.monitoring.register_event_listener(listen)
    try:
        program = jax.jit(lambda x: jnp.sin(x) * 3 + 1).lower(np.ones(3, np.float32)).compile()
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert np.asarray(program(np.zeros(3, np.float32))).tolist() == [1, 1, 1]
    return ", ".join(event for event in events if event in ("cache_hits", "cache_misses"))


def kept(folder: Path) -> Path:
    """The file of the one program, which takes the place of all others."""
    for file in folder.iterdir():
        file.unlink()
    assert compile_again() == "cache_misses"
    (file,) = folder.iterdir()
    return file


def _truncate(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        lambda content: b"",
        lambda content: content[:20],
        lambda content: _flipped(content, 3),
        lambda content: _flipped(content, 40),
        lambda content: _flipped(content, len(content) // 2),
        lambda content: _flipped(content, len(content) - 1),
        lambda content: content + b"more",
    ],
    ids=[
        "truncated",
        "empty",
        "less than a digest",
        "digest",
        "head",
        "middle",
        "last byte",
        "longer",
    ],
)
def test_damaged_program_is_reported_and_recompiled(
    damage: Callable[[bytes], bytes], reported: list[str], tmp_path: Path
) -> None:
    file = kept(tmp_path)
    assert compile_again() == "cache_hits"
    file.write_bytes(damage(file.read_bytes()))
    assert compile_again() == "cache_misses"
    assert reported == [f"{file}: was damaged and is removed; compiling again"]
    assert compile_again() == "cache_hits"
    assert len(reported) == 1


def compile_other() -> None:
    program = jax.jit(lambda x: jnp.cos(x) - 2).lower(np.ones(3, np.float32)).compile()
    assert np.asarray(program(np.zeros(3, np.float32))).tolist() == [-1, -1, -1]


@pytest.mark.slow
def test_program_under_another_key_is_not_run(reported: list[str], tmp_path: Path) -> None:
    """Under the name of another program it would be whole, and run in its place."""
    file = kept(tmp_path)
    compile_other()
    (other,) = (each for each in tmp_path.iterdir() if each != file)
    for put in (lambda: file.write_bytes(other.read_bytes()), lambda: os.link(other, file)):
        file.unlink()
        put()
        assert compile_again() == "cache_misses"
        assert reported.pop() == f"{file}: was damaged and is removed; compiling again"
        assert compile_again() == "cache_hits"
    compile_other()
    assert reported == []


def test_program_without_bound_key_is_replaced(reported: list[str], tmp_path: Path) -> None:
    file = kept(tmp_path)
    program = file.read_bytes()[32:]
    file.write_bytes(hashlib.sha256(program).digest() + program)
    assert compile_again() == "cache_misses"
    assert compile_again() == "cache_hits"
    assert reported == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("put", "why"),
    [
        (lambda file, program: file.symlink_to(program), "was a link"),
        (lambda file, program: os.mkfifo(file), "was no file"),
        (
            lambda file, program: file.touch(0o666) or file.chmod(0o666),
            "could be written by everybody",
        ),
    ],
    ids=["link", "pipe", "mode 666"],
)
def test_foreign_cache_entry_is_removed_and_not_run(
    put: Callable[[Path, Path], None], why: str, reported: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "elsewhere"
    file = kept(tmp_path)
    folder.mkdir()
    program = file.rename(folder / file.name)
    put(file, program)
    assert compile_again() == "cache_misses"
    assert reported == [f"{file}: {why} and is removed; compiling again"]
    assert compile_again() == "cache_hits"
    assert program.exists()


def test_program_of_another_user_is_not_run(
    reported: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = kept(tmp_path)
    if os.geteuid() == 0:
        os.chown(file, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert compile_again() == "cache_misses"
    assert "belonged to user " in reported[0]


def test_programs_are_private_for_any_umask(reported: list[str], tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        file = kept(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert compile_again() == "cache_hits"
    assert reported == []


def test_partly_written_program_is_ignored(reported: list[str], tmp_path: Path) -> None:
    file = kept(tmp_path)
    file.rename(file.with_name(f"{file.name}.elsewhere.1.part"))
    assert compile_again() == "cache_misses"
    assert reported == []


@pytest.mark.slow
def test_full_disk_recompiles_and_warns_once(reported: list[str], tmp_path: Path) -> None:
    kept(tmp_path).unlink()
    with files_end_at(100):
        assert compile_again() == compile_again() == "cache_misses"
    assert reported == [f"{tmp_path}: compiled programs can't be kept: File too large"]
    assert list(tmp_path.iterdir()) == []
    compile_again()
    assert compile_again() == "cache_hits"


def test_unreadable_program_is_recompiled(reported: list[str], tmp_path: Path) -> None:
    file = kept(tmp_path)
    file.unlink()
    file.mkdir()
    assert compile_again() == "cache_misses"
    assert reported == [
        f"{tmp_path}: compiled programs can't be read: Is a directory",
        f"{tmp_path}: compiled programs can't be kept: Is a directory",
    ]


def test_disabled_compile_cache_writes_no_file(reported: list[str], tmp_path: Path) -> None:
    kept(tmp_path).unlink()
    with keep_from_cache():
        compile_again()
    assert list(tmp_path.iterdir()) == []
    assert reported == []


@pytest.mark.medium
def test_program_that_cannot_be_written_is_no_warning(tmp_path: Path) -> None:
    """XLA fails to serialize calls of oneDNN with std::bad_alloc."""
    require("onednn", "float32")
    before = {name: jax.config.values[name] for name in CONFIGURED}
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        enable_compile_cache(tmp_path, print)
        square = jax.jit(lambda a: onednn.matmul(a, a, dtype=jnp.float32))
        np.testing.assert_array_equal(square(np.ones((8, 8), np.float32)), np.full((8, 8), 8))
        warnings.warn("Error writing persistent compilation cache entry: another", stacklevel=1)
    enable_compile_cache(None, print)
    for name, value in before.items():
        jax.config.update(name, value)
    assert [str(warning.message)[-7:] for warning in shown] == ["another"]
    assert list(tmp_path.iterdir()) == []
