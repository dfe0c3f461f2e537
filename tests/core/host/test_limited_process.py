"""A child process answers, fails with one line, or ends at a limit."""

from __future__ import annotations

import pytest

from pipeline.core.host.limited_process import (
    ChildLimitError,
    ChildLimits,
    LibraryError,
    LimitedProcess,
)

LIMITS = ChildLimits(memory_bytes=4 << 30, cpu_s=20)


@pytest.fixture(scope="module")
def process() -> LimitedProcess:
    return LimitedProcess("tests.core.host.limited_library")


def test_limited_process_returns_library_answers(process: LimitedProcess) -> None:
    for content in (b"", b"abc", bytes(100_000)):
        assert process.ask(b"e", content, LIMITS) == content


def test_error_has_one_line_and_the_process_continues(process: LimitedProcess) -> None:
    with pytest.raises(LibraryError, match=r"\Abad file\Z"):
        process.ask(b"f", b"bad file", LIMITS)
    with pytest.raises(ImportError, match="no module named parser"):
        process.ask(b"i", b"", LIMITS)
    assert process.ask(b"e", b"abc", LIMITS) == b"abc"


@pytest.mark.parametrize(
    ("kind", "limits", "message"),
    [
        (b"m", LIMITS, r"takes more than \d+\.\d GB of memory"),
        pytest.param(
            b"c",
            ChildLimits(4 << 30, 1),
            "takes more than 1 s of processor time",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_exceeded_limit_ends_the_process(kind: bytes, limits: ChildLimits, message: str) -> None:
    process = LimitedProcess("tests.core.host.limited_library")
    with pytest.raises(ChildLimitError, match=message):
        process.ask(kind, b"", limits)
    # The next request, with other limits, says why there is no process.
    later = message.replace("takes more", "has ended, since an earlier request took more")
    with pytest.raises(ChildLimitError, match=later):
        process.ask(b"e", b"", ChildLimits(1 << 30, 7))
