"""The allocator's settings reach the process, once, and leave the command as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core.host.process_start import SETTINGS, VARIABLE, reexec_with_malloc_tunables

PROGRAM = """
import ctypes, os, sys
from pipeline.core.host.process_start import reexec_with_malloc_tunables
print("begun", flush=True)
reexec_with_malloc_tunables()
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), *sys.argv[1:], flush=True)
"""


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
