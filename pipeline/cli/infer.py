"""`python -m pipeline infer RUN_DIR|EXPORT_DIR FILE...`: what a trained network says of images,
rows of a table and texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.cli.arguments.text_requests import (
    TextRequest,
    classified_texts,
    print_continuation,
    take_text_options,
)
from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.core.errors import DataError, UsageError, printable
from pipeline.core.files.csv_file import write_csv
from pipeline.core.files.error_text import shown
from pipeline.data.targets import Targets
from pipeline.stages.export.export import is_export, read_export
from pipeline.stages.export.image_inputs import files_in, read_images
from pipeline.stages.export.mask_files import mask_path, require_new_names, write_mask
from pipeline.stages.export.prediction import make_predict
from pipeline.stages.export.prediction_rows import prediction_row
from pipeline.stages.export.trained_run import Samples, read_trained_run, spare_gpus

USAGE = (
    "infer takes RUN_DIR or EXPORT_DIR, FILE... or --text or --prompt, --json, --top=N, "
    "--csv=FILE, --masks=FOLDER"
)
HELP = """usage: python -m pipeline infer RUN_DIR|FOLDER FILE ... [--json] [--top=N] [--csv=F]
       python -m pipeline infer RUN_DIR|FOLDER --text TEXT ... [--json] [--top=N]
       python -m pipeline infer RUN_DIR|FOLDER --prompt TEXT [--tokens N] [--temperature T] ...

Print what a trained network gives to each image, text or row of a table: the class and its
probability, or numbers in the units of the data; or continue a text.

  RUN_DIR   a run that has saved a checkpoint, or one of its checkpoints
  FOLDER    what `export` wrote
  FILE      images as the network was trained on, folders of them (in the order of their paths),
            or .npy arrays of them; texts, one on each line; of a network that was
            trained on a table, a CSV or Parquet file with the same columns, targets not needed
  --text    a text to be classified
  --json    a JSON object a line
  --top=N   the N most probable classes, 1 unless it is given
  --csv=FILE
            a CSV file instead of lines: file, class and probability, or the numbers
  --masks=FOLDER
            of a network that gives a class to every pixel: write a mask for each image, a PNG
            of its size whose values are the classes
  --prompt  a text to be continued, by a network that predicts the next token
  --tokens N, --temperature T, --top-k K, --seed S
            how many tokens, 200; 0 takes the most probable one, 1 draws as the network says; from
            the K most probable ones; other seeds draw other texts

