"""Pictures of a report: samples, sheets with two lines of text below each, charts of logs."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw

from pipeline.core.pages.charts import Curve, draw_curves
from pipeline.core.pages.page import HEADS, Drawing
from pipeline.data.mask_colours import draw_masks
from pipeline.engine.monitors.tensorboard_files import PICTURED_CHANNELS

MAX_SIDE = 192
"""The longer side of a picture has at most this many pixels."""
CELL = 128
CAPTION = 34
GAP = 8
"""Edge of a cell, height of its two lines and distance of cells in a sheet, in pixels."""
COLUMNS = 6
WIDE = 2.5
"""Pictures that are at least this many times as wide as high get cells of three columns."""
MASK_GAP = 2
"""Pixels between an image and its masks."""
PARTS = ("image", "true mask", "predicted mask")
"""Names of the parts of a picture that `join_masks` returns."""
UNCOUNTED = "not counted"
"""Name of mask values that aren't classes."""
SWATCH = 12
"""Edge of a colour of a sheet's legend, in pixels."""
MAX_LINE = 20
"""A line below a picture of the sheet has at most this many characters."""
HEADLINES = ("accuracy", "micro_f1", "r2")
"""Metrics for the chart, by priority: the first that the run logged is drawn."""

Log = Mapping[str, np.ndarray]
"""The columns of metrics.jsonl or evals.jsonl by name, one of which is `step`."""


def can_picture(shape: Sequence[int]) -> bool:
    """Whether samples of a shape (height, width, channels) can be shown as images."""
    return len(shape) == 3 and shape[-1] in PICTURED_CHANNELS and min(shape[:2]) > 1


def picture(sample: np.ndarray) -> Image.Image:
    """Convert an image (H, W, C) to a picture.

    The range of numbers is scaled to 0 to 255, except bytes, unless all are below 32, such as in
    scans with 4 bits per pixel.
    """
    values = np.asarray(sample)
    if values.dtype != np.uint8 or 0 < values.max(initial=0) < 32:
        finite = np.nan_to_num(values.astype(np.float64))
        span = max(float(np.ptp(finite)), 1e-12)
        values = ((finite - finite.min()) / span * 255).astype(np.uint8)
    image = Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values)
    if max(image.size) > MAX_SIDE:
        image.thumbnail((MAX_SIDE, MAX_SIDE))
    return image


def list_mask_colours(masks: Iterable[np.ndarray], names: Sequence[str]) -> dict[str, str]:
    """Return the names of the classes in masks by colour, as `#rrggbb`, in the order of classes.

    The last is the colour of values that aren't classes, if the masks have any.
    """
    values = {int(value) for mask in masks for value in np.unique(mask)}
    classes = sorted(value for value in values if 0 <= value < len(names))
    words = [names[value] for value in classes]
    if len(classes) < len(values):
        classes.append(len(names))
        words.append(UNCOUNTED)
    colours = draw_masks(np.array(classes, np.intp), len(names))
    return {f"#{bytes(colour).hex()}": word for colour, word in zip(colours, words, strict=True)}


def join_masks(
    image: Image.Image, true: np.ndarray, predicted: np.ndarray, classes: int
) -> Image.Image:
    """Return a picture, its true and its predicted mask, int (H, W), side by side in one size."""
    width, height = image.size
    strip = Image.new("RGB", (3 * width + 2 * MASK_GAP, height), "white")
    strip.paste(image.convert("RGB"), (0, 0))
    for place, mask in enumerate((true, predicted), start=1):
        colours = Image.fromarray(draw_masks(mask, classes))
        scaled = colours.resize((width, height), Image.Resampling.NEAREST)
        strip.paste(scaled, (place * (width + MASK_GAP), 0))
    return strip


def png(image: Image.Image) -> bytes:
    """Return the bytes of a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def sheet(
    pictures: Sequence[Image.Image],
    captions: Sequence[tuple[str, str]],
    legend: Mapping[str, str] | None = None,
) -> Image.Image:
    """Arrange pictures in rows, with two lines of text below each. Cells are wider than high if
    pictures are, as those with masks are. `legend` has words by colour, for a list at the end."""
    aspect = max(image.width / image.height for image in pictures)
    columns = min(COLUMNS if aspect < WIDE else COLUMNS // 3, len(pictures))
    cell_width = CELL if aspect < WIDE else 3 * CELL + 2 * GAP
    rows = -(-len(pictures) // columns)
    width = columns * (cell_width + GAP) + GAP
    height = rows * (CELL + CAPTION + GAP) + GAP
    legend = legend or {}
    room = len(legend) * (SWATCH + GAP)
    result = Image.new("RGB", (width, height + room), "white")
    pen = ImageDraw.Draw(result)
    for number, (colour, words) in enumerate(legend.items()):
        y = height + number * (SWATCH + GAP)
        pen.rectangle((GAP, y, GAP + SWATCH, y + SWATCH), fill=colour, outline="#1d2429")
        pen.text((2 * GAP + SWATCH, y - 1), words, fill="#1d2429", font_size=12)
    for number, (image, lines) in enumerate(zip(pictures, captions, strict=True)):
        row, column = divmod(number, columns)
        x = GAP + column * (cell_width + GAP)
        y = GAP + row * (CELL + CAPTION + GAP)
        scale = min(cell_width / image.width, CELL / image.height)
        size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        resampling = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
        scaled = image.convert("RGB").resize(size, resampling)
        result.paste(
            scaled, (x + (cell_width - scaled.width) // 2, y + (CELL - scaled.height) // 2)
        )
        for place, (line, ink) in enumerate(zip(lines, ("#b3261e", "#1d2429"), strict=True)):
            text = line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 1]}…"
            pen.text((x, y + CELL + 3 + 15 * place), text, fill=ink, font_size=12)
    return result


def draw_training_charts(steps: Log, evaluations: Log) -> dict[str, Drawing]:
    """Return the charts that the logs have values for, by the names of the report's files."""
    charts = {"loss.svg": draw_curves("loss", _list_both_curves("loss", steps, evaluations))}
    headlines = [name for name in HEADLINES if name in evaluations]
    for name in headlines[:1]:
        title = HEADS.get(name, name.replace("_", " "))
        charts["metric.svg"] = draw_curves(title, _list_both_curves(name, steps, evaluations))
    rates = _list_curves("rate", steps, "learning_rate")
    charts["learning_rate.svg"] = draw_curves("learning rate", rates)
    return {name: chart for name, chart in charts.items() if chart is not None}


def _list_both_curves(name: str, steps: Log, evaluations: Log) -> list[Curve]:
    """Return the curves of a metric in training and in evaluation."""
    train = _list_curves("train", steps, name)
    from_evaluations = _list_curves("train", evaluations, f"train_{name}", marked=True)
    return [*(train or from_evaluations), *_list_curves("eval", evaluations, name, marked=True)]


def _list_curves(label: str, log: Log, name: str, *, marked: bool = False) -> list[Curve]:
    return [Curve(label, log["step"], log[name], marked)] if name in log else []
