"""metrics.jsonl and evals.jsonl: every step and every evaluation, one object a line."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.files.strict_json import json_text
from pipeline.observe.kept_log import KeptLog, read_mark
from pipeline.observe.log_mending import LogFindings, open_log
from pipeline.observe.monitors import Evaluation, MonitorBase, writing
from pipeline.runner.record.log_lines import EVALS, METRICS
from pipeline.sink.schedule import RunSchedule
from pipeline.sink.telemetry import Telemetry, stacked

KEPT = "logs"
"""Key under which a checkpoint keeps the marks of both files."""


class MetricsLog(MonitorBase):
    """Append to both files. Lines that a killed run wrote after boundary `first` are cut.

    `kept` are the marks of both files in the checkpoint at `first`, None where the run begins
    there. Lines that the marks hold and the files lack are restored; `found` has the findings.

    Raises DataError where a file that is there can't be read, RunError where it can't be written,
    or is removed or changed by others while it is being written.
    """

    def __init__(
        self,
        run_dir: Path,
        run_schedule: RunSchedule,
        first: int,
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        self._run_schedule, self._first = run_schedule, first
        self._waiting: list[Telemetry] = []
        marks, own = kept or {}, kept is not None

        def opened(name: str) -> tuple[KeptLog, LogFindings]:
            path, mark = run_dir / name, read_mark(marks.get(name), first)
            with writing(path):
                return open_log(path, first, mark, every_step=name == METRICS, own=own)

        with ExitStack() as failing:
            self._steps, steps_found = opened(METRICS)
            failing.callback(self._steps.release)
            self._evals, evals_found = opened(EVALS)
            failing.pop_all()
        self.found = [findings for findings in (steps_found, evals_found) if findings]

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Collect a line for every step, written by `flush`."""
        self._waiting.append(telemetry)

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Append a line for an evaluation; it replaces one of the same step before a resume."""
        with writing(self._evals.path):
            if step == self._first:
                self._evals.cut(step - 1)
            line = json_text({"step": step, **evaluation.metrics}) + "\n"
            self._evals.append(line.encode())

    def flush(self) -> None:
        """Write all lines so far to the files, so that they outlive the process."""
        waiting, self._waiting = self._waiting, []
        with writing(self._steps.path):
            if waiting:
                lines = metrics_lines(*stacked(waiting), self._run_schedule)
                self._steps.append(lines.encode())
            self._steps.flush()
        with writing(self._evals.path):
            self._evals.flush()

    def marks(self, step: int) -> dict[str, Any]:
        """Return the marks of both files for the checkpoint of `step`, as JSON."""
        self.flush()
        return {log.path.name: log.mark(step).to_dict() for log in (self._steps, self._evals)}

    def close(self) -> None:
        """Write the rest and close both files."""
        steps, evals = self._steps, self._evals
        with (
            writing(steps.path),
            closing(steps),
            writing(evals.path),
            closing(evals),
        ):
            self.flush()


def metrics_lines(steps: np.ndarray, records: np.ndarray, run_schedule: RunSchedule) -> str:
    """Return the lines of metrics.jsonl for steps, int (n,), and records, float32 (n, 5).

    Only a step whose update was skipped has the key `skipped`.
    """
    before = steps - 1
    passes = before // run_schedule.steps_per_pass + 1
    sinks = before // (run_schedule.sink_steps or run_schedule.steps_per_pass) + 1
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
    """Return the shortest texts that read back as the same float32; null if not finite."""
    texts = list(map(str, numbers))
    for bad in np.flatnonzero(~np.isfinite(numbers)):
        texts[bad] = "null"
    return texts
