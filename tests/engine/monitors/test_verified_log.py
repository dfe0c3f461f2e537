from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pipeline.engine.monitors import verified_log
from pipeline.engine.monitors.verified_log import Mark, VerifiedLog, read_mark


def line(step: int) -> bytes:
    return f'{{"step": {step}, "loss": 0.{step}}}\n'.encode()


def lines(first: int, last: int) -> bytes:
    return b"".join(map(line, range(first, last + 1)))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[VerifiedLog]:
    with closing(VerifiedLog(tmp_path / "metrics.jsonl", has_all_steps=True)) as opened:
        yield opened


def of(text: bytes, tail: bytes) -> Mark:
    return Mark(len(text), text.count(b"\n"), hashlib.sha256(text).hexdigest(), tail)


@pytest.mark.parametrize("block", [1, 3, 10, 100])
def test_mark_covers_the_file_and_has_its_last_lines(
    block: int, log: VerifiedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the lines came, and however often one was asked for."""
    monkeypatch.setattr(verified_log, "TAIL_BYTES", len(lines(97, 100)) + 3)
    for first in range(1, 101, block):
        last = min(100, first + block - 1)
        log.append(lines(first, last))
        log.mark(last)
    assert log.mark(100) == log.mark(100) == of(lines(1, 100), lines(97, 100))


def test_mark_covers_lines_up_to_its_step(log: VerifiedLog) -> None:
    log.append(lines(1, 5))
    assert log.mark(4) == of(lines(1, 4), lines(1, 4))
    assert log.mark(5) == of(lines(1, 5), lines(1, 5))


def test_line_longer_than_the_tail_is_only_in_the_digest(
    log: VerifiedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified_log, "TAIL_BYTES", 10)
    log.append(lines(1, 2))
    assert log.mark(2) == of(lines(1, 2), b"")
    log.append(lines(3, 3))
    assert log.mark(3) == of(lines(1, 3), b"")


@pytest.mark.parametrize("tail_bytes", [10, 60, 1000])
def test_log_continues_from_a_mark(
    tail_bytes: int, log: VerifiedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later lines of a killed run are removed; the marks to come are those of an unbroken log."""
    monkeypatch.setattr(verified_log, "TAIL_BYTES", tail_bytes)
    log.append(lines(1, 10))
    mark = log.mark(10)
    log.append(lines(11, 20) + b'{"step": 2')
    log._file.flush()
    with closing(VerifiedLog(log.path, has_all_steps=True)) as resumed:
        assert resumed.continue_from(mark, 10)
        assert log.path.read_bytes() == lines(1, 10)
        assert resumed.mark(10) == mark
        resumed.append(lines(11, 15))
        assert resumed.mark(15).sha256 == hashlib.sha256(lines(1, 15)).hexdigest()
        resumed.flush()
        assert log.path.read_bytes() == lines(1, 15)
    log._size_bytes = len(lines(1, 15))


def test_evaluation_after_the_last_checkpoint_is_preserved(tmp_path: Path) -> None:
    """The end of a run is evaluated once all is saved."""
    log = VerifiedLog(tmp_path / "evals.jsonl", has_all_steps=False)
    log.append(line(10) + line(20))
    mark = log.mark(20)
    log.append(line(30) + line(40) + line(35))
    log.close()
    with closing(VerifiedLog(log.path, has_all_steps=False)) as resumed:
        assert resumed.continue_from(mark, 30)
        resumed.flush()
        assert log.path.read_bytes() == line(10) + line(20) + line(30)
        assert resumed.mark(30) == of(
            line(10) + line(20) + line(30), line(10) + line(20) + line(30)
        )


@pytest.mark.parametrize("change", ["shorter", "longer", "empty"])
def test_log_changed_by_another_process_is_detected(change: str, log: VerifiedLog) -> None:
    log.append(lines(1, 3))
    log.flush()
    text = {"shorter": lines(1, 2), "longer": lines(1, 4), "empty": b""}[change]
    log.path.write_bytes(text)
    with pytest.raises(OSError, match="another process has changed it"):
        log.flush()
    log.path.write_bytes(lines(1, 3))


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("size_bytes", -1),
        ("size_bytes", 1.5),
        ("size_bytes", True),
        ("lines", 0),
        ("sha256", 3),
        ("tail", None),
        ("tail", "no line\n"),
        ("tail", '{"step": 1}'),
        ("tail", '{"step": 2}\n{"step": 1}\n'),
        ("tail", '{"step": 9}\n'),
        ("tail", "\ud800\n"),
        ("flaws", None),
        ("flaws", {"missing": 3, "missing_lines": 0, "verified": True}),
        ("flaws", {"missing": [[1]], "missing_lines": 0, "verified": True}),
        ("flaws", {"missing": [], "missing_lines": -1, "verified": True}),
        ("flaws", {"missing": [], "missing_lines": 0, "verified": None}),
    ],
)
def test_invalid_mark_is_ignored(change: str, value: Any) -> None:
    """Checkpoints may be of strangers."""
    tree = json.loads(json.dumps(of(lines(1, 3), lines(2, 3)).to_dict()))
    assert read_mark(tree, 3) == of(lines(1, 3), lines(2, 3))
    assert read_mark({**tree, change: value}, 3) is None
    assert read_mark(None, 3) is None


def test_resuming_parses_only_the_tail(log: VerifiedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the log is, so that a long run is resumed as fast as a short one."""
    monkeypatch.setattr(verified_log, "TAIL_BYTES", 100)
    parsed: list[bytes] = []
    parse = verified_log.parse_line
    log.append(lines(1, 5000))
    mark = log.mark(5000)
    log._file.flush()
    monkeypatch.setattr(
        verified_log, "parse_line", lambda text, where: parsed.append(text) or parse(text, where)
    )
    with closing(VerifiedLog(log.path, has_all_steps=True)) as resumed:
        assert resumed.continue_from(mark, 5000)
    assert len(parsed) <= 5
