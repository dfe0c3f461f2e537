"""A process with little memory ends with a message; with enough memory nothing happens."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from pipeline.stages import fit_memory
from pipeline.stages.fit_memory import end_without_memory

PROGRAM = """
import time
from pipeline.stages.fit_memory import end_without_memory
with end_without_memory({reserved}, "compiling takes more memory than is at hand"):
    time.sleep({seconds})
print("done")
"""


@pytest.mark.slow
def test_process_without_memory_ends_with_a_message() -> None:
    program = PROGRAM.format(reserved=10**18, seconds=60)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "error: compiling takes more memory than is at hand\n"


@pytest.mark.slow
def test_process_with_memory_continues() -> None:
    program = PROGRAM.format(reserved=0, seconds=0.2)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_free_pages_are_returned_before_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    available_bytes = iter([5])
    returned = threading.Event()
    ended: list[str] = []
    monkeypatch.setattr(fit_memory, "read_available_bytes", lambda: next(available_bytes, 500))
    monkeypatch.setattr(fit_memory, "return_free_pages", returned.set)
    monkeypatch.setattr(fit_memory, "_end", ended.append)
    monkeypatch.setattr(fit_memory, "PERIOD_S", 0.001)
    with end_without_memory(100, "short"):
        assert returned.wait(10)
    assert ended == []


def test_error_of_the_body_is_raised() -> None:
    with pytest.raises(ValueError, match="broken"), end_without_memory(0, "short"):
        raise ValueError("broken")
