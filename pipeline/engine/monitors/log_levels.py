"""Log levels: the messages that are shown besides a run's lines, and their destination.

MindSpore's environment variables `GLOG_v` and `GLOG_logtostderr` set both. Messages are a run's
warnings, and messages from this package and jax by Python's `logging`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Literal

from pipeline.core.files.value_text import show
from pipeline.core.reporter import Reporter

LogPlace = Literal["console", "stderr", "file"]
LEVELS = ("debug", "info", "warning", "error")
"""Names of the levels that GLOG_v numbers from 0 on."""
LEVEL_VARIABLE = "GLOG_v"
STDERR_VARIABLE = "GLOG_logtostderr"
LOGGERS = ("pipeline", "jax")
"""Loggers whose messages are shown."""


def choose_log_settings(
    level: str | None, environment: Mapping[str, str]
) -> tuple[str, LogPlace, list[str]]:
    """Return the least severe level that is shown, the destination besides run.log, and texts about
    variables with invalid values, which are ignored.

    The level is the recipe's `level`, or GLOG_v's if that is None. GLOG_logtostderr=1 sends
    messages to stderr, 0 only to run.log.
    """
    problems = []
    numbers = {**dict(zip("0123", LEVELS, strict=True)), "4": "error"}
    value = environment.get(LEVEL_VARIABLE)
    if level is None and value is not None:
        level = numbers.get(value)
        if level is None:
            problems.append(
                f"{LEVEL_VARIABLE} = {show(value)}: "
                "must be 0 (debug), 1 (info), 2 (warning), 3 or 4"
            )
    to_stderr = environment.get(STDERR_VARIABLE)
    if to_stderr not in (None, "0", "1"):
        problems.append(f"{STDERR_VARIABLE} = {show(to_stderr)}: must be 0 or 1")
    places: Mapping[str | None, LogPlace] = {"1": "stderr", "0": "file"}
    place = places.get(to_stderr, "console")
    return level or "warning", place, problems


class ReporterHandler(logging.Handler):
    """Passes messages on to the reporter of a run."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message with its level."""
        try:
            text = record.getMessage()
        except Exception:  # The arguments don't match the message, which must not end a run.
            self.handleError(record)
            return
        self._reporter.log(record.levelno, record.levelname.lower(), text)


@contextmanager
def log_by_level(reporter: Reporter, level: str | None) -> Iterator[None]:
    """Show messages by the recipe's level and the environment, during the body.

    If the level is debug or info, messages of `LOGGERS` are shown too.
    """
    name, reporter.log_to, problems = choose_log_settings(level, os.environ)
    reporter.level = getattr(logging, name.upper())
    if problems:
        reporter.warn(f"{'; '.join(problems)}; it is ignored")
    with ExitStack() as stack:
        if reporter.level < logging.WARNING:
            handler = ReporterHandler(reporter)
            for logger in LOGGERS:
                stack.enter_context(handle_messages(logger, handler, reporter.level))
        yield


@contextmanager
def handle_messages(name: str, handler: logging.Handler, level: int) -> Iterator[None]:
    """Pass the messages of a logger from `level` on to `handler`, during the body, and not to the
    root, to which absl, which orbax imports, adds a handler."""
    logger = logging.getLogger(name)
    earlier_level = logger.level
    propagates = logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(earlier_level)
        logger.propagate = propagates
