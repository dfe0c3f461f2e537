"""The benchmark of telemetry: that it writes what a run writes, and the table."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks import telemetry
from benchmarks.telemetry import Cost, make_rows
from pipeline.engine.monitors.log_lines import METRICS, read_lines
from tests.step_rows import NAMES

STEPS = 40


@pytest.mark.slow
def test_telemetry_timing_includes_writing_both_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_rows(STEPS)
    sizes = []
    written_bytes = telemetry._sum_file_bytes

    def look(folder: Path, steps: int) -> int:
        lines = list(read_lines(folder / METRICS))
        assert [line.step for line in lines] == [*range(1, STEPS + 1)]
        losses = np.array([line.fields["loss"] for line in lines], np.float32)
        np.testing.assert_array_equal(losses, rows[:, 0])
        size = (folder / METRICS).stat().st_size
        if board := next(folder.glob("events.*"), None):
            events = EventAccumulator(str(board), size_guidance={"scalars": 0}).Reload()
            for name, column in zip(NAMES[:-1], rows.T, strict=False):
                shown = [event.value for event in events.Scalars(f"train/{name}")]
                np.testing.assert_array_equal(np.array(shown, np.float32), column)
            size += board.stat().st_size
        sizes.append(size)
        assert written_bytes(folder, steps) == size
        return size

    monkeypatch.setattr(telemetry, "_sum_file_bytes", look)
    monkeypatch.setattr(sys, "argv", ["telemetry", f"--steps={STEPS}", "--rounds=1"])
    telemetry.main()
    said = capsys.readouterr().out
    assert f"\n    python -m benchmarks.telemetry --steps {STEPS} --rounds 1\n" in said
    assert [size for size in sizes if size > min(sizes)] == sizes[:1]
    assert "\n| metrics.jsonl and TensorBoard | " in said
    assert "\n| metrics.jsonl alone | " in said


@pytest.mark.parametrize(
    ("last", "line"),
    [(STEPS - 1, "sink 1"), (STEPS, "warning    TensorBoard failed and has ended")],
)
def test_unwritten_telemetry_is_an_error(tmp_path: Path, last: int, line: str) -> None:
    (tmp_path / METRICS).write_text(f'{{"step": {last}}}\n')
    (tmp_path / "run.log").write_text(f"00:00:00 {line}\n")
    with pytest.raises(SystemExit, match=f"not all of {STEPS} steps was written\n.*{line}"):
        telemetry._sum_file_bytes(tmp_path, STEPS)


def test_telemetry_rows_are_medians() -> None:
    costs = [Cost(30.0, 50.0, 2_000_000), Cost(20.0, 90.0, 2_000_000), Cost(70.0, 40.0, 2_000_000)]
    text = telemetry.report(10_000, {"both": costs})
    assert text.startswith("# Telemetry of a sink of 10,000 steps\n")
    assert "Medians of 3 rounds" in text
    assert "| both | 50.0 | 40.0 to 90.0 | 30 | 2.00 |" in text
