"""Errors of an action reported on stderr, each as one message, and its exit status."""

from __future__ import annotations

import select
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from pipeline.core.errors import (
    PipelineError,
    UsageError,
    find_absent_part,
    get_exit_status,
    printable_lines,
    redirect_to_null,
)

READER_LEFT = 128 + signal.SIGPIPE
"""Exit status that a shell shows for `cat` or `ls` whose reader has left, as `head` does."""


def report_errors(action: Callable[[], int], *, debug: bool) -> int:
    """Run an action and return its exit status; print an error as one message on stderr.

    READER_LEFT if the reader of stdout has closed it, else the status of `get_exit_status`.
    Stdout is flushed before the return. If it can't be written, further output is discarded.
    """
    try:
        status = action()
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        status = get_exit_status(error)
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        # rich has redirected stdout to the null device, and would end the process with 1.
        return READER_LEFT
    except Exception as error:
        if isinstance(error, BrokenPipeError) and is_unread(sys.stdout):
            redirect_to_null(sys.stdout)
            return READER_LEFT
        if debug:
            traceback.print_exc()
        if (part := find_absent_part(error)) is not None:
            error = UsageError([part], "isn't installed, and this command or recipe needs it")
        message = str(error)
        if not isinstance(error, PipelineError):
            text = printable_lines(f"{type(error).__name__}: {error}")
            message = f"{text} (debug=true shows the traceback)"
        print(f"error: {message}", file=sys.stderr)
        status = get_exit_status(error)
    try:
        sys.stdout.flush()
    except OSError as error:
        redirect_to_null(sys.stdout)
        if isinstance(error, BrokenPipeError):
            return status or READER_LEFT
        if status == 0:
            print(f"error: the output can't be written: {error.strerror}", file=sys.stderr)
        return status or get_exit_status(error)
    return status


def is_unread(stream: IO[str]) -> bool:
    """Return whether a stream is a pipe whose reader has closed it. Other pipes may break, too."""
    with suppress(OSError, ValueError, AttributeError):
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # 0: nothing but errors and hang-ups
        return bool(poll.poll(0))
    return False
