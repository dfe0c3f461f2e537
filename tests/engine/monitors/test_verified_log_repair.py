from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.engine.monitors import verified_log
from pipeline.engine.monitors.verified_log import LogFindings, Mark, VerifiedLog, open_log
from tests.engine.monitors.test_verified_log import line, lines

TAIL = 3
"""So many lines are in the mark."""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mark:
    """That of ten steps; the file is there."""
    monkeypatch.setattr(verified_log, "TAIL_BYTES", len(lines(8, 10)) + 2)
    with closing(VerifiedLog(tmp_path / "metrics.jsonl", has_all_steps=True)) as log:
        log.append(lines(1, 10))
        return log.mark(10)


def reopen(folder: Path, mark: Mark | None, step: int = 10) -> LogFindings:
    log, found = open_log(folder / "metrics.jsonl", step, mark, has_all_steps=True, resumed=True)
    with closing(log):
        return found


def swap(text: bytes, one: int, other: int) -> bytes:
    return (
        text.replace(line(one), b"\1").replace(line(other), line(one)).replace(b"\1", line(other))
    )


MENDED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda text: lines(1, 9), "lines of step 10 are"),
    "truncated in a line": (lambda text: text[:-30], "lines of steps 9 to 10 are"),
    "nulls": (lambda text: lines(1, 8) + bytes(40), "lines of steps 9 to 10 are"),
    "nulls, then a line": (lambda text: lines(1, 8) + bytes(40) + line(10), "of step 9 are"),
    "a gap in the tail": (lambda text: text.replace(line(9), b""), "lines of step 9 are"),
    "another number": (lambda text: text.replace(b"0.9", b"0.8"), "lines of step 9 are"),
    "its start twice": (lambda text: lines(1, 9) + text, "it is complete again"),
    "a step twice": (lambda text: lines(1, 4) + line(4) + lines(5, 10), "it is complete again"),
    "CR LF": (lambda text: text.replace(b"\n", b"\r\n"), "it is complete again"),
    "a byte order mark": (lambda text: b"\xef\xbb\xbf" + text, "it is complete again"),
    "rubbish": (lambda text: lines(1, 5) + b"\xff\n\n[]\n" + lines(6, 10), "it is complete again"),
    "out of order": (lambda text: swap(text, 9, 10), "it is complete again"),
}


@pytest.mark.parametrize("how", MENDED)
def test_lines_in_the_checkpoint_are_restored(how: str, mark: Mark, tmp_path: Path) -> None:
    change, text = MENDED[how]
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(change(lines(1, 10)))
    found = reopen(tmp_path, mark)
    assert file.read_bytes() == lines(1, 10)
    assert found.is_changed
    assert not found.flaws
    assert text in str(found)
    assert not reopen(tmp_path, mark)
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


LOST: dict[str, tuple[Callable[[bytes], bytes], bytes, tuple[tuple[int, int], ...]]] = {
    "a gap": (lambda text: text.replace(lines(3, 5), b""), lines(1, 2) + lines(6, 10), ((3, 5),)),
    "the start": (lambda text: lines(3, 10), lines(3, 10), ((1, 2),)),
    "all but the start": (lambda text: line(1), line(1) + lines(8, 10), ((2, 7),)),
    "all": (lambda text: b"", lines(8, 10), ((1, 7),)),
    "gaps": (
        lambda text: line(1) + line(3) + line(5),
        line(1) + line(3) + line(5) + lines(8, 10),
        ((2, 2), (4, 4), (6, 7)),
    ),
    "nulls in the middle": (
        lambda text: text.replace(lines(3, 5), bytes(len(lines(3, 5)))),
        lines(1, 2) + lines(6, 10),
        ((3, 5),),
    ),
}


@pytest.mark.parametrize("how", LOST)
def test_lost_lines_are_reported_and_damaged_log_is_set_aside(
    how: str, mark: Mark, tmp_path: Path
) -> None:
    change, left, missing = LOST[how]
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(change(lines(1, 10)))
    found = reopen(tmp_path, mark)
    assert file.read_bytes() == left
    assert found.flaws.missing == missing
    assert found.flaws.missing_lines == sum(b - a + 1 for a, b in missing)
    first, last = missing[0]
    named = f"step {first}" if first == last else f"steps {first} to {last}"
    assert named in str(found)
    aside = tmp_path / "damaged-metrics.jsonl-1"
    assert (found.set_aside == aside.name) is (how != "all")
    assert how == "all" or aside.read_bytes() == change(lines(1, 10))


def test_removed_log_is_reported(mark: Mark, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").unlink()
    found = reopen(tmp_path, mark)
    assert found.flaws.missing == ((1, 7),)
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines(8, 10)


def test_mark_of_more_bytes_than_the_file_does_not_extend_it(mark: Mark, tmp_path: Path) -> None:
    """Checkpoints may be of strangers, and a mark without a tail has a hash of the file alone."""
    longer = replace(mark, size_bytes=mark.size_bytes + 50, tail=b"")
    assert reopen(tmp_path, longer).is_changed
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines(1, 10)


def test_changed_numbers_are_reported_without_their_lines(mark: Mark, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(lines(1, 10).replace(b"0.3", b"0.2"))
    found = reopen(tmp_path, mark)
    assert (found.flaws.missing, found.flaws.verified) == ((), False)
    assert "some of its lines differ from what was written" in str(found)
    assert (tmp_path / "damaged-metrics.jsonl-1").exists()


def test_missing_lines_are_reported_by_every_later_resume(mark: Mark, tmp_path: Path) -> None:
    """Else the run would end done, and only the life before would have said it."""
    (tmp_path / "metrics.jsonl").write_bytes(lines(5, 10))
    log, first = open_log(tmp_path / "metrics.jsonl", 10, mark, has_all_steps=True, resumed=True)
    with closing(log):
        log.append(lines(11, 12))
        mark = log.mark(12)
    second = reopen(tmp_path, mark, 12)
    assert first.flaws == second.flaws
    assert second.flaws.missing == ((1, 4),)
    assert "4 lines are missing: steps 1 to 4" in str(second)
    assert second.set_aside is None


def test_gaps_are_reported_without_a_mark(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(lines(2, 3) + lines(6, 12))
    found = reopen(tmp_path, None, 11)
    assert (found.flaws.missing, found.flaws.missing_lines) == (((1, 1), (4, 5)), 3)
    assert file.read_bytes() == lines(2, 3) + lines(6, 11)
    file.write_bytes(lines(1, 9))
    assert reopen(tmp_path, None, 11).flaws.missing == ((10, 11),)


def test_missing_evaluations_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "evals.jsonl"
    with closing(VerifiedLog(path, has_all_steps=False)) as log:
        log.append(line(5) + line(10) + line(15))
        mark = log.mark(15)
    path.write_bytes(line(10))
    log, found = open_log(path, 15, mark, has_all_steps=False, resumed=True)
    log.close()
    assert path.read_bytes() == line(5) + line(10) + line(15)
    assert found.restored == ((5, 5), (15, 15))
    mark = Mark(mark.size_bytes, 3, mark.sha256, line(15))
    path.write_bytes(line(10) + line(20))
    log, found = open_log(path, 20, mark, has_all_steps=False, resumed=True)
    log.close()
    assert path.read_bytes() == line(10) + line(15) + line(20)
    assert "a line is missing" in str(found)
    assert found.to_dict() == {
        "missing": (),
        "missing_lines": 1,
        "verified": False,
        "restored": ((15, 15),),
        "set_aside": "damaged-evals.jsonl-1",
    }
