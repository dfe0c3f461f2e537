from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from pipeline.config.recipe import LogLevel
from pipeline.core.reporter import Reporter
from pipeline.engine.monitors.log_lines import (
    LEVELS,
    choose_log_settings,
    log_by_level,
)


@pytest.mark.parametrize(
    ("chosen", "environment", "expected"),
    [
        (None, {}, ("warning", "console", [])),
        (None, {"GLOG_v": "0"}, ("debug", "console", [])),
        (None, {"GLOG_v": "1"}, ("info", "console", [])),
        (None, {"GLOG_v": "2"}, ("warning", "console", [])),
        (None, {"GLOG_v": "3"}, ("error", "console", [])),
        (None, {"GLOG_v": "4"}, ("error", "console", [])),
        ("error", {"GLOG_v": "0"}, ("error", "console", [])),
        (None, {"GLOG_logtostderr": "1"}, ("warning", "stderr", [])),
        (None, {"GLOG_logtostderr": "0", "GLOG_v": "1"}, ("info", "file", [])),
    ],
)
def test_recipe_takes_precedence_over_the_environment(
    chosen: LogLevel | None, environment: dict[str, str], expected: tuple[str, str, list[str]]
) -> None:
    assert choose_log_settings(chosen, environment) == expected


def test_every_level_can_be_set_by_a_recipe() -> None:
    assert get_args(LogLevel) == LEVELS


@pytest.mark.parametrize("value", ["", "5", "-1", "INFO", "1\x1b"])
def test_invalid_variable_is_reported(value: str) -> None:
    level, _, (problem,) = choose_log_settings(None, {"GLOG_v": value})
    assert level == "warning"
    assert problem.startswith("GLOG_v = ")
    assert problem.endswith("must be 0 (debug), 1 (info), 2 (warning), 3 or 4")
    _, _, problems = choose_log_settings(None, {"GLOG_logtostderr": value})
    assert "\x1b" not in "".join(problems)


def spoken(level: LogLevel | None, run_dir: Path) -> tuple[str, str]:
    """What a reporter prints, and what run.log has, of a message of each kind."""
    file = io.StringIO()
    with Reporter(run_dir, Console(file=file)) as reporter, log_by_level(reporter, level):
        logging.getLogger("pipeline.stages").debug("a dispatch")
        logging.getLogger("jax._src").info("a compilation")
        reporter.warn("a warning")
        reporter.print_lines("a line")
    return file.getvalue(), (run_dir / "run.log").read_text()


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        ("debug", ["debug      a dispatch", "info       a compilation"]),
        ("info", ["info       a compilation"]),
        ("warning", []),
    ],
)
def test_level_prints_messages_as_severe_or_more(
    level: LogLevel, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOG_logtostderr", raising=False)
    printed, _ = spoken(level, tmp_path)
    assert printed.splitlines() == [*lines, "warning    a warning", "a line"]


@pytest.mark.parametrize(("number", "lines"), [(0, 4), (1, 3), (2, 2), (3, 1)])
def test_number_of_the_variable_sets_what_is_printed(
    number: int, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-07: 0 prints debug messages, 3 no warnings. A recipe's level takes precedence."""
    monkeypatch.delenv("GLOG_logtostderr", raising=False)
    monkeypatch.setenv("GLOG_v", str(number))
    assert len(spoken(None, tmp_path)[0].splitlines()) == lines
    assert len(spoken("debug", tmp_path)[0].splitlines()) == 4


def test_warnings_are_only_in_the_log_at_level_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOG_logtostderr", raising=False)
    printed, kept = spoken("error", tmp_path)
    assert printed == "a line\n"
    assert "warning    a warning" in kept


def test_messages_go_to_the_place_of_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOG_logtostderr", "1")
    printed, kept = spoken("info", tmp_path)
    assert printed == "a line\n"
    assert capsys.readouterr().err.splitlines() == [
        "info       a compilation",
        "warning    a warning",
    ]
    monkeypatch.setenv("GLOG_logtostderr", "0")
    assert spoken("info", tmp_path)[0] == "a line\n"
    assert capsys.readouterr().err == ""
    assert kept.count("a warning") == 1


def test_loggers_are_restored(tmp_path: Path) -> None:
    loggers = [logging.getLogger(name) for name in ("pipeline", "jax")]
    before = [(one.level, one.propagate, list(one.handlers)) for one in loggers]
    spoken("debug", tmp_path)
    assert [(one.level, one.propagate, list(one.handlers)) for one in loggers] == before
