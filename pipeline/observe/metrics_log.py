"""metrics.jsonl and evals.jsonl: every step and every evaluation, one object a line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from pipeline.observe.monitors import Evaluation, Quiet, writing
from pipeline.observe.strict_json import json_text
from pipeline.sink.schedule import Course
from pipeline.sink.telemetry import Telemetry, stacked

METRICS, EVALS = "metrics.jsonl", "evals.jsonl"


class MetricsLog(Quiet):
    """Appends to both files. What a killed run wrote behind boundary `first` is cut off.

    Raises RunError where a file can't be written.
    """

    def __init__(self, run_dir: Path, course: Course, first: int) -> None:
        self._course = course
        self._waiting: list[Telemetry] = []
        for name in (METRICS, EVALS):
            keep_until(run_dir / name, first)
        self._steps = (run_dir / METRICS).open("a", encoding="utf-8")
        self._evals = (run_dir / EVALS).open("a", encoding="utf-8")

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """A line for every step, once `flush` is called."""
        self._waiting.append(telemetry)

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """A line for an evaluation."""
        with writing(self._evals.name):
            self._evals.write(json_text({"step": step, **evaluation.metrics}) + "\n")

    def flush(self) -> None:
        """What was told is in the files: what a killed run has computed is there to be read."""
        waiting, self._waiting = self._waiting, []
        with writing(self._steps.name):
            if waiting:
                self._steps.write(metrics_lines(*stacked(waiting), self._course))
            self._steps.flush()
        with writing(self._evals.name):
            self._evals.flush()

    def close(self) -> None:
        """Write what is left and close both files."""
        steps, evals = self._steps, self._evals
        with writing(steps.name), steps, writing(evals.name), evals:
            self.flush()


def metrics_lines(steps: np.ndarray, records: np.ndarray, course: Course) -> str:
    """The lines of metrics.jsonl for steps, int (n,), and their records, float32 (n, 5).

    Only a step whose update was skipped says so.
    """
    before = steps - 1
    passes = before // course.steps_per_pass + 1
    sinks = before // (course.sink_steps or course.steps_per_pass) + 1
    columns = zip(
        *(numbers.tolist() for numbers in (steps, passes, sinks)),
        *map(_texts, records.T[:-1]),
        [', "skipped": true' if skipped else "" for skipped in records[:, -1].tolist()],
        strict=True,
    )
    return "".join(
        [
            f'{{"step": {step}, "pass": {pass_}, "sink": {sink}, "loss": {loss}, '
            f'"learning_rate": {rate}, "grad_norm": {norm}, "loss_scale": {scale}{skipped}}}\n'
            for step, pass_, sink, loss, rate, norm, scale, skipped in columns
        ]
    )


def _texts(numbers: np.ndarray) -> list[str]:
    """The shortest texts that read back as the same float32; null for what JSON can't say."""
    texts = list(map(str, numbers))
    for bad in np.flatnonzero(~np.isfinite(numbers)):
        texts[bad] = "null"
    return texts


def keep_until(file: Path, step: int) -> None:
    """Cut a log behind the last whole line whose step is at most `step`."""
    if not file.exists():
        return
    end = 0
    with file.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
            end += len(line)
    os.truncate(file, end)
