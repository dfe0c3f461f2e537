"""Programs that are found again on disk and in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.backends import compile_program as kept_programs
from pipeline.backends.compile_program import (
    MAX_IN_MEMORY,
    LaterProgram,
    ProgramSpec,
    compile_once,
    compile_program,
    find_compiled,
)
from pipeline.core.files.compile_cache import enable_compile_cache

DEVICES = jax.devices()[:1]
CONFIGURED = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = {name: jax.config.values[name] for name in CONFIGURED}
    enable_compile_cache(tmp_path, print)
    yield tmp_path
    enable_compile_cache(None, print)
    for name, value in before.items():
        jax.config.update(name, value)


def program(key: str | None, length: int = 3) -> tuple[ProgramSpec, list[Any]]:
    """A program, and what is added to whenever it is traced."""
    traced: list[Any] = []

    def double(values: dict[str, Any]) -> dict[str, Any]:
        traced.append(values)
        return {"x": values["x"] * 2}

    shapes = {"x": jax.ShapeDtypeStruct((length,), jnp.float32)}
    return ProgramSpec("doubling", double, (shapes,), donated=0, key=key), traced


def compile_again(key: str | None, length: int = 3) -> tuple[Any, str, int]:
    spec, traced = program(key, length)
    compiled, facts = compile_program(spec, lambda _: nullcontext(), jax.devices("cpu")[:1])
    given = {"x": jnp.arange(length, dtype=jnp.float32)}
    assert np.asarray(compiled(given)["x"]).tolist() == [2.0 * n for n in range(length)]
    return compiled, facts.cache, len(traced)


def test_program_with_a_key_is_loaded_without_tracing(folder: Path) -> None:
    assert compile_again("one")[1:] == ("miss", 1)
    assert compile_again("one")[1:] == ("hit", 0)


def test_different_keys_and_shapes_are_different_programs(folder: Path) -> None:
    compile_again("one")
    assert compile_again("two")[1:] == ("hit", 1)  # of JAX's own cache, by its text
    assert compile_again("one", length=4)[1:] == ("miss", 1)
    assert compile_again(None)[1:] == ("hit", 1)


def test_damaged_program_file_is_recompiled(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_again("one")
    (file,) = folder.glob("kept-*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert compile_again("one")[1:] == ("hit", 1)
    assert f"{file}: was damaged and is removed" in capsys.readouterr().out
    assert compile_again("one")[1:] == ("hit", 0)


def test_programs_are_not_stored_without_a_cache(folder: Path) -> None:
    enable_compile_cache(None, print)
    assert compile_again("one")[1:] == ("off", 1)
    assert find_compiled(program("one")[0], jax.devices("cpu")[:1]) is None
    assert list(folder.iterdir()) == []


def test_deferred_program_is_compiled_once() -> None:
    compiled: list[str] = []
    later = LaterProgram(lambda: compiled.append("now") or (lambda number: number + 1))
    assert compiled == []
    later.begin()
    later.begin()
    assert [later(1), later(2)] == [2, 3]
    assert compiled == ["now"]


def test_deferred_program_raises_its_compile_error() -> None:
    def fail() -> Any:
        raise ValueError("no")

    later = LaterProgram(fail)
    with pytest.raises(ValueError, match="no"):
        later()
    with pytest.raises(ValueError, match="no"):
        later.begin()


def lowered(function: Callable[..., Any], size: int = 3) -> Any:
    return jax.jit(function).lower(np.zeros(size, np.float32))


def doubled(x: jax.Array) -> jax.Array:
    with jax.named_scope("one"):
        return x * 2


def renamed(x: jax.Array) -> jax.Array:
    with jax.named_scope("other"):
        return x * 2


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_programs._IN_MEMORY.clear()


@pytest.mark.slow
def test_same_program_is_compiled_once() -> None:
    """Wherever it is made: the text has the functions that were called."""

    def elsewhere() -> Any:
        jax.clear_caches()
        return lowered(doubled)

    first = compile_once(lowered(doubled), None, DEVICES, object)
    again = compile_once(elsewhere(), None, DEVICES, object)
    assert (first[1], again[1]) == (False, True)
    assert again[0] is first[0]


def test_compile_key_has_shape_name_options_and_devices() -> None:
    others: list[tuple[Any, dict[str, str] | None, list[Any]]] = [
        (lowered(doubled), None, DEVICES),
        (lowered(doubled, 4), None, DEVICES),
        (lowered(renamed), None, DEVICES),
        (lowered(doubled), {"xla_backend_optimization_level": "0"}, DEVICES),
        (lowered(doubled), None, [*DEVICES, *DEVICES]),
    ]
    assert [compile_once(*other, object)[1] for other in others] == [False] * 5


def test_oldest_program_is_evicted() -> None:
    for size in range(1, MAX_IN_MEMORY + 2):
        compile_once(lowered(doubled, size), None, DEVICES, object)
    assert len(kept_programs._IN_MEMORY) == MAX_IN_MEMORY
    assert compile_once(lowered(doubled, MAX_IN_MEMORY + 1), None, DEVICES, object)[1]
    assert not compile_once(lowered(doubled, 1), None, DEVICES, object)[1]


def test_reopened_devices_do_not_share_programs() -> None:
    """JAX gives up its client where more devices are asked for; its programs can't run any more."""

    class _Device:
        platform, id = "cpu", 0

    earlier: list[Any] = [_Device()]
    now: list[Any] = [_Device()]
    assert not compile_once(lowered(doubled), None, earlier, object)[1]
    assert not compile_once(lowered(doubled), None, now, object)[1]
    assert compile_once(lowered(doubled), None, now, object)[1]
