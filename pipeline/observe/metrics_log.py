"""metrics.jsonl and evals.jsonl: every step and every evaluation, one object a line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from pipeline.observe.monitors import Evaluation, Quiet
from pipeline.observe.strict_json import json_text
from pipeline.sink.schedule import Course
from pipeline.sink.telemetry import Telemetry

METRICS, EVALS = "metrics.jsonl", "evals.jsonl"


class MetricsLog(Quiet):
    """Appends to both files. What a killed run wrote behind boundary `first` is cut off."""

    def __init__(self, run_dir: Path, course: Course, first: int) -> None:
        self._course = course
        for name in (METRICS, EVALS):
            keep_until(run_dir / name, first)
        self._steps = (run_dir / METRICS).open("a", encoding="utf-8")
        self._evals = (run_dir / EVALS).open("a", encoding="utf-8")

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """A line for every step, on disk before the next chunk is dispatched."""
        self._steps.write("".join(self._lines(telemetry)))
        self._steps.flush()

    def _lines(self, telemetry: Telemetry) -> list[str]:
        steps = np.arange(telemetry.start, telemetry.start + len(telemetry))
        passes = steps // self._course.steps_per_pass + 1
        sinks = steps // (self._course.sink_steps or self._course.steps_per_pass) + 1
        columns = zip(
            (steps + 1).tolist(),
            passes.tolist(),
            sinks.tolist(),
            map(_number, telemetry.loss),
            map(_number, telemetry.learning_rate),
            map(_number, telemetry.grad_norm),
            map(_number, telemetry.loss_scale),
            strict=True,
        )
        return [
            f'{{"step": {step}, "pass": {pass_}, "sink": {sink}, "loss": {loss}, '
            f'"learning_rate": {rate}, "grad_norm": {norm}, "loss_scale": {scale}}}\n'
            for step, pass_, sink, loss, rate, norm, scale in columns
        ]

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """A line for an evaluation."""
        self._evals.write(json_text({"step": step, **evaluation.metrics}) + "\n")
        self._evals.flush()

    def close(self) -> None:
        """Close both files."""
        self._steps.close()
        self._evals.close()


def _number(value: np.float32) -> str:
    """The shortest text that reads back as the same float32; null for what JSON can't say."""
    return str(value) if np.isfinite(value) else "null"


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
