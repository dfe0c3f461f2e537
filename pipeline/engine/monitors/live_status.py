"""Files of a run that change while it trains: its status, one JSON object, which the command `runs`
reads, and the names of the files that TensorBoard's projector reads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pipeline.core.files.atomic_write import format_json, write_whole
from pipeline.core.files.value_text import format_duration
from pipeline.engine.callbacks.callback import Evaluation, Monitor
from pipeline.training.telemetry import Telemetry

STATUS = "status.json"
"""File in the run directory. A run removes it at its end, when summary.json has the results."""
BOARD_CONFIG = "projector_config.pbtxt"
BOARD_FOLDER = "embeddings"
"""Configuration and folder of TensorBoard's projector."""
INTERVAL_S = 1.0
"""Least seconds between two writes."""


@dataclass(frozen=True)
class LiveStatus:
    """The content of the file, after `step` of `steps` steps."""

    step: int
    steps: int
    loss: float | None
    """The last step's loss; None if it isn't finite."""
    step_ms: float
    """Milliseconds of a step in the last dispatch."""
    left_s: float
    """Seconds until the end, at the mean speed so far with evaluations and checkpoints."""
    evaluation: Mapping[str, float | None] | None
    """Metrics of the last evaluation, and its `step`."""
    written: str
    """Time of the write, ISO 8601."""

    def __str__(self) -> str:
        parts = [f"step {self.step:,} of {self.steps:,}", f"{self.step_ms:.4g} ms a step"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.5g}")
        metrics = dict(self.evaluation or {})
        step = metrics.pop("step", None)
        texts = [f"{name} {value:.4f}" for name, value in metrics.items() if value is not None]
        if texts and step is not None:
            parts.append(f"{', '.join(texts[:2])} at step {step:,.0f}")
        return ", ".join([*parts, f"{format_duration(self.left_s)} left"])


@dataclass
class StatusMonitor(Monitor):
    """Writes the live status, at most once in `INTERVAL_S`."""

    run_dir: Path
    total: int
    """Steps of the run."""
    first: int
    """Boundary from which the run continues."""
    started_at: float = field(default_factory=time.monotonic)
    written_at: float = float("-inf")
    evaluation: Mapping[str, float] | None = None

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        now = time.monotonic()
        if now - self.written_at < INTERVAL_S:
            return
        self.written_at = now
        step = telemetry.start + len(telemetry)
        elapsed_s = now - self.started_at
        status = LiveStatus(
            step=step,
            steps=self.total,
            loss=float(telemetry.loss[-1]),
            step_ms=1000 * seconds / len(telemetry),
            left_s=elapsed_s / max(step - self.first, 1) * (self.total - step),
            evaluation=self.evaluation,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_whole(self.run_dir / STATUS, format_json(asdict(status)) + "\n")

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Note the evaluation for the next write."""
        self.evaluation = {"step": step, **evaluation.scalars()}

    def on_length(self, total: int) -> None:
        self.total = total

    def close(self) -> None:
        """Remove the file."""
        (self.run_dir / STATUS).unlink(missing_ok=True)
