from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import DataError, RunError
from pipeline.engine.callbacks.callback import Evaluation
from pipeline.engine.monitors.metrics_log import MetricsLog
from pipeline.engine.monitors.verified_log import VerifiedLog
from pipeline.engine.schedule import RunSchedule
from pipeline.training.telemetry import Telemetry
from tests.engine.monitors.disk import files_end_at
from tests.engine.monitors.test_monitors import EVALUATION
from tests.step_rows import telemetry_of

COURSE = RunSchedule(total=12, steps_per_epoch=5, sink_steps=3)


def telemetry(start: int, *losses: float) -> Telemetry:
    return telemetry_of(start, np.array([[loss, 0.1, 2.5, 1, 0] for loss in losses]))


def read(file: Path) -> list[dict[str, object]]:
    """Strict JSON: NaN and Infinity, which it does not have, are refused."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]


@contextmanager
def log(run_dir: Path, first: int = 0, run_schedule: RunSchedule = COURSE) -> Iterator[MetricsLog]:
    opened = MetricsLog(run_dir, run_schedule, first)
    try:
        yield opened
    finally:
        opened.close()


def test_line_has_the_step_pass_and_sink(tmp_path: Path) -> None:
    with log(tmp_path) as monitor:
        monitor.on_steps(telemetry(2, 0.5, 0.25, 0.125, 0.0), 1.0)
    lines = read(tmp_path / "metrics.jsonl")
    assert lines[0] == {
        "step": 3,
        "epoch": 1,
        "sink": 1,
        "loss": 0.5,
        "learning_rate": 0.1,
        "grad_norm": 2.5,
        "loss_scale": 1.0,
    }
    places = [(line["step"], line["epoch"], line["sink"]) for line in lines]
    assert places == [(3, 1, 1), (4, 1, 2), (5, 1, 2), (6, 2, 2)]


def test_only_a_skipped_step_is_marked(tmp_path: Path) -> None:
    """P-01 (7): an overflow's gradient is no number, and training went on."""
    rows = np.array([[1, 0.1, 2.5, 8, 0], [1, 0.1, np.inf, 8, 1], [1, 0.1, 2.5, 4, 0]])
    with log(tmp_path) as monitor:
        monitor.on_steps(telemetry_of(0, rows), 1.0)
    lines = read(tmp_path / "metrics.jsonl")
    assert [line.get("skipped") for line in lines] == [None, True, None]
    assert lines[1]["grad_norm"] is None


