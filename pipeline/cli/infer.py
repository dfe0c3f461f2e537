"""`python -m pipeline infer RUN_DIR|EXPORT_DIR FILE...`: what a trained network says of images,
rows of a table and texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.cli.arguments.text_requests import (
    TextRequest,
    classified_texts,
    print_continuation,
    request_of,
)
from pipeline.core.errors import DataError, UsageError, printable
from pipeline.core.files.csv_file import write_csv
from pipeline.core.files.error_text import shown
from pipeline.data.targets import Targets
from pipeline.stages.export.export import is_export, read_export
from pipeline.stages.export.inference_files import (
    files_in,
    mask_path,
    prediction_row,
    read_images,
    require_new_names,
    write_mask,
)
from pipeline.stages.export.prediction import make_predict
from pipeline.stages.export.trained_run import Samples, read_trained_run, spare_gpus

USAGE = "infer takes RUN_DIR or FOLDER, and FILE ..., --text or --prompt"
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


def main(
    source: Path,
    files: Sequence[Path] = (),
    *,
    texts: Sequence[str] = (),
    prompt: str | None = None,
    as_json: bool = False,
    top: int | None = None,
    masks: Path | None = None,
    csv: Path | None = None,
    **of_prompt: int | float | None,
) -> int:
    """Print class and probability of every image; the exit status is 0.

    `of_prompt` are tokens, temperature, top_k and seed. Raises UsageError for options that exclude
    each other, RecipeError and DataError for unreadable files.
    """
    text = request_of(prompt, texts, of_prompt)
    _require_inputs(source, files, text)
    _require_output(prompt, {"--json": as_json, "--csv": csv, "--masks": masks, "--top": top})
    shown_texts = tuple(map(shown, texts))
    given = InferArguments(source, tuple(files), as_json, top or 1, masks, csv, shown_texts)
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
                raise UsageError([f"--csv {given.csv}"], "of classes of pixels there are --masks")
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


def _require_inputs(source: Path, files: Sequence[Path], text: TextRequest) -> None:
    """Raise UsageError without anything to read, and for files beside a prompt."""
    if text.prompt is not None and files:
        raise UsageError(list(map(str, files)), f"a prompt has no files; {USAGE}")
    if text.prompt is None and not text.texts and not files:
        raise UsageError([str(source)], USAGE)


def _require_output(prompt: str | None, options: Mapping[str, Any]) -> None:
    """Raise UsageError for options of an output that another one excludes."""
    typed = [name for name, value in options.items() if value]
    if "--csv" in typed and len({"--json", "--masks"} & set(typed)):
        raise UsageError(typed, "--csv writes a file instead of lines and masks")
    if prompt is not None and (others := [name for name in typed if name != "--json"]):
        raise UsageError(others, "isn't for a text that is continued")


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
        raise UsageError([f"--masks {given.masks}"], "the network has one class for an image")
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
