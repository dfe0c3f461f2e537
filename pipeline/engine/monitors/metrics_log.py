"""metrics.jsonl, evals.jsonl and scalars.jsonl: steps, evaluations and what callbacks log."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.files.strict_json import json_text
from pipeline.engine.monitors.kept_log import KeptLog, read_mark
from pipeline.engine.monitors.log_lines import EVALS, METRICS, SCALARS, read_lines
from pipeline.engine.monitors.log_mending import LogFindings, open_log
from pipeline.engine.monitors.monitors import Evaluation, MonitorBase, writing
from pipeline.engine.schedule import RunSchedule
from pipeline.training.telemetry import Telemetry, stacked

KEPT = "logs"
"""Key under which a checkpoint keeps the marks of the files."""


def require_logs(run_dir: Path, first: int, kept: Mapping[str, Any] | None) -> None:
    """Raise DataError where a log can't be continued after boundary `first`; `kept` as below.

    One that has a mark can be, whatever is in it.
    """
    for path in [run_dir / name for name in (METRICS, EVALS, SCALARS)]:
        if path.exists() and read_mark((kept or {}).get(path.name), first) is None:
            for line in read_lines(path):
                if line.step > first:
                    break


class MetricsLog(MonitorBase):
    """Append to the files. Lines that a killed run wrote after boundary `first` are cut.

    `kept` are the marks of the files in the checkpoint at `first`, None where the run begins there.
    There is a scalars.jsonl where the run has `scalars`, those of callbacks. Lines that the marks
    hold and the files lack are restored; `found` has the findings.

    Raises DataError where a file that is there can't be read, RunError where it can't be written,
    or is removed or changed by others while it is being written.
    """

    def __init__(
        self,
        run_dir: Path,
        run_schedule: RunSchedule,
        first: int,
        kept: Mapping[str, Any] | None = None,
        *,
        scalars: bool = False,
    ) -> None:
        self._run_schedule, self._first = run_schedule, first
        self._waiting: list[Telemetry] = []
        marks, own = kept or {}, kept is not None

        def opened(name: str) -> tuple[KeptLog, LogFindings]:
            path, mark = run_dir / name, read_mark(marks.get(name), first)
            with writing(path):
                return open_log(path, first, mark, every_step=name == METRICS, own=own)

        self._logs: dict[str, KeptLog] = {}
        self.found: list[LogFindings] = []
        with ExitStack() as failing:
            for name in (METRICS, EVALS, *([SCALARS] if scalars else [])):
                self._logs[name], findings = opened(name)
                failing.callback(self._logs[name].release)
                self.found += [findings] if findings else []
            failing.pop_all()

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Collect a line for every step, written by `flush`."""
        self._waiting.append(telemetry)

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Append a line for an evaluation; it replaces one of the same step before a resume."""
        replaced = step == self._first
        self._append(self._logs[EVALS], step, evaluation.metrics, replaced=replaced)

    def on_scalars(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Append a line for what callbacks have logged up to a boundary.

        Those of a resumed run log at later boundaries than the one where it begins, unless that is
        the start: what they had logged there before stays.
        """
        self._append(self._logs[SCALARS], step, scalars, replaced=step == self._first == 0)

    def _append(
        self, log: KeptLog, step: int, values: Mapping[str, Any], *, replaced: bool
    ) -> None:
        with writing(log.path):
            if replaced:
                log.cut(step - 1)
            log.append((json_text({"step": step, **values}) + "\n").encode())

    def flush(self) -> None:
        """Write all lines so far to the files, so that they outlive the process."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            steps = self._logs[METRICS]
            with writing(steps.path):
                lines = metrics_lines(*stacked(waiting), self._run_schedule)
                steps.append(lines.encode())
        for log in self._logs.values():
            with writing(log.path):
                log.flush()

    def marks(self, step: int) -> dict[str, Any]:
        """Return the marks of the files for the checkpoint of `step`, as JSON."""
        self.flush()
        return {name: log.mark(step).to_dict() for name, log in self._logs.items()}

    def close(self) -> None:
        """Write the rest and close the files."""
        with ExitStack() as closing_all:
            for log in self._logs.values():
                closing_all.enter_context(writing(log.path))
                closing_all.enter_context(closing(log))
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
