"""metrics.jsonl and evals.jsonl: every step and every evaluation, one object a line."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TextIO

import numpy as np

from pipeline.observe.log_lines import EVALS, METRICS, read_lines
from pipeline.observe.monitors import Evaluation, Quiet, writing
from pipeline.observe.strict_json import json_text
from pipeline.sink.schedule import Course
from pipeline.sink.telemetry import Telemetry, stacked


class MetricsLog(Quiet):
    """Appends to both files. What a killed run wrote behind boundary `first` is cut off.

    Raises DataError where a file that is there can't be read, RunError where it can't be written,
    or is removed while it is being written: what is written to it then goes nowhere.
    """

    def __init__(self, run_dir: Path, course: Course, first: int) -> None:
        self._course, self._first = course, first
        self._waiting: list[Telemetry] = []
        self._steps, self._evals = (_open(run_dir / name, first) for name in (METRICS, EVALS))

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """A line for every step, once `flush` is called."""
        self._waiting.append(telemetry)

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """A line for an evaluation; that of a run that was resumed behind it gives way to it."""
        with writing(self._evals.name):
            if step == self._first:
                keep_until(Path(self._evals.name), step - 1)
            self._evals.write(json_text({"step": step, **evaluation.metrics}) + "\n")

    def flush(self) -> None:
        """What was told is in the files: what a killed run has computed is there to be read."""
        waiting, self._waiting = self._waiting, []
        with writing(self._steps.name):
            if waiting:
                self._steps.write(metrics_lines(*stacked(waiting), self._course))
            _flush(self._steps)
        with writing(self._evals.name):
            _flush(self._evals)

    def close(self) -> None:
        """Write what is left and close both files."""
        steps, evals = self._steps, self._evals
        with writing(steps.name), steps, writing(evals.name), evals:
            self.flush()


def _open(path: Path, first: int) -> TextIO:
    with writing(path):
        keep_until(path, first)
        return path.open("a", encoding="utf-8")


def _flush(file: TextIO) -> None:
    """Raises OSError where the lines did not get into the file of that name."""
    file.flush()
    if not os.path.samestat(os.stat(file.name), os.fstat(file.fileno())):
        raise FileNotFoundError(errno.ENOENT, "it was replaced by another file", file.name)


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
    """Cut a log behind the last whole line whose step is at most `step`.

    Raises DataError for a line that is none of a log; nothing is cut then.
    """
    if not file.exists():
        return
    end = 0
    for line in read_lines(file):
        if line.step > step:
            break
        end += len(line.text)
    os.truncate(file, end)
