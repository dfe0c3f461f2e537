"""Arrays as files that orbax reads, written and read without a clock."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pipeline.checkpoint import array_database
from pipeline.checkpoint.array_database import DATABASE, NAMED_TYPES, read_database, write_arrays
from pipeline.checkpoint.restore import _read_with_orbax

ARRAYS = {
    "params/kernel": np.arange(3000, dtype=np.float32).reshape(30, 100),
    "params/kernel_2": np.arange(6, dtype=np.float16).reshape(2, 3),
    "params/transposed": np.arange(3000, dtype=np.int64).reshape(30, 100).T,
    "größe": np.array([True, False]),
    "step": np.int32(3),
}


def assert_equal(read: object, arrays: dict[str, np.ndarray]) -> None:
    assert isinstance(read, dict)
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        assert read[name].shape == array.shape
        assert read[name].tobytes() == np.ascontiguousarray(array).tobytes()


def test_written_arrays_are_read_without_orbax(tmp_path: Path) -> None:
    write_arrays(tmp_path / "state", ARRAYS)
    read = read_database(tmp_path / "state")
    assert_equal(read, ARRAYS)
    assert read is not None
    read["step"][...] = 4


@pytest.mark.medium
@pytest.mark.parametrize("file_bytes", [array_database.FILE_BYTES, 2000])
def test_orbax_reads_written_arrays(
    file_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one file or in several, with keys that share bytes with the one before."""
    monkeypatch.setattr(array_database, "FILE_BYTES", file_bytes)
    many = {f"layer_{n}/kernel": np.full((n % 40 + 1, 20), n, np.float32) for n in range(300)}
    write_arrays(tmp_path / "state", {**ARRAYS, **many})
    assert_equal(dict(_read_with_orbax(tmp_path / "state")), {**ARRAYS, **many})
    assert_equal(read_database(tmp_path / "state"), {**ARRAYS, **many})


@pytest.mark.medium
def test_orbax_reads_every_type_that_is_written(tmp_path: Path) -> None:
    names = sorted(NAMED_TYPES)
    types = [np.dtype(getattr(ml_dtypes, name)) for name in names]
    types += [np.dtype(character) for character in sorted(array_database.NUMBERS)]
    arrays = {str(n): np.ones((2, 3), dtype) for n, dtype in enumerate(types)}
    write_arrays(tmp_path / "state", arrays)
    assert_equal(dict(_read_with_orbax(tmp_path / "state")), arrays)
    assert_equal(read_database(tmp_path / "state"), arrays)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(3, ml_dtypes.uint4), "x: arrays of uint4 can't be saved"),
        (np.array(["a"]), "x: arrays of <U1 can't be saved"),
        (np.array([None]), "x: arrays of object can't be saved"),
        (np.ones((3, 0)), r"x: arrays without elements can't be saved, shape \(3, 0\)"),
    ],
)
def test_unreadable_arrays_are_refused(array: np.ndarray, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        write_arrays(tmp_path / "state", {"x": array})
    assert not (tmp_path / "state").exists()


def test_arrays_need_no_tensorstore(tmp_path: Path) -> None:
    """Tensorstore waits for a clock that was set back."""
    script = (
        "import sys; sys.modules.update(tensorstore=None, orbax=None);"
        "from pathlib import Path; import numpy as np;"
        "from pipeline.checkpoint.checkpointer import write_arrays;"
        "from pipeline.checkpoint.restore import read_arrays;"
        f"folder = Path({str(tmp_path / 'state')!r});"
        "write_arrays(folder, {'x': np.arange(3)}); print(read_arrays(folder)['x'])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "[0 1 2]\n"), ended.stderr


def test_clock_before_1970_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_database.time, "time_ns", lambda: -5)
    write_arrays(tmp_path / "state", ARRAYS)
    assert_equal(read_database(tmp_path / "state"), ARRAYS)
    assert_equal(dict(_read_with_orbax(tmp_path / "state")), ARRAYS)


def test_database_of_orbax_is_left_to_orbax(tmp_path: Path) -> None:
    write_arrays(tmp_path, ARRAYS)
    content = bytearray((tmp_path / DATABASE).read_bytes())
    content[13] = 1  # compressed, as orbax writes it
    (tmp_path / DATABASE).write_bytes(content)
    assert read_database(tmp_path) is None


def test_changed_bytes_are_an_error_or_arrays(tmp_path: Path) -> None:
    """No change of a byte in the manifest or the node leads to an error of another kind."""
    draw = random.Random(3)
    write_arrays(tmp_path, ARRAYS)
    (data,) = (tmp_path / "d").iterdir()
    for file, first in ((tmp_path / DATABASE, 0), (data, data.stat().st_size - 900)):
        original = file.read_bytes()
        for position in range(first, len(original)):
            changed = bytearray(original)
            changed[position] ^= draw.choice([1, 0x80, 0xFF, draw.randrange(1, 256)])
            file.write_bytes(changed)
            try:
                read_database(tmp_path)
            except (ValueError, FileNotFoundError):
                continue
        for length in range(0, len(original), max(1, len(original) // 300)):
            file.write_bytes(original[:length])
            with suppress(ValueError):
                # What is after the places of the values isn't read; the manifest has its SHA-256.
                assert read_database(tmp_path) is None or length > len(original) - 20
        file.write_bytes(original)
    assert_equal(read_database(tmp_path), ARRAYS)


def test_sizes_beyond_the_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_arrays(tmp_path, ARRAYS)
    monkeypatch.setattr(array_database.os, "sysconf", lambda name: 100)
    with pytest.raises(ValueError, match=r"claims 36,018 bytes of arrays; this machine has 10,000"):
        read_database(tmp_path)
