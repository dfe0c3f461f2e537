from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.backends.program_cache import keep_programs, unkept
from tests.observe.disk import files_end_at

CONFIGURED = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[list[str]]:
    """What the user is told of the cache in `tmp_path`."""
    before = {name: jax.config.values[name] for name in CONFIGURED}
    lines: list[str] = []
    keep_programs(tmp_path, lines.append)
    yield lines
    keep_programs(None, print)
    for name, value in before.items():
        jax.config.update(name, value)


def compile_anew() -> str:
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
    assert compile_anew() == "cache_misses"
    (file,) = folder.iterdir()
    return file


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        lambda content: b"",
        lambda content: content[:20],
        lambda content: _flipped(content, 3),
        lambda content: _flipped(content, 40),
        lambda content: _flipped(content, len(content) // 2),
        lambda content: _flipped(content, len(content) - 1),
        lambda content: content + b"more",
    ],
    ids=["cut", "empty", "less than a digest", "digest", "head", "middle", "last byte", "longer"],
)
def test_a_damaged_program_is_told_removed_and_compiled_anew(
    damage: Callable[[bytes], bytes], told: list[str], tmp_path: Path
) -> None:
    file = kept(tmp_path)
    assert compile_anew() == "cache_hits"
    file.write_bytes(damage(file.read_bytes()))
    assert compile_anew() == "cache_misses"
    assert told == [f"{file}: was damaged and is removed; compiling anew"]
    assert compile_anew() == "cache_hits"
    assert len(told) == 1


def test_a_program_that_was_being_written_is_not_taken_for_one(
    told: list[str], tmp_path: Path
) -> None:
    file = kept(tmp_path)
    file.rename(file.with_name(f"{file.name}.elsewhere.1.part"))
    assert compile_anew() == "cache_misses"
    assert told == []


def test_a_full_disk_costs_compilations_and_one_line(told: list[str], tmp_path: Path) -> None:
    kept(tmp_path).unlink()
    with files_end_at(100):
        assert compile_anew() == compile_anew() == "cache_misses"
    assert told == [f"{tmp_path}: compiled programs can't be kept: File too large"]
    assert list(tmp_path.iterdir()) == []
    compile_anew()
    assert compile_anew() == "cache_hits"


def test_a_program_that_can_not_be_read_costs_a_compilation(
    told: list[str], tmp_path: Path
) -> None:
    file = kept(tmp_path)
    file.unlink()
    file.mkdir()
    assert compile_anew() == "cache_misses"
    assert told == [
        f"{tmp_path}: compiled programs can't be read: Is a directory",
        f"{tmp_path}: compiled programs can't be kept: Is a directory",
    ]


def test_what_is_not_to_be_kept_leaves_no_file(told: list[str], tmp_path: Path) -> None:
    kept(tmp_path).unlink()
    with unkept():
        compile_anew()
    assert list(tmp_path.iterdir()) == []
    assert told == []
