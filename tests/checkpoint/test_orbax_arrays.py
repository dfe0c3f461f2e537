"""Arrays that were written can be read, or the writing raises."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from pipeline.checkpoint.manifest import DamagedError
from pipeline.checkpoint.orbax_arrays import read_arrays, silence_orbax, write_arrays
from pipeline.core.errors import RunError

ARRAYS = {"params/kernel": np.arange(6, dtype=np.float32), "step": np.int32(3)}
MOST_LISTINGS = 12


def refuse_listing(number: int, patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Refuse the `number`-th listing of a folder; return how many there have been."""
    calls = itertools.count(1)
    made = [0]

    def refused(real: Any) -> Any:
        def listing(folder: Any = ".") -> Any:
            made[0] = next(calls)
            if made[0] == number:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
            return real(folder)

        return listing

    for name in ("listdir", "scandir"):
        patch.setattr(os, name, refused(getattr(os, name)))
    return lambda: made[0]


def test_arrays_round_trip(tmp_path: Path) -> None:
    write_arrays(tmp_path / "state", ARRAYS)
    read = read_arrays(tmp_path / "state")
    assert read.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(read[name], array)


STRANGE_NAMES = (
    "a[1]",
    "a*b",
    "a?b",
    "a\\b",
    "[",
    "a\udcffb",
    "a\nb",
    "a%41",
    "{x}",
    " a ",
    "#a",
    "a:b",
)


@pytest.mark.parametrize("name", STRANGE_NAMES, ids=range(len(STRANGE_NAMES)))
def test_arrays_round_trip_in_any_folder(name: str, tmp_path: Path) -> None:
    """Orbax would take some of these names for patterns, which match the neighbours too."""
    for other in ("a1", "axb", "ab"):
        write_arrays(tmp_path / other / "state", {"step": np.int32(7)})
    folder = tmp_path / name
    folder.mkdir()
    write_arrays(folder / "state", ARRAYS)
    np.testing.assert_array_equal(read_arrays(folder / "state")["step"], ARRAYS["step"])
    assert os.listdir(folder) == ["state"]
    for other in ("a1", "axb", "ab"):
        np.testing.assert_array_equal(read_arrays(tmp_path / other / "state")["step"], 7)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Errors that orbax raises when it is next asked to restore, one a time."""
    refusals: list[Exception] = []
    restore = ocp.StandardCheckpointer.restore

    def refuse(*arguments: Any, **named: Any) -> Any:
        if refusals:
            raise refusals.pop(0)
        return restore(*arguments, **named)

    monkeypatch.setattr(ocp.StandardCheckpointer, "restore", refuse)
    return refusals


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        ValueError("RESOURCE_EXHAUSTED: Failed to open: Too many open files [os_error_code='24']"),
    ],
)
def test_lack_of_descriptors_is_not_damage(
    error: Exception, refusals: list[Exception], tmp_path: Path
) -> None:
    write_arrays(tmp_path / "state", ARRAYS)
    refusals.append(error)
    with pytest.raises(RunError, match=r"state: can't be read: Too many open files; ") as caught:
        read_arrays(tmp_path / "state")
    assert caught.value.exit_status == 1


def test_transient_orbax_error_is_retried_once(refusals: list[Exception], tmp_path: Path) -> None:
    """It takes a file for missing where the process could not open it."""
    write_arrays(tmp_path / "state", ARRAYS)
    hidden = AttributeError("'NoneType' object has no attribute 'tree'")
    refusals.append(hidden)
    assert read_arrays(tmp_path / "state").keys() == ARRAYS.keys()
    refusals.extend([hidden, hidden])
    with pytest.raises(DamagedError, match="state: can't be read: 'NoneType' object"):
        read_arrays(tmp_path / "state")


@pytest.mark.parametrize("number", range(1, MOST_LISTINGS))
def test_write_with_unlistable_folder_fails_or_is_complete(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """orbax finds nothing to put together then, and returns as if it had."""
    folder = tmp_path / "state"
    with monkeypatch.context() as patch:
        listings = refuse_listing(number, patch)
        try:
            write_arrays(folder, ARRAYS)
        except (OSError, ValueError):
            return
        assert listings() > 0, "nothing was listed, so nothing was refused"
    assert read_arrays(folder).keys() == ARRAYS.keys()


@pytest.mark.medium
def test_asyncio_does_not_log_orbax_write_errors(caplog: pytest.LogCaptureFixture) -> None:
    """Tasks that fail beside the one whose error is raised; those of others are still logged."""
    silence_orbax()
    code = compile("async def write():\n    raise OSError('full')\n", "/lib/orbax/io.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)

    async def other() -> None:
        raise ValueError("someone else's")

    async def lose(task: Any) -> None:
        lost = asyncio.ensure_future(task())
        await asyncio.sleep(0)
        assert lost.done()

    for task in (names["write"], other):
        asyncio.run(lose(task))
        gc.collect()
    said = [record.getMessage() for record in caplog.records if record.name == "asyncio"]
    assert len(said) == 1
    assert "someone else's" in said[0]
