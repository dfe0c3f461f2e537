from __future__ import annotations

import subprocess
import sys

import pytest

from pipeline.core.errors import DataError, RecipeError, RunError, UsageError
from pipeline.core.report_errors import report_errors


def failing(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RunError("the disk is full"), 1, "error: the disk is full\n"),
        (DataError("x.npz: no such file"), 2, "error: x.npz: no such file\n"),
        (RecipeError(["a = 1: wrong"]), 2, "error: the recipe has a problem:\n  a = 1: wrong\n"),
        (UsageError(["a", "b"], "diff takes RUN"), 2, "error: a b: diff takes RUN\n"),
        (UsageError([], "diff takes RUN"), 2, "error: nothing: diff takes RUN\n"),
        (ValueError("a bug"), 1, "error: ValueError: a bug (debug=true shows the traceback)\n"),
        (KeyboardInterrupt(), 75, "interrupted\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_error_becomes_a_message_and_a_status(
    error: BaseException, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_errors(lambda: failing(error), debug=False) == status
    assert capsys.readouterr() == ("", message)


def test_action_without_an_error_returns_its_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert report_errors(lambda: 7, debug=False) == 7
    assert capsys.readouterr() == ("", "")


def test_debug_prints_the_traceback_before_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    report_errors(lambda: failing(RunError("the disk is full")), debug=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "error: the disk is full"


def test_control_characters_in_library_errors_are_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> int:
        raise ValueError("\x1b[2Jcat\rdog\nmouse")

    report_errors(fail, debug=False)
    said = capsys.readouterr().err
    assert said.startswith("error: ValueError: \\x1b[2Jcat\\rdog\nmouse (debug=true")


@pytest.mark.parametrize("printer", ["print", "Console().print"])
def test_closed_pipe_prints_no_error(printer: str) -> None:
    """As in `python -m pipeline --help | head -1`."""
    script = (
        "import sys; from pipeline.core.report_errors import report_errors\n"
        "from rich.console import Console\n"
        "def talk():\n"
        f"    while True: {printer}('x' * 1000)\n"
        "sys.exit(report_errors(talk, debug=False))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_closed_pipe_that_is_not_stdout_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    error = BrokenPipeError(32, "Broken pipe")
    assert report_errors(lambda: failing(error), debug=False) == 1
    assert "error: BrokenPipeError: [Errno 32] Broken pipe" in capfd.readouterr().err


def test_exit_of_a_command_is_left_alone() -> None:
    with pytest.raises(SystemExit, match="3"):
        report_errors(lambda: sys.exit(3), debug=False)


def test_closed_pipe_behind_a_wrapper_of_stdout_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Wrapper:
        def write(self, text: str) -> None:
            """Ignore it."""

        def flush(self) -> None:
            """Do nothing."""

    monkeypatch.setattr(sys, "stdout", Wrapper())
    assert report_errors(lambda: failing(BrokenPipeError(32, "Broken pipe")), debug=False) == 1
    assert "Broken pipe" in capfd.readouterr().err
