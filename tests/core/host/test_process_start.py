"""The allocator's settings reach the process, once, and leave the command as it was.

A process that no run works in is refused in one line, before anything is written.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.core.errors import RunError
from pipeline.core.host.process_start import (
    SETTINGS,
    VARIABLE,
    reexec_with_malloc_tunables,
    require_known_flags,
    require_usable_environment,
)

PROGRAM = """
import ctypes, os, sys
from pipeline.core.host.process_start import reexec_with_malloc_tunables
print("begun", flush=True)
reexec_with_malloc_tunables()
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), *sys.argv[1:], flush=True)
"""
COMMAND = [sys.executable, "-m", "pipeline", "--help"]


def _run(tmp_path: Path, **variables: str) -> tuple[int, list[str]]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    with subprocess.Popen(
        [sys.executable, str(program), "a b", "train.steps=3"],
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        lines = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == 0
    return process.pid, lines


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's C library")
def test_process_restarts_once_with_settings_and_arguments(tmp_path: Path) -> None:
    pid, lines = _run(tmp_path)
    assert lines == ["begun", "begun", f"{pid} {SETTINGS[VARIABLE]} a b train.steps=3"]


def test_user_settings_are_not_overridden(tmp_path: Path) -> None:
    pid, lines = _run(tmp_path, **{VARIABLE: "glibc.malloc.check=0"})
    assert lines == ["begun", f"{pid} glibc.malloc.check=0 a b train.steps=3"]


def test_unrestartable_process_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[object] = []

    def refuse(*args: object) -> None:
        refused.append(args)
        raise PermissionError(13, "Permission denied")

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(os, "execve", refuse)
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.36")
    reexec_with_malloc_tunables()
    assert len(refused) == 1


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's C library")
def test_freed_large_array_remains_with_the_process(tmp_path: Path) -> None:
    """64 MB allocated and freed ten times: their pages are not requested again."""
    program = tmp_path / "arrays.py"
    program.write_text(
        "import resource\n"
        "from pipeline.core.host.process_start import reexec_with_malloc_tunables\n"
        "reexec_with_malloc_tunables()\n"
        "import numpy as np\n"
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "np.ones(8 << 20)\n"
        "before = faults()\n"
        "for _ in range(10): np.ones(8 << 20)\n"
        "print(faults() - before)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, str(program)]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert int(result.stdout) < 1000


def _command(**variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        COMMAND, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def _zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.undo()
    time.tzset()


def test_usual_environment_is_accepted() -> None:
    """A check that is too strict raises RunError."""
    require_usable_environment()


def test_removed_working_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(RunError, match=r"^the working folder has been removed; change to one that"):
        require_usable_environment()


@pytest.mark.medium
def test_command_in_removed_folder_has_no_traceback(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    begun = subprocess.run(
        ["sh", "-c", f'cd "{folder}" && rmdir "{folder}" && exec "$@"', "sh", *COMMAND],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert begun.returncode == 1
    assert begun.stderr == (
        "error: the working folder has been removed; change to one that exists, cd DIR\n"
    )


@pytest.mark.usefixtures("_zone")
@pytest.mark.parametrize(("zone", "hours"), [("AAA-25", "+24"), ("AAA24", "-24")])
def test_time_zone_beyond_python_limit_is_refused(
    zone: str, hours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    with pytest.raises(RunError, match=rf"^TZ = {zone}: is \{hours} hours from UTC; must be less"):
        require_usable_environment()


@pytest.mark.usefixtures("_zone")
def test_largest_time_zone_offset_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An offset of 24 hours raises RunError; a second less does not."""
    monkeypatch.setenv("TZ", "AAA-23:59:59")
    time.tzset()
    assert time.timezone == 1 - 24 * 3600
    require_usable_environment()


def test_unreadable_clock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow() -> float:
        raise OverflowError("timestamp too large to convert to C _PyTime_t")

    monkeypatch.setattr(time, "time", overflow)
    with pytest.raises(RunError, match=r"^the system clock is too far from the present"):
        require_usable_environment()


def test_clock_before_1970_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: -86400.0)
    monkeypatch.setattr(time, "gmtime", lambda gmtime=time.gmtime: gmtime(-86400))
    with pytest.raises(RunError, match=r"^the system clock shows 1969-12-31: files of checkpoints"):
        require_usable_environment()


@pytest.mark.medium
def test_removed_asserts_are_refused() -> None:
    """With `python -O`, Hydra's parser raises AttributeError for a dictionary in an override."""
    process = _command(PYTHONOPTIMIZE="2")
    assert process.returncode == 1
    assert process.stderr == (
        "error: PYTHONOPTIMIZE = 2, or python -O: removes asserts, without which Hydra can't parse "
        "overrides; unset it\n"
    )


@pytest.mark.medium
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--xla_banana=1", "Unknown flag in XLA_FLAGS: --xla_banana=1"),
        ("--xla_cpu_enable_fast_math=2b", "Couldn't interpret value 2b for flag xla_cpu_enable_fa"),
        ("no/such/file", 'Could not open file "no/such/file"'),
    ],
)
def test_unknown_xla_flags_are_refused(
    flags: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(RunError) as caught:
        require_known_flags()
    assert str(caught.value).startswith(f"XLA_FLAGS = {flags}: XLA refuses it: {reason}")


@pytest.mark.medium
def test_known_xla_flags_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that XLA does not know raises RunError."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false --xla_gpu_autotune_level=0")
    require_known_flags()


def test_check_without_xla_flags_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[object] = []
    monkeypatch.setattr(subprocess, "run", lambda *args, **more: starts.append(args))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    require_known_flags()
    assert not starts


@pytest.mark.medium
def test_command_with_wrong_xla_flag_fails_cleanly() -> None:
    ended = _command(XLA_FLAGS="--xla_banana=1")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error: XLA_FLAGS = --xla_banana=1: XLA refuses it: ")
    assert len(ended.stderr.splitlines()) == 1
