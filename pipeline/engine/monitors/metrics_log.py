"""metrics.jsonl, evals.jsonl and scalars.jsonl: steps, evaluations and scalars of callbacks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.files.atomic_write import convert_write_errors, format_json
from pipeline.engine.callbacks.callback import Evaluation, Monitor
from pipeline.engine.monitors.log_lines import EVALS, METRICS, SCALARS, read_lines
from pipeline.engine.monitors.verified_log import LogFindings, VerifiedLog, open_log, read_mark
from pipeline.engine.schedule import RunSchedule
from pipeline.training.telemetry import Telemetry, concatenate_columns


def require_logs(run_dir: Path, first: int, marks: Mapping[str, Any] | None) -> None:
    """Raise DataError if a log can't be continued after boundary `first`.

    `marks` are as for `MetricsLog`. A log with a mark can always be continued.
    """
    for path in [run_dir / name for name in (METRICS, EVALS, SCALARS)]:
        if path.exists() and read_mark((marks or {}).get(path.name), first) is None:
            for line in read_lines(path):  # Raises DataError for an invalid line.
                if line.step > first:
                    break


class MetricsLog(Monitor):
    """Appends to the files. Lines that a killed run wrote after boundary `first` are removed.

    `marks` are from the checkpoint at `first`, by file; None if the run begins there. The files are
    repaired by the marks, with reports in `findings`. `has_scalars` adds scalars.jsonl.
    `is_unfinished`: the evaluation at `first` is repeated, and its scalars are logged again. If
    `run_schedule` is None, lines have neither `epoch` nor `sink`.

    Raises DataError if an existing file can't be read, RunError if it can't be written, or if
    another process removes or changes it meanwhile.
    """

    def __init__(
        self,
        run_dir: Path,
        run_schedule: RunSchedule | None,
        first: int,
        marks: Mapping[str, Any] | None = None,
        *,
        has_scalars: bool = False,
        is_unfinished: bool = False,
    ) -> None:
        self._run_schedule = run_schedule
        self._first = first
        self._unwritten: list[Telemetry] = []
        self._logs: dict[str, VerifiedLog] = {}
        self.findings: list[LogFindings] = []
        names = (METRICS, EVALS, SCALARS) if has_scalars else (METRICS, EVALS)
        with ExitStack() as on_failure:
            for name in names:
                path = run_dir / name
                mark = read_mark((marks or {}).get(name), first)
                # The checkpoint of an unfinished boundary stores the boundary's scalars, so this
                # process writes their line, even if an earlier one has written it.
                last = first - 1 if name == SCALARS and is_unfinished else first
                with convert_write_errors(path):
                    self._logs[name], findings = open_log(
                        path, last, mark, has_all_steps=name == METRICS, resumed=marks is not None
                    )
                on_failure.callback(self._logs[name].release)
                if findings:
                    self.findings.append(findings)
            on_failure.pop_all()

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Collect a line for every step, which `flush` writes."""
        self._unwritten.append(telemetry)

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Append a line for an evaluation; at boundary `first`, replace the line of that step."""
        is_again = step == self._first
        self._append(self._logs[EVALS], step, evaluation.metrics, replaces_line=is_again)

    def on_scalars(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Append a line of the scalars that callbacks have logged; at step 0, replace its line."""
        is_again = step == self._first == 0
        self._append(self._logs[SCALARS], step, scalars, replaces_line=is_again)

    def _append(
        self, log: VerifiedLog, step: int, values: Mapping[str, Any], *, replaces_line: bool
    ) -> None:
        with convert_write_errors(log.path):
            if replaces_line:
                log.truncate(step - 1)
            log.append((format_json({"step": step, **values}) + "\n").encode())

    def flush(self) -> None:
        """Write all lines so far to the files."""
        unwritten = self._unwritten
        self._unwritten = []
        if unwritten:
            log = self._logs[METRICS]
            with convert_write_errors(log.path):
                log.append(metrics_lines(unwritten, self._run_schedule).encode())
        for log in self._logs.values():
            with convert_write_errors(log.path):
                log.flush()

    def marks(self, step: int) -> dict[str, Any]:
        """Return the marks of the files for the checkpoint of `step`, as JSON."""
        self.flush()
        return {name: log.mark(step).to_dict() for name, log in self._logs.items()}

    def close(self) -> None:
        """Write the remaining lines and close the files."""
        with ExitStack() as logs:
            for log in self._logs.values():
                logs.enter_context(convert_write_errors(log.path))
                logs.enter_context(closing(log))
            self.flush()


def metrics_lines(parts: Sequence[Telemetry], run_schedule: RunSchedule | None) -> str:
    """Return the lines of metrics.jsonl: for each step its position, numbers and flags.

    Without a schedule, the position is only the step. A flag is a bool column; only steps at which
    it is true have its key.
    """
    steps = np.concatenate([part.steps for part in parts])
    places = {"step": steps}
    if run_schedule is not None:
        places["epoch"] = (steps - 1) // run_schedule.steps_per_epoch + 1
        sink_steps = run_schedule.sink_steps or run_schedule.steps_per_epoch
        places["sink"] = (steps - 1) // sink_steps + 1
    columns = concatenate_columns(parts)
    flags = {name: column for name, column in columns.items() if column.dtype == bool}
    numbers = {name: column for name, column in columns.items() if column.dtype != bool}
    texts = [(name, list(map(str, column.tolist()))) for name, column in places.items()]
    # The json module takes three times as long, and writes more digits than a float32 has.
    texts += [(name, _format_numbers(column)) for name, column in numbers.items()]
    lines = [""] * len(steps)
    for name, column_texts in texts:
        start = f", {json.dumps(name)}: "
        lines = [line + start + text for line, text in zip(lines, column_texts, strict=True)]
    for name, flag in flags.items():
        for index in np.flatnonzero(flag):
            lines[index] += f", {json.dumps(name)}: true"
    return "".join([f"{{{line.removeprefix(', ')}}}\n" for line in lines])


def _format_numbers(numbers: np.ndarray) -> list[str]:
    """Return the shortest texts that are read as the same float32; null if not finite."""
    texts = list(map(str, numbers))
    for index in np.flatnonzero(~np.isfinite(numbers)):
        texts[index] = "null"
    return texts
