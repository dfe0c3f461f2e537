"""A pipe and a notebook's pseudo-terminal show no frames of bars."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import time
import types
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.core.reporter import KERNEL, RecentPace, Reporter, can_redraw, make_console
from tests.engine.monitors.disk import files_end_at


def screen() -> tuple[Console, io.StringIO]:
    """A terminal, and everything that was sent to it."""
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=100, markup=False, highlight=False), file


def test_lines_without_terminal_are_printed_unchanged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reporter = Reporter()
    long = "[bold] 123 " + 40 * "a long line that must not be wrapped "
    reporter.print_lines(long)
    reporter.print_stage("build", "lenet5")
    reporter.warn("mind the gap")
    assert capsys.readouterr().out.splitlines() == [
        long,
        "build      lenet5",
        "warning    mind the gap",
    ]


def test_control_characters_are_escaped(tmp_path: Path) -> None:
    """Names out of files get into lines; the lines of one text are meant."""
    console, shown = screen()
    with Reporter(tmp_path, console) as reporter:
        reporter.print_lines("a \x1b[31mcat\r\nä line of its own")
    for text in (shown.getvalue(), (tmp_path / "run.log").read_text()):
        assert "a \\x1b[31mcat\\r\nä line of its own\n" in text
        assert "\x1b" not in text


def test_log_lines_have_the_time(tmp_path: Path) -> None:
    with Reporter(tmp_path, Console(file=io.StringIO())) as reporter:
        reporter.print_lines("one")
        assert (tmp_path / "run.log").read_text().endswith("one\n")
        reporter.print_stage("data", "two")
    first, second = (tmp_path / "run.log").read_text().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d one", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d data       two", second)


def test_resumed_run_continues_the_same_log(tmp_path: Path) -> None:
    for text in ("before", "after"):
        with Reporter(tmp_path, Console(file=io.StringIO())) as reporter:
            reporter.print_lines(text)
    log = (tmp_path / "run.log").read_text().splitlines()
    assert [line.split(" ")[1] for line in log] == ["before", "after"]


def test_closed_log_is_not_written(tmp_path: Path) -> None:
    with Reporter(tmp_path, Console(file=io.StringIO())) as reporter:
        pass
    reporter.print_lines("too late")
    assert (tmp_path / "run.log").read_text() == ""


def test_bars_and_clocks_need_a_terminal() -> None:
    file = io.StringIO()
    reporter = Reporter(console=Console(file=file))
    assert reporter.open_bar(10, 0) is None
    with reporter.clock("compiling"):
        pass
    assert file.getvalue() == ""


def test_long_stage_without_terminal_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.core.reporter.SILENCE_S", 0.01)
    file = io.StringIO()
    with Reporter(console=Console(file=file)).clock("compiling evaluation"):
        deadline = time.monotonic() + 60
        while not file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert file.getvalue() == "busy       compiling evaluation\n"


def test_lines_on_a_terminal_are_printed_unchanged() -> None:
    console, file = screen()
    Reporter(console=console).print_lines("dataset.train.ops[0] is [bold]")
    assert file.getvalue() == "dataset.train.ops[0] is [bold]\n"


def test_terminal_shows_a_clock_while_it_lasts() -> None:
    console, file = screen()
    with Reporter(console=console).clock("compiling evaluation of lenet5"):
        pass
    assert "compiling evaluation of lenet5" in file.getvalue()
    assert "0:00:00" in file.getvalue()


def test_terminal_shows_a_bar_over_steps() -> None:
    console, file = screen()
    bar = Reporter(console=console).open_bar(total=1_000, done=300)
    assert bar is not None
    bar.advance_to(400, 1.25)
    bar.close()
    assert "300/1000" in file.getvalue()
    assert "400/1000" in file.getvalue()
    assert "loss 1.2500" in file.getvalue()


def test_lines_are_printed_above_the_bar() -> None:
    console, file = screen()
    reporter = Reporter(console=console)
    bar = reporter.open_bar(total=10, done=0)
    assert bar is not None
    reporter.print_lines("epoch: 1 step: 5, loss is 1.5")
    bar.close()
    assert "epoch: 1 step: 5, loss is 1.5\n" in file.getvalue()


@pytest.mark.parametrize("stderr", [False, True])
def test_pipe_shows_no_bars_even_if_colours_are_forced(
    monkeypatch: pytest.MonkeyPatch, stderr: bool
) -> None:
    """Jupyter sets FORCE_COLOR for its kernels, and so for all that they start."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stderr" if stderr else "sys.stdout", io.StringIO())
    assert Console(stderr=stderr).is_terminal
    assert not make_console(stderr=stderr).is_terminal
    if not stderr:
        assert Reporter().open_bar(10, 0) is None


