"""`python -m pipeline infer RUN_DIR|EXPORT_DIR FILE...`: classify images with a trained network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.cli._usage import asks_for_help, show_usage
from pipeline.data.targets import Targets
from pipeline.errors import DataError, UsageError, printable
from pipeline.files.csv_file import write_csv
from pipeline.files.error_text import shown
from pipeline.weights.export import is_export, read_export
from pipeline.weights.image_inputs import files_in, read_images
from pipeline.weights.prediction import make_predict
from pipeline.weights.prediction_rows import prediction_row
from pipeline.weights.trained_run import Samples, read_trained_run

USAGE = "infer takes RUN_DIR or EXPORT_DIR, FILE..., --json, --top=N and --csv=FILE"
HELP = """usage: python -m pipeline infer RUN_DIR|FOLDER IMAGE ... [--json] [--top=N] [--csv=FILE]

Print the class and its probability that a trained network gives to each image.

  RUN_DIR      a run that has saved a checkpoint, or one of its checkpoints
  FOLDER       what `export` wrote
  IMAGE        images as the network was trained on, folders of them (in the order of their paths),
               or .npy arrays of them
  --json       a JSON object a line
  --top=N      the N most probable classes, 1 unless it is given
  --csv=FILE   a CSV file instead of lines: file, class and probability, or the numbers

example: python -m pipeline infer digits_network seven.png --top=3
"""
JSON, TOP, CSV = "--json", "--top=", "--csv="
MAX_DIGITS = 9
"""Digits of the number after --top: Python refuses to parse thousands."""
BATCH = 64
"""Images per call; a file with fewer is one call of its own size."""

Logits = Callable[[np.ndarray], np.ndarray]
"""Function from images (n, *shape), as read, to logits float32 (n, classes)."""


@dataclass(frozen=True)
class InferArguments:
    """The parsed arguments."""

    source: Path
    files: tuple[Path, ...]
    as_json: bool
    top: int
    csv: Path | None


def main(args: Sequence[str]) -> int:
    """Print class and probability of every image; the exit status is 0.

    Raises UsageError for other arguments, RecipeError and DataError for unreadable files.
    """
    if asks_for_help(args):
        return show_usage(HELP)
    given = _parse(args)
    logits, samples = _network(given.source)
    rows = []
    for file in (inside for path in given.files for inside in files_in(path)):
        images = read_images(file, samples)
        for index, outputs in enumerate(_outputs(logits, images)):
            name = str(file) if len(images) == 1 else f"{file}[{index}]"
            if given.csv is None:
                print(_line(given, name, outputs, samples.targets))
            else:
                rows.append(prediction_row(name, outputs, samples.targets, given.top))
    if given.csv is not None:
        write_csv(given.csv, rows)
        print(printable(f"{given.csv}: {len(rows):,} lines"))
    return 0


def _parse(args: Sequence[str]) -> InferArguments:
    words = [arg for arg in args if not arg.startswith("-")]
    tops = [arg for arg in args if arg.startswith(TOP)]
    csvs = [arg for arg in args if arg.startswith(CSV)]
    wrong = [arg for arg in args if arg not in (*words, *tops, *csvs, JSON)]
    if wrong or len(words) < 2 or CSV in csvs or (csvs and JSON in args):
        raise UsageError(wrong[:1] or args, USAGE)
    top = tops[-1].removeprefix(TOP) if tops else "1"
    if not top.isdecimal() or len(top) > MAX_DIGITS or int(top) < 1:
        raise UsageError([f"{TOP}{shown(top)}"], "must be a whole number above 0")
    source, *files = map(Path, words)
    csv = Path(csvs[-1].removeprefix(CSV)) if csvs else None
    return InferArguments(source, tuple(files), JSON in args, int(top), csv)


def _network(source: Path) -> tuple[Logits, Samples]:
    """The logits function of a run or an export, and the format of its samples."""
    if is_export(source):
        exported = read_export(source)
        weights = jax.device_put(exported.arrays)
        call = jax.jit(exported.program.call)
        return lambda images: np.asarray(call(weights, images)), exported.samples
    run = read_trained_run(source)
    weights = jax.device_put(dict(run.arrays))
    predict = jax.jit(make_predict(run))
    return lambda images: np.asarray(predict(weights, images)), run.samples


def _outputs(logits: Logits, images: np.ndarray) -> Iterator[np.ndarray]:
    """The logits of each image, float64 (classes,)."""
    for start in range(0, len(images), BATCH):
        batch = images[start : start + BATCH]
        # A last batch of another size would be compiled separately.
        missing = min(BATCH, len(images)) - len(batch)
        padded = np.concatenate([batch, np.repeat(batch[-1:], missing, axis=0)])
        values = logits(padded)[: len(batch)].astype(np.float64)
        if values.ndim != 2:
            raise DataError(
                f"the network gives logits of shape {values.shape[1:]} for an image, not one for "
                "each class; export it and call the program"
            )
        yield from values


def _line(given: InferArguments, name: str, outputs: np.ndarray, targets: Targets) -> str:
    """The line of one image: classes, labels or numbers."""
    match targets.task:
        case "regression":
            return _numbers_line(given, name, targets.in_units(outputs), targets)
        case "multi_label":
            probabilities = 1 / (1 + np.exp(-outputs))
            ranked = np.argsort(-probabilities, kind="stable")
            chosen = [i for i in ranked if probabilities[i] > 0.5]
            return _classes_line(given, name, probabilities, targets, chosen, "labels")
    powers = np.exp(outputs - outputs.max())
    probabilities = powers / powers.sum()
    best = list(np.argsort(-probabilities, kind="stable")[: given.top])
    return _classes_line(given, name, probabilities, targets, best, "top")


def _numbers_line(given: InferArguments, name: str, numbers: np.ndarray, targets: Targets) -> str:
    values = dict(zip(targets.names, map(float, numbers), strict=True))
    if given.as_json:
        return json.dumps({"file": name, **values})
    text = ", ".join(f"{shown(key)} {value:.6g}" for key, value in values.items())
    return f"{printable(name)}: {text}"


def _classes_line(
    given: InferArguments,
    name: str,
    probabilities: np.ndarray,
    targets: Targets,
    chosen: Sequence[int],
    key: str,
) -> str:
    """The line of these classes or labels, the most probable first."""
    predictions: list[dict[str, Any]] = [
        {
            "class": targets.names[i],
            "label": int(i),
            "probability": round(float(probabilities[i]), 6),
        }
        for i in chosen
    ]
    if given.as_json:
        best = predictions[0] if key == "top" else {}
        return json.dumps({"file": name, **best, key: predictions})
    text = ", ".join(f"{shown(one['class'])} {one['probability']:.4f}" for one in predictions)
    return f"{printable(name)}: {text or 'no label'}"