def test_sink_is_an_epoch_without_sinks(tmp_path: Path) -> None:
    with log(tmp_path, run_schedule=RunSchedule(12, 5, None)) as monitor:
        monitor.on_steps(telemetry(4, 1.0, 1.0), 1.0)
    assert [line["sink"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2]


def test_lines_are_on_disk_after_flush(tmp_path: Path) -> None:
    """The steps of a killed run are in the file."""
    with log(tmp_path) as monitor:
        monitor.on_steps(telemetry(0, 1.0), 1.0)
        monitor.on_eval(1, EVALUATION)
        monitor.flush()
        assert len(read(tmp_path / "metrics.jsonl")) == len(read(tmp_path / "evals.jsonl")) == 1


def test_lines_do_not_depend_on_how_steps_are_split(tmp_path: Path) -> None:
    """And flushing twice writes nothing twice."""
    losses = np.random.default_rng(0).exponential(size=12)
    with log(tmp_path) as monitor:
        monitor.on_steps(telemetry(0, *losses), 1.0)
    (tmp_path / "split").mkdir()
    with log(tmp_path / "split") as monitor:
        for step, loss in enumerate(losses):
            monitor.on_steps(telemetry(step, loss), 1.0)
            if step % 5 == 0:
                monitor.flush()
        monitor.flush()
        monitor.flush()
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    assert whole.count(b"\n") == 12
    assert (tmp_path / "split" / "metrics.jsonl").read_bytes() == whole


def test_write_error_names_the_file(tmp_path: Path) -> None:
    with files_end_at(50), pytest.raises(RunError) as caught, log(tmp_path) as monitor:
        monitor.on_steps(telemetry(0, 1.0), 1.0)
    assert str(caught.value) == f"{tmp_path / 'metrics.jsonl'}: can't be written: File too large"


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_numbers_round_trip_as_float32(losses: list[float]) -> None:
    with TemporaryDirectory() as folder, log(Path(folder)) as monitor:
        monitor.on_steps(telemetry(0, *losses), 1.0)
        monitor.flush()
        lines = read(Path(folder) / "metrics.jsonl")
    read_back = np.array([line["loss"] for line in lines], np.float32)
    assert read_back.tobytes() == np.array(losses, np.float32).tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_without_json_form_are_null(tmp_path: Path, value: float) -> None:
    with log(tmp_path) as monitor:
        monitor.on_steps(telemetry(0, 1.0, value), 1.0)
    assert [line["loss"] for line in read(tmp_path / "metrics.jsonl")] == [1.0, None]


def test_evaluation_is_a_line_with_all_metrics(tmp_path: Path) -> None:
    with log(tmp_path) as monitor:
        monitor.on_eval(5, EVALUATION)
    assert read(tmp_path / "evals.jsonl") == [{"step": 5, **EVALUATION.metrics}]


def test_non_finite_evaluation_is_valid_json(tmp_path: Path) -> None:
    diverged = Evaluation({**EVALUATION.metrics, "loss": float("nan")}, EVALUATION.confusion)
    with log(tmp_path) as monitor:
        monitor.on_eval(5, diverged)
    (line,) = read(tmp_path / "evals.jsonl")
    assert line["loss"] is None


def test_resumed_run_removes_lines_after_its_start(tmp_path: Path) -> None:
    with log(tmp_path) as before:
        before.on_steps(telemetry(0, 5.0, 4.0, 3.0, 2.0), 1.0)
        before.on_eval(2, EVALUATION)
        before.on_eval(4, EVALUATION)
    with log(tmp_path, first=2) as after:
        after.on_steps(telemetry(2, 3.0), 1.0)
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [line["step"] for line in read(tmp_path / "evals.jsonl")] == [2]


@pytest.mark.parametrize(("unfinished", "values"), [(True, [1, 3]), (False, [1, 2, 3])])
def test_scalars_of_an_unfinished_boundary_are_replaced(
    unfinished: bool, values: list[float], tmp_path: Path
) -> None:
    """Those after the last checkpoint of a boundary that is done stay."""
    with closing(MetricsLog(tmp_path, COURSE, 0, has_scalars=True)) as log:
        log.on_scalars(4, {"value": 1.0})
        marks = log.marks(8)
    for value in (2.0, 3.0):
        with closing(
            MetricsLog(tmp_path, COURSE, 8, marks, has_scalars=True, is_unfinished=unfinished)
        ) as log:
            log.on_scalars(8, {"value": value})
    assert [line["value"] for line in read(tmp_path / "scalars.jsonl")] == values


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"step": 1}\n{"step": 2}\n{"step": 3}\n', 2),
        ('{"step": 1}\n{"step": 2}\n', 2),
        ('{"step": 1}\n{"ste', 1),
        ('{"step": 1}\n{"step": 2}', 1),
        ('{"step": 7}\n', 0),
        ("", 0),
    ],
    ids=["later", "nothing to remove", "half a line", "no line end", "all later", "empty"],
)
def test_truncation_keeps_complete_lines_of_earlier_steps(
    tmp_path: Path, text: str, kept: int
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(text)
    with closing(VerifiedLog(file, has_all_steps=True)) as verified_log:
        verified_log.truncate(2)
    assert file.read_text() == "".join(line + "\n" for line in text.split("\n")[:kept])


def test_log_with_an_invalid_line_is_not_truncated(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\nnothing\n')
    message = r"metrics\.jsonl, line 2: isn't a step of a run; remove"
    with pytest.raises(DataError, match=message):
        MetricsLog(tmp_path, COURSE, 5)
    assert file.read_text() == '{"step": 1}\nnothing\n'


@pytest.mark.parametrize("replaced", [False, True])
def test_removed_file_is_reported_by_the_next_flush(tmp_path: Path, replaced: bool) -> None:
    """Else its lines would go nowhere, and nobody would know."""
    file = tmp_path / "metrics.jsonl"
    monitor = MetricsLog(tmp_path, COURSE, 0)
    monitor.flush()
    file.unlink()
    if replaced:
        file.touch()
    monitor.on_steps(telemetry(0, 1.0), 1.0)
    with pytest.raises(RunError, match=r"metrics\.jsonl: can't be written: "):
        monitor.flush()
    with pytest.raises(RunError):
        monitor.close()