example: python -m pipeline infer digits_network seven.png --top=3
"""
JSON, TOP, CSV, MASKS = "--json", "--top=", "--csv=", "--masks="
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
    masks: Path | None = None
    csv: Path | None = None
    texts: tuple[str, ...] = ()
    """Names of texts that are on the command line itself."""


def main(args: Sequence[str]) -> int:
    """Print class and probability of every image; the exit status is 0.

    Raises UsageError for other arguments, RecipeError and DataError for unreadable files.
    """
    if asks_for_help(args):
        return show_usage(HELP)
    text, others = take_text_options(args)
    given = _parse(others, text)
    if text.prompt is not None:
        print_continuation(given.source, text, as_json=given.as_json)
        return 0
    if given.masks is not None:
        require_new_names(given.masks, [one for path in given.files for one in files_in(path)])
    if given.csv is not None and given.csv.resolve() in {file.resolve() for file in given.files}:
        raise DataError(f"{given.csv}: is read as well; name another file")
    logits, samples = _network(given.source)
    rows = []
    for file, names, images in _inputs(given, text, samples):
        found = zip(names, _outputs(logits, images), strict=True)
        for index, (name, outputs) in enumerate(found):
            if outputs.ndim != 1 and given.csv is not None:
                raise UsageError([f"{CSV}{given.csv}"], "of classes of pixels there are --masks")
            if outputs.ndim != 1:
                path = _mask_path(given, file, index, len(images))
                print(_mask_line(given, name, file, outputs, samples.targets, path))
            elif given.csv is None:
                print(_line(given, name, outputs, samples.targets))
            else:
                rows.append(prediction_row(name, outputs, samples.targets, given.top))
    if given.csv is not None:
        write_csv(given.csv, rows)
        print(printable(f"{given.csv}: {len(rows):,} lines"))
    return 0


def _inputs(
    given: InferArguments, text: TextRequest, samples: Samples
) -> Iterator[tuple[Path, list[str], np.ndarray]]:
    """Yield each file with the names of its samples and these, and the texts of the command."""
    if samples.text is not None or text.texts:
        for names, texts in classified_texts(text, given.files, samples):
            yield given.source, names, texts
        return
    for file in (inside for path in given.files for inside in files_in(path)):
        images = read_images(file, samples)
        names = [f"{file}[{index}]" for index in range(len(images))]
        yield file, names if len(images) > 1 else [str(file)], images


def _parse(args: Sequence[str], text: TextRequest) -> InferArguments:
    words = [arg for arg in args if not arg.startswith("-")]
    tops = [arg for arg in args if arg.startswith(TOP)]
    folders = [arg for arg in args if arg.startswith(MASKS)]
    csvs = [arg for arg in args if arg.startswith(CSV)]
    known = (*words, *tops, *folders, *csvs, JSON)
    wrong = [arg for arg in args if arg not in known or arg in (MASKS, CSV)]
    has_texts = bool(text.texts) or text.prompt is not None
    if wrong or len(words) < (1 if has_texts else 2) or (text.prompt is not None and words[1:]):
        raise UsageError(wrong[:1] or args, USAGE)
    if (csvs and (JSON in args or folders)) or (
        text.prompt is not None and (csvs or folders or tops)
    ):
        raise UsageError(wrong[:1] or args, USAGE)
    top = tops[-1].removeprefix(TOP) if tops else "1"
    if not top.isdecimal() or len(top) > MAX_DIGITS or int(top) < 1:
        raise UsageError([f"{TOP}{shown(top)}"], "must be a whole number above 0")
    source, *files = map(Path, words)
    masks = Path(folders[-1].removeprefix(MASKS)) if folders else None
    csv = Path(csvs[-1].removeprefix(CSV)) if csvs else None
    texts = tuple(map(shown, text.texts))
    return InferArguments(source, tuple(files), JSON in args, int(top), masks, csv, texts)


def _network(source: Path) -> tuple[Logits, Samples]:
    """The logits function of a run or an export, and the format of its samples."""
    if is_export(source):
        exported = read_export(source)
        weights = jax.device_put(exported.arrays)
        call = jax.jit(exported.program.call)
        return lambda images: np.asarray(call(weights, images)), exported.samples
    spare_gpus(source)
    run = read_trained_run(source)
    weights = jax.device_put(dict(run.arrays))
    predict = jax.jit(make_predict(run))
    return lambda images: np.asarray(predict(weights, images)), run.samples


def _outputs(logits: Logits, images: np.ndarray) -> Iterator[np.ndarray]:
    """The logits of each image, float64 (classes,), or (H, W, classes) of its pixels."""
    for start in range(0, len(images), BATCH):
        batch = images[start : start + BATCH]
        # A last batch of another size would be compiled separately.
        missing = min(BATCH, len(images)) - len(batch)
        padded = np.concatenate([batch, np.repeat(batch[-1:], missing, axis=0)])
        values = logits(padded)[: len(batch)].astype(np.float64)
        if values.ndim not in (2, 4):
            raise DataError(
                f"the network gives logits of shape {values.shape[1:]} for an image, not one for "
                "each class; export it and call the program"
            )
        yield from values


def _line(given: InferArguments, name: str, outputs: np.ndarray, targets: Targets) -> str:
    """The line of one image: classes, labels or numbers."""
    if given.masks is not None:
        raise UsageError([f"{MASKS}{given.masks}"], "the network has one class for an image")
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


def _mask_path(given: InferArguments, file: Path, index: int, count: int) -> Path | None:
    return None if given.masks is None else mask_path(given.masks, file, index, count)


def _mask_line(
    given: InferArguments,
    name: str,
    file: Path,
    outputs: np.ndarray,
    targets: Targets,
    path: Path | None,
) -> str:
    """The line of an image whose pixels have classes, with their shares, the largest first.

    Writes its mask where a folder is given.
    """
    mask = outputs.argmax(axis=-1)
    if path is not None:
        write_mask(path, file, mask, len(targets))
    shares = np.bincount(mask.ravel(), minlength=len(targets)) / mask.size
    ranked = [int(label) for label in np.argsort(-shares, kind="stable") if shares[label]]
    named = {targets.names[label]: round(float(shares[label]), 6) for label in ranked}
    if given.as_json:
        written = {} if path is None else {"mask": str(path)}
        return json.dumps({"file": name, **written, "pixels": named})
    text = ", ".join(f"{shown(key)} {value:.4f}" for key, value in named.items())
    where = "" if path is None else f"; mask in {printable(str(path))}"
    return f"{printable(name)}: {text} of the pixels{where}"


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
        source = "text" if name in given.texts else "file"
        return json.dumps({source: name, **best, key: predictions})
    text = ", ".join(f"{shown(one['class'])} {one['probability']:.4f}" for one in predictions)
    return f"{printable(name)}: {text or 'no label'}"
