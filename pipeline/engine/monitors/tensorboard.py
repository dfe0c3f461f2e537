"""The events of a run for TensorBoard: scalars of steps, evaluations, images, the recipe, a sweep's
hparams, and on request histograms of weights and gradients, the network's graph and embeddings."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from pipeline.backends.base import Estimate
from pipeline.core.errors import printable
from pipeline.core.files.atomic_write import convert_write_errors
from pipeline.core.host.tensorboardx import import_tensorboardx
from pipeline.data.columns import IMAGES, SampleUnit
from pipeline.engine.callbacks.callback import TRAINED, Evaluation, Monitor, SinkReport, metric_tag
from pipeline.engine.monitors.tensorboard_files import (
    PICTURED_CHANNELS,
    EventFile,
    add_captions,
    find_purging,
    stretch_range,
    write_embeddings,
)
from pipeline.training.telemetry import Telemetry, concatenate_columns

if TYPE_CHECKING:
    from tensorboardX.proto.summary_pb2 import Summary

ROLLBACK_TAG = "train/updates_undone"
CELL_PIXELS = 24
"""Side of a cell of a confusion matrix with at most 100 classes."""
MAX_PICTURED_CLASSES = 1000
"""Largest number of classes of a confusion matrix that is drawn."""
MAX_NAMES = 10_000
"""Largest number of classes whose names are written."""
BINS = 64
"""Number of bins of a histogram, all of equal width."""


@dataclass(frozen=True)
class BoardNode:
    """An operation or an input of the network."""

    name: str
    """Path, unique in the graph. TensorBoard groups nodes with the same first parts."""
    op: str
    inputs: tuple[str, ...]
    """Names of the nodes whose results the node reads."""
    shape: tuple[int, ...]
    """Shape of the first result."""
    dtype: str


Histogram = Mapping[str, Any]
"""Range and sums of finite values, and their number in each bin: fields of a HistogramProto."""


class TensorBoard(Monitor):
    """Writes the events of a run.

    A resumed run hides the events that earlier processes wrote for steps after `first`. If
    `is_unfinished`, the evaluation at `first` is repeated, and files of processes that continued
    from `first` and were killed are removed, since their events are written again.

    Steps and sinks are collected, and written together by `flush`. Methods raise RunError if the
    folder can't be written.
    """

    def __init__(
        self,
        folder: Path,
        first: int,
        batch_size: int,
        estimate: Estimate | None = None,
        unit: SampleUnit = IMAGES,
        *,
        is_unfinished: bool = False,
    ) -> None:
        import_tensorboardx()
        self._folder = folder
        self._first = first
        self._units_per_step = batch_size * unit.per_sample
        self._estimate = estimate
        self._is_unfinished = is_unfinished
        self._speed_tags = (f"train/{unit.speed_unit}_per_s",)
        self._steps: list[tuple[float, Telemetry]] = []
        self._sinks: list[tuple[float, SinkReport]] = []
        self._rollbacks: list[tuple[float, int, int]] = []
        """Time since 1970 in seconds, step, and number of undone updates."""
        self._has_charts = False

    @cached_property
    def _file(self) -> EventFile:
        suffix = f".{self._first}"
        with convert_write_errors(self._folder):
            repeated = []
            if self._first and self._is_unfinished:
                repeated = find_purging(self._folder, self._first, suffix)
            file = EventFile(self._folder, suffix)
            if self._first:
                file.purge_after(self._first)
            for path in repeated:
                path.unlink(missing_ok=True)
        return file

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Add an event for every step with all its scalars, and one for each flag that is set."""
        self._steps.append((time.time(), telemetry))

    def on_sink(self, report: SinkReport) -> None:
        """Add the throughput of a sink, and the times of a modelled device."""
        self._sinks.append((time.time(), report))

    def on_scalars(self, step: int, scalars: Mapping[str, float | None]) -> None:
        with convert_write_errors(self._folder):
            values = {f"callback/{name}": value for name, value in scalars.items()}
            self._add_scalars(step, time.time(), values)

    def on_rollback(self, step: int, to: int) -> None:
        self._rollbacks.append((time.time(), step, step - to))

    def flush(self) -> None:
        """Write the steps and sinks since the last flush."""
        steps = self._steps
        self._steps = []
        sinks = self._sinks
        self._sinks = []
        rollbacks = self._rollbacks
        self._rollbacks = []
        with convert_write_errors(self._folder):
            if steps:
                self._write_steps(steps)
            if sinks:
                self._write_sinks(sinks)
            for wall_time, step, undone in rollbacks:
                self._add_scalars(step, wall_time, {ROLLBACK_TAG: undone})
            self._file.flush()

    def _add_scalars(self, step: int, wall_time: float, values: Mapping[str, float | None]) -> None:
        """Add an event with values by tag."""
        row = np.array([list(values.values())], np.float64)
        self._file.add_scalars([*values], np.array([step]), np.array([wall_time]), row)

    def _write_steps(self, timed: list[tuple[float, Telemetry]]) -> None:
        parts = [telemetry for _, telemetry in timed]
        steps = np.concatenate([part.steps for part in parts])
        wall_times = np.repeat([wall_time for wall_time, _ in timed], [len(part) for part in parts])
        columns = {f"train/{name}": column for name, column in concatenate_columns(parts).items()}
        numbers = {tag: column for tag, column in columns.items() if column.dtype != bool}
        values = np.stack([*numbers.values()], axis=1)
        self._file.add_scalars([*numbers], steps, wall_times, values)
        for tag, column in columns.items():
            if column.dtype == bool:
                ones = np.ones((column.sum(), 1), np.float32)
                self._file.add_scalars([tag], steps[column], wall_times[column], ones)

    def _write_sinks(self, timed: list[tuple[float, SinkReport]]) -> None:
        steps = np.array([report.step for _, report in timed])
        wall_times = np.array([wall_time for wall_time, _ in timed])
        per_s = [
            self._units_per_step * report.steps / max(report.seconds, 1e-9) for _, report in timed
        ]
        self._file.add_scalars(self._speed_tags, steps, wall_times, np.array(per_s)[:, None])
        if self._estimate is not None:
            rows = [_model_times(self._estimate, step) for step in steps.tolist()]
            values = np.array([list(row.values()) for row in rows])
            self._file.add_scalars([*rows[0]], steps, wall_times, values)

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Add the scalar metrics, macro averages included, and the confusion matrix."""
        self.flush()
        scalars = evaluation.scalars()
        now = time.time()
        if not self._has_charts:
            self._add_charts(tuple(scalars))
        # It would have the tag of the loss of every step, `train/loss`.
        scalars.pop(f"{TRAINED}loss", None)
        with convert_write_errors(self._folder):
            values = {metric_tag(name): value for name, value in scalars.items()}
            self._add_scalars(step, now, values)
        confusion = evaluation.confusion
        if confusion is not None and len(confusion) <= MAX_PICTURED_CLASSES:
            self._add_picture("eval/confusion", draw_confusion(confusion), step, "HWC")

    def add_recipe(self, recipe: Mapping[str, Any]) -> None:
        """Add the resolved recipe as text."""
        from tensorboardX.summary import text

        lines = yaml.safe_dump(dict(recipe), sort_keys=False).splitlines()
        self._add(text("recipe", "".join(f"    {line}\n" for line in lines)), 0)

    def _add_charts(self, names: Sequence[str]) -> None:
        """Add a chart for each metric, with its curves in training and in evaluation."""
        from tensorboardX.summary import custom_scalars

        self._has_charts = True
        charts = {
            name: ["Multiline", [f"train/{name}$", f"eval/{name}$"]]
            for name in map(re.escape, names)
            if not name.startswith(TRAINED)
        }
        self._add(custom_scalars({"train and eval": charts}), 0)

    def add_classes(self, names: Sequence[str]) -> None:
        """Add the names of the classes in the order of their labels, as text."""
        from tensorboardX.summary import text

        # Indented as code, since the text is Markdown and names may look like markup.
        lines = [f"    {label}  {printable(name)}" for label, name in enumerate(names[:MAX_NAMES])]
        self._add(text("classes", "\n".join(lines)), 0)

    def add_images(self, images: np.ndarray, labels: Sequence[str] = ()) -> None:
        """Add training images (n, H, W, C), as the map ops return them, with labels as captions.

        The range of each image's values is stretched to 0 to 255. Images with other than 1, 3 or 4
        channels are left out.
        """
        if len(images) and images.shape[-1] in PICTURED_CHANNELS:
            pictures = stretch_range(images)
            if labels:
                pictures = add_captions(pictures, labels)
            self._add_picture("train/images", pictures, 0)

    def add_predictions(
        self, step: int, images: np.ndarray, captions: Sequence[str], wrong: Sequence[bool]
    ) -> None:
        """Add evaluation images (n, H, W, C) with captions, red for `wrong` predictions."""
        if images.shape[-1] in PICTURED_CHANNELS:
            pictures = add_captions(stretch_range(images), captions, wrong)
            self._add_picture("eval/predictions", pictures, step)

    def add_masks(self, step: int, pictures: np.ndarray) -> None:
        """Add pictures of predicted masks, uint8 (n, H, W, 3), one by one."""
        for number, picture in enumerate(pictures):
            self._add_picture(f"eval/masks/{number}", picture, step, "HWC")

    def add_generated(self, step: int, pictures: np.ndarray) -> None:
        """Add a grid of generated images, uint8 (n, H, W, 3)."""
        self._add_picture("eval/generated", pictures, step)

    def add_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Add histograms after `step` steps, by name."""
        from tensorboardX.proto.summary_pb2 import HistogramProto, Summary

        values = [
            Summary.Value(tag=name, histo=HistogramProto(**histogram))
            for name, histogram in histograms.items()
        ]
        self.flush()
        self._add(Summary(value=values), step)

    def add_graph(self, nodes: Sequence[BoardNode]) -> None:
        """Add the graph of the network."""
        from tensorboardX.proto.event_pb2 import Event

        with convert_write_errors(self._folder):
            encoded = encode_graph(nodes)
            self._file.add(Event(wall_time=time.time(), graph_def=encoded))

    def add_embeddings(
        self, vectors: np.ndarray, labels: Sequence[str], images: np.ndarray | None
    ) -> None:
        """Write files for the projector: vectors, float32 (n, features), their labels, and images
        (n, H, W, C) or None."""
        with convert_write_errors(self._folder):
            write_embeddings(self._folder, vectors, labels, images)

    def add_hparams(self, parameters: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Add this run's row of the hparams table; nothing without parameters."""
        from tensorboardX.summary import hparams

        if not parameters:
            return
        cells = {
            key: value if isinstance(value, bool | str | float | int) else str(value)
            for key, value in parameters.items()
        }
        for summary in hparams(cells, {f"eval/{name}": value for name, value in metrics.items()}):
            self._add(summary, 0)

    def _add_picture(self, tag: str, pixels: np.ndarray, step: int, axes: str = "NHWC") -> None:
        from tensorboardX.summary import image

        self._add(image(tag, pixels, dataformats=axes), step)

    def _add(self, summary: Summary, step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event

        with convert_write_errors(self._folder):
            self._file.add(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Write the remaining events and close the file."""
        try:
            self.flush()
        finally:
            with convert_write_errors(self._folder):
                self._file.close()


def _model_times(estimate: Estimate, steps: int) -> dict[str, float]:
    """Return the modelled times of a step, and of all steps so far, by tag."""
    low, high = estimate.interval_ms
    return {
        "modelled/step_ms": estimate.step_ms,
        "modelled/step_ms_low": low,
        "modelled/step_ms_high": high,
        "modelled/samples_per_s": estimate.samples_per_s,
        "modelled/elapsed_s": estimate.step_ms * steps / 1e3,
    }


def draw_confusion(confusion: np.ndarray) -> np.ndarray:
    """Draw counts (true, predicted) as RGB, uint8 (H, W, 3), each shaded by its share of the row.

    With at most 20 classes, cells have their counts. With more than 100, cells are 4 x 4 pixels.
    """
    from PIL import Image, ImageDraw

    classes = confusion.shape[0]
    share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    # From white for no sample of the row to blue for all of them.
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


def make_histogram(values: np.ndarray) -> Histogram | None:
    """Return the histogram of an array of floats of any shape; None if no value is finite."""
    # In float64, since sums of 16-bit types are too coarse and squares of float32 may overflow.
    flat = np.asarray(values).reshape(-1).astype(np.float64)
    finite = flat[np.isfinite(flat)]
    if not finite.size:
        return None
    try:
        counts, edges = np.histogram(finite, BINS)
    except ValueError:
        # Too few float64 numbers lie between the least and the greatest value for BINS edges.
        counts = np.array([finite.size])
        edges = np.array([finite.min(), finite.max()])
    return {
        "min": float(finite.min()),
        "max": float(finite.max()),
        "num": finite.size,
        "sum": float(finite.sum()),
        "sum_squares": float(finite @ finite),
        "bucket_limit": edges[1:].tolist(),  # upper ends of the bins
        "bucket": counts.tolist(),
    }


def encode_graph(nodes: Sequence[BoardNode]) -> bytes:
    """Return a GraphDef of nodes as bytes. TensorBoard shows a node's shape at its edges."""
    from tensorboardX.proto.attr_value_pb2 import AttrValue
    from tensorboardX.proto.graph_pb2 import GraphDef
    from tensorboardX.proto.node_def_pb2 import NodeDef
    from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboardX.proto.versions_pb2 import VersionDef

    def encode_node(node: BoardNode) -> NodeDef:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in node.shape])
        shapes = AttrValue(list=AttrValue.ListValue(shape=[shape]))
        attributes = {"_output_shapes": shapes, "dtype": AttrValue(s=node.dtype.encode())}
        return NodeDef(name=node.name, op=node.op, input=node.inputs, attr=attributes)

    graph = GraphDef(node=map(encode_node, nodes), versions=VersionDef(producer=22))
    encoded: bytes = graph.SerializeToString()
    return encoded