def test_notebook_has_one_line_of_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[list[str]] = []

    class Handle:
        """The part of a cell's output that is replaced."""

        def __init__(self, lines: list[str]) -> None:
            self.lines = lines

        def update(self, output: dict[str, str], raw: bool) -> None:
            assert raw
            self.lines[:] = output.values()

    def display(output: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        shown.append(list(output.values()))
        return Handle(shown[-1])

    module = types.ModuleType("IPython.display")
    vars(module)["display"] = display
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    console = Console(force_jupyter=True, soft_wrap=True)
    with Reporter(tmp_path, console) as reporter:
        for step in (5, 10):
            reporter.print_progress("train", f"step {step}\x1b")
    assert shown == [["train      step 10\\x1b"]]
    assert capsys.readouterr().out == ""
    log = (tmp_path / "run.log").read_text().splitlines()
    assert [line[9:] for line in log] == ["train      step 5\\x1b", "train      step 10\\x1b"]
    # A silent reporter in a notebook shows nothing.
    Reporter(console=Console(file=io.StringIO(), force_jupyter=True)).print_progress("train", "5")
    assert len(shown) == 1


def test_progress_is_printed_without_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    Reporter().print_progress("train", "step 5")
    assert capsys.readouterr().out == "train      step 5\n"


class Gone(io.StringIO):
    """A console whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_closed_console_is_reported_once_in_the_log(tmp_path: Path) -> None:
    with Reporter(tmp_path, Console(file=Gone())) as reporter:
        for text in ("one", "two"):
            reporter.print_lines(text)
    log = [line.partition(" ")[2] for line in (tmp_path / "run.log").read_text().splitlines()]
    assert log == [
        "warning    the console can't be written (Broken pipe); further lines are only in this log",
        "one",
        "two",
    ]


def test_console_error_without_a_log_is_raised() -> None:
    with pytest.raises(BrokenPipeError):
        Reporter(console=Console(file=Gone())).print_lines("one")


def test_unwritable_log_is_reported_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with files_end_at(20), Reporter(tmp_path) as reporter:
        for text in ("one", "two", "three"):
            reporter.print_lines(text)
    assert capsys.readouterr().out.splitlines() == [
        "one",
        "two",
        f"warning    {tmp_path / 'run.log'} can't be written (File too large): it ends here, and "
        "the run goes on",
        "three",
    ]


def test_run_continues_without_console_and_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with files_end_at(5), Reporter(tmp_path, Console(file=Gone())) as reporter:
        for text in ("one", "two", "three"):
            reporter.print_lines(text)
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "run.log").stat().st_size == 5


@pytest.mark.parametrize(("level", "is_printed"), [(logging.WARNING, False), (logging.INFO, True)])
def test_details_are_in_the_log_and_printed_only_with_messages(
    tmp_path: Path, level: int, *, is_printed: bool
) -> None:
    file = io.StringIO()
    with Reporter(tmp_path, Console(file=file)) as reporter:
        reporter.level = level
        reporter.print_detail("compile", "evaluation: 0.2 s, cache hit")
    line = "compile    evaluation: 0.2 s, cache hit\n"
    assert (tmp_path / "run.log").read_text()[9:] == line
    assert file.getvalue() == (line if is_printed else "")


def test_terminal_shows_the_time_that_a_task_took_before() -> None:
    console, file = screen()
    with Reporter(console=console).clock("compiling evaluation", 90.0):
        pass
    assert "2 min before" in file.getvalue()
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" * 10 in file.getvalue()


def test_remaining_time_is_of_recent_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step a second, then two: after some minutes the earlier steps hardly count."""
    now = 0.0
    monkeypatch.setattr("pipeline.core.reporter.time.monotonic", lambda: now)
    pace = RecentPace(0)
    for step in range(1, 601):
        now += 1.0
        assert pace.advance_to(step) == pytest.approx(1.0)
    for step in range(601, 1201):
        now += 2.0
        pace.advance_to(step)
    assert 1.6 < pace.advance_to(1200) < 2.0


def test_pause_hardly_changes_the_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of a minute after an hour of steps."""
    now = 0.0
    monkeypatch.setattr("pipeline.core.reporter.time.monotonic", lambda: now)
    pace = RecentPace(0)
    for step in range(1, 3601):
        now += 1.0
        pace.advance_to(step)
    now += 60.0
    assert 1.0 < pace.advance_to(3601) < 1.1


def test_bar_shows_the_remaining_time_in_days(monkeypatch: pytest.MonkeyPatch) -> None:
    console, file = screen()
    bar = Reporter(console=console).open_bar(total=140_000, done=0)
    assert bar is not None
    monkeypatch.setattr(RecentPace, "advance_to", lambda *_: 4.3)
    bar.advance_to(10, 2.3)
    bar.close()
    assert "6 days 23 h left" in file.getvalue()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, True), ({KERNEL: "12"}, False), ({"TERM": "dumb"}, False)],
)
def test_terminal_is_redrawn_unless_a_notebook_reads_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: bool
) -> None:
    monkeypatch.delenv(KERNEL, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    leader, follower = os.openpty()
    with open(leader, "rb"), open(follower, "w") as terminal:
        assert can_redraw(terminal) == expected


def test_files_are_not_redrawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(KERNEL, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with (tmp_path / "file").open("w") as file:
        assert not can_redraw(file)


def test_characters_that_the_console_lacks_are_escaped(tmp_path: Path) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Reporter(tmp_path, Console(file=file)) as reporter:
        reporter.print_lines("data/caf\u00e9")
    assert file.buffer.getvalue() == b"data/caf\\xe9\n"  # type: ignore[attr-defined]
    assert "data/caf\u00e9" in (tmp_path / "run.log").read_text(encoding="utf-8")
