"""Logs that anyone may have written, read back line by line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.core.errors import DataError
from pipeline.engine.monitors.log_lines import last_step, read_last_line, read_lines

NO_STEP = (
    "nothing",
    "[1]",
    "1",
    "\x00",
    '{"loss": 1}',
    '{"step": "one"}',
    '{"step": 1.0}',
    '{"step": true}',
    '{"step": -1}',
    '{"step": 9223372036854775808}',
    '{"step": 1' + 5000 * "0" + "}",
    '{"step": 1, "x": ' + 100_000 * "[",
)
NO_NUMBER = ('"1.5"', "NaN", "Infinity", "1e999", "1e300", "-1e39", "1" + 400 * "0", "[1.5]")


@pytest.mark.parametrize("text", NO_STEP, ids=[text[:30] for text in NO_STEP])
def test_invalid_line_is_reported_with_its_number(text: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"step": 1}\n' + text + "\n")
    with pytest.raises(DataError) as caught:
        list(read_lines(log))
    said = f"{log}, line 2: isn't a step of a run; remove the file to continue without it"
    assert str(caught.value) == said


@pytest.mark.parametrize("number", NO_NUMBER)
def test_numbers_beyond_float32_are_refused(number: str, tmp_path: Path) -> None:
    """NumPy warned of 1e300, and NaN was never the same as itself."""
    log = tmp_path / "log"
    log.write_text(f'{{"step": 1, "loss": {number}}}\n')
    (line,) = read_lines(log)
    with pytest.raises(DataError, match="log, line 1: isn't a step of a run"):
        line.numbers()


def test_line_has_the_numbers_of_its_step(tmp_path: Path) -> None:
    """Only a step that was skipped says so."""
    log = tmp_path / "log"
    log.write_text('{"step": 0, "loss": 2}\n{"step": 7, "grad_norm": null, "skipped": true}\n')
    first, second = read_lines(log)
    assert (first.step, second.step) == (0, 7)
    assert first.numbers() == {"loss": 2.0}
    assert second.numbers() == {"grad_norm": None, "skipped": True}


def test_partial_last_line_is_ignored(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"step": 1}\n{"step": 2')
    assert [line.text for line in read_lines(log)] == [b'{"step": 1}\n']


def test_missing_log_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: can't be read: No such file"):
        list(read_lines(tmp_path / "nowhere"))


def test_non_regular_file_is_refused(tmp_path: Path) -> None:
    """/dev/zero has no end, and a pipe nobody writes to no beginning."""
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("zero", "pipe"):
        for read in (last_step, lambda log: list(read_lines(log))):
            with pytest.raises(DataError, match=f"{name}: isn't a regular file; remove it"):
                read(tmp_path / name)


def test_last_step_is_read_from_the_last_complete_line(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    assert last_step(log) is None
    for text, step in (("", None), ('{"step": 1', None), ('{"step": 1}\n{"st', 1)):
        log.write_text(text)
        assert last_step(log) == step
    log.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 2000)))
    assert last_step(log) == 1999


@pytest.mark.parametrize("length", [1, 3000, 4096, 5000, 20_000])
def test_last_line_up_to_a_step_may_have_any_length(tmp_path: Path, length: int) -> None:
    log = tmp_path / "metrics.jsonl"
    texts = [f'{{"step": {step}, "{"m" * length}": 1.0}}\n' for step in range(1, 8)]
    log.write_text("".join(texts))
    for last in range(1, 9):
        line = read_last_line(log, last)
        assert line is not None
        assert line.text.decode() == texts[min(last, 7) - 1].rstrip()
    assert read_last_line(log, 0) is None


def test_invalid_last_line_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1}\nnothing\n')
    with pytest.raises(DataError, match="last line: isn't a step of a run"):
        last_step(log)
