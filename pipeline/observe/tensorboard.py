"""TensorBoard: every step's scalars, evaluations, sample images, the recipe, a sweep's hparams."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image, ImageDraw
from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.summary import hparams

from pipeline.backends.base import Estimate
from pipeline.observe.monitors import Evaluation, Quiet, SinkReport
from pipeline.sink.telemetry import Telemetry

SCALARS = ("loss", "learning_rate", "grad_norm", "loss_scale")
CELL_PIXELS = 24
PICTURED_CHANNELS = (1, 3, 4)
PICTURED_CLASSES = 1000


class TensorBoard(Quiet):
    """Writes `tensorboard/` of a run; on resume, what was written behind `first` is purged."""

    def __init__(
        self, folder: Path, first: int, batch_size: int, estimate: Estimate | None = None
    ) -> None:
        purge = first + 1 if first else None
        # The suffix keeps a run resumed within the second from overwriting the file before.
        self._writer = SummaryWriter(
            str(folder), purge_step=purge, max_queue=10_000, filename_suffix=f".{first}"
        )
        self._batch_size = batch_size
        self._estimate = estimate

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """One event for every step with all its scalars: a quarter of the cost of one each."""
        writer, now = self._writer.file_writer, time.time()
        columns = [getattr(telemetry, name).tolist() for name in SCALARS]
        for offset, row in enumerate(zip(*columns, strict=True)):
            values = [
                Summary.Value(tag=f"train/{name}", simple_value=value)
                for name, value in zip(SCALARS, row, strict=True)
            ]
            step = telemetry.start + offset + 1
            event = Event(wall_time=now, step=step, summary=Summary(value=values))
            writer.add_event(event, step=step, walltime=now)

    def on_sink(self, report: SinkReport) -> None:
        """The throughput of a sink; beside it that of the device that is modelled."""
        images_per_s = self._batch_size * report.steps / max(report.seconds, 1e-9)
        self._writer.add_scalar("train/images_per_s", images_per_s, report.step)
        if self._estimate is not None:
            for name, value in _modelled(self._estimate, report.step).items():
                self._writer.add_scalar(f"modelled/{name}", value, report.step)

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """The metrics that are single numbers, macro averages, and the confusion matrix."""
        for name, value in evaluation.scalars().items():
            self._writer.add_scalar(f"eval/{name}", value, step)
        if len(evaluation.confusion) <= PICTURED_CLASSES:
            picture = confusion_picture(evaluation.confusion)
            self._writer.add_image("eval/confusion", picture, step, dataformats="HWC")
        self._writer.flush()

    def add_recipe(self, recipe: Mapping[str, Any]) -> None:
        """The resolved recipe as text."""
        text = yaml.safe_dump(dict(recipe), sort_keys=False)
        indented = "".join(f"    {line}\n" for line in text.splitlines())
        self._writer.add_text("recipe", indented, 0)

    def add_images(self, images: np.ndarray) -> None:
        """Training images (n, H, W, C) as the ops leave them, each stretched to its own range.

        What has other than 1, 3 or 4 channels is no picture and is left out.
        """
        if images.shape[-1] not in PICTURED_CHANNELS:
            return
        low, high = images.min(axis=(1, 2, 3)), images.max(axis=(1, 2, 3))
        span = np.maximum(high - low, 1e-12)
        shown = (images - low[:, None, None, None]) / span[:, None, None, None]
        self._writer.add_images("train/images", shown, 0, dataformats="NHWC")

    def add_hparams(self, parameters: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """This run's row in the hparams table; written into the run itself, not one beside it."""
        plain = {key: _plain(value) for key, value in parameters.items()}
        for summary in hparams(plain, {f"eval/{name}": value for name, value in metrics.items()}):
            self._writer.file_writer.add_summary(summary)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def _modelled(estimate: Estimate, steps: int) -> dict[str, float]:
    """What the device takes for a step, and would have taken for all steps so far."""
    low, high = estimate.interval_ms
    return {
        "step_ms": estimate.step_ms,
        "step_ms_low": low,
        "step_ms_high": high,
        "samples_per_s": estimate.samples_per_s,
        "elapsed_s": estimate.step_ms * steps / 1e3,
    }


def confusion_picture(confusion: np.ndarray) -> np.ndarray:
    """Counts (true, predicted) as an RGB picture, uint8 (H, W, 3): each row is shaded by share.

    Counts are written into the cells up to 20 classes; beyond 100 a cell is 4 pixels wide.
    """
    classes = confusion.shape[0]
    share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    shade = (255 * (1 - share[..., None] * np.array([0.9, 0.6, 0.2]))).astype(np.uint8)
    cell = CELL_PIXELS if classes <= 100 else 4
    picture = Image.fromarray(shade).resize((classes * cell, classes * cell), Image.Resampling.BOX)
    if classes <= 20:
        pen = ImageDraw.Draw(picture)
        for true, predicted in np.argwhere(confusion > 0):
            centre = ((predicted + 0.5) * cell, (true + 0.5) * cell)
            ink = "white" if share[true, predicted] > 0.5 else "black"
            pen.text(centre, str(int(confusion[true, predicted])), fill=ink, anchor="mm")
    return np.asarray(picture)


def _plain(value: Any) -> bool | str | float | int:
    return value if isinstance(value, bool | str | float | int) else str(value)
