"""Arrays that orbax wrote, as earlier versions did, can be read, or the reading raises."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from pipeline.checkpoint.array_database import write_arrays
from pipeline.checkpoint.manifest import DamagedError
from pipeline.checkpoint.orbax_arrays import read_arrays, silence_orbax
from pipeline.core.errors import RunError

ARRAYS = {"params/kernel": np.arange(6, dtype=np.float32), "step": np.int32(3)}


def write_with_orbax(folder: Path) -> None:
    """Write `ARRAYS` as earlier versions did."""
    tree = {name: np.asarray(array) for name, array in ARRAYS.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))


def test_arrays_round_trip(tmp_path: Path) -> None:
    write_with_orbax(tmp_path / "state")
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


@pytest.mark.parametrize("writes_with_orbax", [True, False], ids=["orbax", "database"])
@pytest.mark.parametrize("name", STRANGE_NAMES, ids=range(len(STRANGE_NAMES)))
def test_arrays_are_read_in_any_folder(name: str, writes_with_orbax: bool, tmp_path: Path) -> None:
    """Orbax would take some of these names for patterns, which match the neighbours too."""
    for other in ("a1", "axb", "ab"):
        write_arrays(tmp_path / other / "state", {"step": np.int32(7)})
    folder = tmp_path / name
    if writes_with_orbax:
        write_with_orbax(tmp_path / "plain" / "state")
        (tmp_path / "plain").rename(folder)
    else:
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
    write_with_orbax(tmp_path / "state")
    refusals.append(error)
    with pytest.raises(RunError, match=r"state: can't be read: Too many open files; ") as caught:
        read_arrays(tmp_path / "state")
    assert caught.value.exit_status == 1


def test_transient_orbax_error_is_retried_once(refusals: list[Exception], tmp_path: Path) -> None:
    """It takes a file for missing where the process could not open it."""
    write_with_orbax(tmp_path / "state")
    hidden = AttributeError("'NoneType' object has no attribute 'tree'")
    refusals.append(hidden)
    assert read_arrays(tmp_path / "state").keys() == ARRAYS.keys()
    refusals.extend([hidden, hidden])
    with pytest.raises(DamagedError, match="state: can't be read: 'NoneType' object"):
        read_arrays(tmp_path / "state")


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
