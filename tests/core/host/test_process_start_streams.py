"""A command whose standard streams are closed, or are closed meanwhile, ends in order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core.report_errors import READER_LEFT

WITH_CLOSED = """
import os, sys
for number in {numbers}:
    os.close(number)
os.execv(sys.executable, [sys.executable, *{arguments}])
"""
FIRST_FILE = """
import os, sys
from pipeline.core.host.process_start import open_closed_streams
open_closed_streams()
print("nowhere", file=sys.stdout, flush=True)
print("nowhere", file=sys.stderr, flush=True)
with open({path!r}, "w") as file:
    file.write(f"{{file.fileno() > 2}}")
"""


def _run(numbers: tuple[int, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    script = WITH_CLOSED.format(numbers=numbers, arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("numbers", [(1,), (2,), (0, 1, 2)], ids=str)
def test_opened_file_does_not_replace_a_closed_stream(
    numbers: tuple[int, ...], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    assert _run(numbers, "-c", FIRST_FILE.format(path=str(path))).returncode == 0
    assert path.read_text() == "True"


@pytest.mark.medium
def test_command_without_stdout_succeeds() -> None:
    ended = _run((1,), "-m", "pipeline", "--help")
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.slow
def test_command_without_streams_keeps_its_status() -> None:
    assert _run((0, 1, 2), "-m", "pipeline", "train.sink_sise=5").returncode == 2


def test_closed_pipe_ends_without_traceback() -> None:
    """What is buffered until the end can't be written either, without a traceback."""
    script = (
        "import sys, time; from pipeline.core.report_errors import report_errors\n"
        "def act():\n print('a line'); time.sleep(0.5); return 0\n"
        "sys.exit(report_errors(act, debug=False))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == READER_LEFT


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full")
def test_full_disk_behind_stdout_is_reported() -> None:
    script = (
        "import sys; from pipeline.core.report_errors import report_errors\n"
        "sys.stdout = open(1, 'w', buffering=100, closefd=False)\n"
        "sys.exit(report_errors(lambda: print('a line') or 0, debug=False))"
    )
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 1
    assert ended.stderr == "error: the output can't be written: No space left on device\n"
