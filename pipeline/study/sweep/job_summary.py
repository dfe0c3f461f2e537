"""The part of a job's summary.json that a sweep reads."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from pipeline.core.errors import exit_status_of
from pipeline.core.files.bounded_read import read_json
from pipeline.stages.record.run_directory import SUMMARY
from pipeline.study.sweep.directory import read_kept


class Modelled(BaseModel):
    """Figures of an emulated device's model, for the table."""

    model_config = ConfigDict(frozen=True)

    sink_size: int | None = None
    step_ms: float | None = None
    samples_per_s: float | None = None
    bound: str | None = None


class Times(BaseModel):
    """Times of a run, for the table."""

    model_config = ConfigDict(frozen=True)

    step_ms: float | None = None
    train_s: float | None = None


class JobSummary(BaseModel):
    """The result of a job."""

    model_config = ConfigDict(frozen=True)

    status: str
    reason: str | None = None
    exit_status: int | None = None
    steps: int | None = None
    metrics: dict[str, Any] = Field(default_factory=dict)
    time: Times = Times()
    modelled: Modelled = Modelled()

    @property
    def exits_with(self) -> int:
        """The exit status of the job's command; 1 for a job that has not ended."""
        return exit_status_of(self.status) if self.exit_status is None else self.exit_status

    def metric(self, name: str) -> float | None:
        """A metric as one number; the macro average of a metric with a value per class."""
        value = self.metrics.get(name)
        value = value.get("macro") if isinstance(value, dict) else value
        return float(value) if isinstance(value, int | float) else None

    def numbers(self) -> dict[str, float]:
        """The metrics that are a finite number, by name."""
        values = {name: self.metric(name) for name in self.metrics}
        return {name: v for name, v in values.items() if v is not None and isfinite(v)}


def read_summary(job_dir: Path) -> JobSummary | None:
    """Read the result of a job; None without a summary. Raises DataError if it can't be read."""
    return read_kept(job_dir / SUMMARY, read_json, JobSummary)
