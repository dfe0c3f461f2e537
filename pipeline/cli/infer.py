"""`python -m pipeline infer RUN_DIR|EXPORT_DIR FILE...`: what a trained network says of images,
rows of a table and texts, or how it continues a text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.core.errors import DataError, UsageError, printable
from pipeline.core.files.csv_file import write_csv
from pipeline.core.files.error_text import show_name
from pipeline.data.targets import Targets
from pipeline.data.text.text_files import read_text_lines
from pipeline.data.text.text_format import TextFormat
from pipeline.stages.export.export import is_export, read_export
from pipeline.stages.export.inference_files import (
    list_images,
    make_mask_path,
    make_prediction_row,
    read_images,
    require_new_names,
    write_mask,
)
from pipeline.stages.export.prediction import Weights, make_predict
from pipeline.stages.export.text_generation import (
    Decoder,
    Sampling,
    make_decoder,
    make_exported_decoder,
    make_uncached_decoder,
    sample_tokens,
)
from pipeline.stages.export.trained_run import Samples, read_trained_run, spare_gpus

USAGE = "infer takes RUN_DIR or FOLDER, and FILE ..., --text or --prompt"
BATCH = 64
"""Images per call; a file with fewer is one call of its size."""
TOKENS = 200

Logits = Callable[[np.ndarray], np.ndarray]
"""Function from images (n, *shape), as read, to logits float32 (n, classes)."""
PromptOptions = Mapping[str, int | float | None]
"""Tokens, temperature, top_k and seed of a prompt; None if not typed."""


@dataclass(frozen=True)
class InferArguments:
    """The parsed arguments."""

    source: Path
    files: tuple[Path, ...]
    texts: tuple[str, ...]
    """Texts to classify, which are on the command line itself."""
    as_json: bool
    top: int | None
    masks: Path | None
    csv: Path | None


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
    arguments = InferArguments(source, tuple(files), tuple(texts), as_json, top, masks, csv)
    _require_options(arguments, prompt, of_prompt)
    if prompt is not None:
        _print_continuation(source, prompt, of_prompt, as_json=as_json)
        return 0
    if masks is not None:
        require_new_names(masks, [file for path in files for file in list_images(path)])
    if csv is not None and csv.resolve() in {file.resolve() for file in files}:
        raise DataError(f"{csv}: is read as well; name another file")
    logits, samples = _network(source)
    targets = samples.targets
    rows = []
    for file, names, images in _inputs(arguments, samples):
        for index, (name, outputs) in enumerate(zip(names, _outputs(logits, images), strict=True)):
            if outputs.ndim != 1 and csv is not None:
                raise UsageError([f"--csv {csv}"], "of classes of pixels there are --masks")
            if outputs.ndim != 1:
                path = make_mask_path(masks, file, index, len(images)) if masks else None
                mask = outputs.argmax(axis=-1)
                if path is not None:
                    write_mask(path, file, mask, len(targets))
                print(_mask_line(arguments, name, mask, targets, path))
            elif csv is None:
                print(_line(arguments, name, outputs, targets))
            else:
                rows.append(make_prediction_row(name, outputs, targets, top or 1))
    if csv is not None:
        write_csv(csv, rows)
        print(printable(f"{csv}: {len(rows):,} lines"))
    return 0


def _require_options(
    arguments: InferArguments, prompt: str | None, of_prompt: PromptOptions
) -> None:
    """Raise UsageError for options that exclude each other, and without anything to read."""
    typed = [f"--{name.replace('_', '-')}" for name in of_prompt if of_prompt[name] is not None]
    if typed and prompt is None:
        raise UsageError(typed, "needs --prompt, the text to be continued")
    if prompt is not None and arguments.texts:
        rule = "one continues a text, the other classifies texts"
        raise UsageError(["--prompt", "--text"], rule)
    if prompt is not None and arguments.files:
        raise UsageError(list(map(str, arguments.files)), f"a prompt has no files; {USAGE}")
    if prompt is None and not arguments.texts and not arguments.files:
        raise UsageError([str(arguments.source)], USAGE)
    outputs = {"csv": arguments.csv, "masks": arguments.masks, "top": arguments.top}
    shows = [f"--{name}" for name, value in {"json": arguments.as_json, **outputs}.items() if value]
    if arguments.csv and (arguments.as_json or arguments.masks):
        raise UsageError(shows, "--csv writes a file instead of lines and masks")
    if prompt is not None and any(outputs.values()):
        names = [name for name in shows if name != "--json"]
        raise UsageError(names, "isn't for a text that is continued")


def _inputs(
    arguments: InferArguments, samples: Samples
) -> Iterator[tuple[Path, list[str], np.ndarray]]:
    """Yield each file with the names of its samples and these, and the texts of the command."""
    if samples.text is not None or arguments.texts:
        for names, texts in _texts_to_classify(arguments, samples):
            yield arguments.source, names, texts
        return
    for file in (inside for path in arguments.files for inside in list_images(path)):
        images = read_images(file, samples)
        names = [f"{file}[{index}]" for index in range(len(images))]
        yield file, names if len(images) > 1 else [str(file)], images


def _texts_to_classify(
    arguments: InferArguments, samples: Samples
) -> Iterator[tuple[list[str], np.ndarray]]:
    """Yield names and samples of the texts of the options, then of the lines of each file.

    Raises DataError if the network doesn't classify texts, and for files without any.
    """
    text = samples.text
    if text is None:
        raise DataError(f"the network reads {samples.dtype} images; --text needs one of texts")
    if text.predicts != "class":
        raise DataError("the network continues texts; give --prompt and a text to be continued")

    def encode(texts: Sequence[str]) -> np.ndarray:
        try:
            return text.encode_all(texts, samples.shape[0])
        except ValueError as error:
            raise DataError(f"a text can't be read by the tokenizer: {error}") from error

    if arguments.texts:
        yield list(map(show_name, arguments.texts)), encode(arguments.texts)
    for file in arguments.files:
        lines = read_text_lines(file)
        names = [f"{file}[{number}]" for number in range(len(lines))] if len(lines) > 1 else []
        yield names or [str(file)], encode(lines)


def _network(source: Path) -> tuple[Logits, Samples]:
    """Return the logits function of a run or an export, and the format of its samples."""
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
    """Yield the logits of each image, float64 (classes,), or (H, W, classes) of its pixels."""
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


def _line(arguments: InferArguments, name: str, outputs: np.ndarray, targets: Targets) -> str:
    """Return the line of one image: classes, labels or numbers."""
    if arguments.masks is not None:
        raise UsageError([f"--masks {arguments.masks}"], "the network has one class for an image")
    if targets.task == "regression":
        values = dict(zip(targets.names, map(float, targets.to_data_units(outputs)), strict=True))
        if arguments.as_json:
            return json.dumps({"file": name, **values})
        text = ", ".join(f"{show_name(key)} {value:.6g}" for key, value in values.items())
        return f"{printable(name)}: {text}"
    if targets.task == "multi_label":
        key = "labels"
        probabilities = 1 / (1 + np.exp(-outputs))
        ranked = np.argsort(-probabilities, kind="stable")
        labels = [i for i in ranked if probabilities[i] > 0.5]
    else:
        key = "top"
        powers = np.exp(outputs - outputs.max())
        probabilities = powers / powers.sum()
        labels = list(np.argsort(-probabilities, kind="stable")[: arguments.top or 1])
    predictions: list[dict[str, Any]] = [
        {
            "class": targets.names[i],
            "label": int(i),
            "probability": round(float(probabilities[i]), 6),
        }
        for i in labels
    ]
    if arguments.as_json:
        best = predictions[0] if key == "top" else {}
        source = "text" if name in map(show_name, arguments.texts) else "file"
        return json.dumps({source: name, **best, key: predictions})
    text = ", ".join(f"{show_name(row['class'])} {row['probability']:.4f}" for row in predictions)
    return f"{printable(name)}: {text or 'no label'}"


def _mask_line(
    arguments: InferArguments, name: str, mask: np.ndarray, targets: Targets, path: Path | None
) -> str:
    """Return the line of an image whose pixels have classes, the largest share first."""
    shares = np.bincount(mask.ravel(), minlength=len(targets)) / mask.size
    ranked = [int(label) for label in np.argsort(-shares, kind="stable") if shares[label]]
    named = {targets.names[label]: round(float(shares[label]), 6) for label in ranked}
    if arguments.as_json:
        file = {} if path is None else {"mask": str(path)}
        return json.dumps({"file": name, **file, "pixels": named})
    text = ", ".join(f"{show_name(key)} {value:.4f}" for key, value in named.items())
    where = "" if path is None else f"; mask in {printable(str(path))}"
    return f"{printable(name)}: {text} of the pixels{where}"


def _print_continuation(
    source: Path, prompt: str, options: PromptOptions, *, as_json: bool
) -> None:
    """Print a prompt and its continuation as it is drawn, and the speed on stderr.

    Raises DataError for a network that doesn't continue texts, and a prompt that it can't read.
    """
    temperature = options["temperature"]
    top_k = options["top_k"]
    sampling = Sampling(
        1.0 if temperature is None else float(temperature),
        None if top_k is None else int(top_k),
        int(options["seed"] or 0),
    )
    num_tokens = int(options["tokens"] or TOKENS)
    decoder, weights, text = _decoder(source)
    encoded = text.encode_prompt(prompt)
    started_at = time.perf_counter()
    tokens: list[int] = []
    num_printed = 0
    for part in sample_tokens(decoder, weights, encoded, num_tokens, sampling):
        if not tokens:
            first_s = time.perf_counter() - started_at
            num_first = len(part)
        tokens += part.tolist()
        if not as_json:
            text_so_far = text.tokenizer.decode([*encoded.tolist(), *tokens])
            is_last = len(tokens) == num_tokens
            # A character of several tokens may be incomplete.
            ready = text_so_far if is_last else text_so_far.rstrip("\ufffd")
            # Control characters would command the terminal.
            harmless = (c if c.isprintable() or c in "\n\t" else "\ufffd" for c in ready)
            print("".join(harmless)[num_printed:], end="\n" if is_last else "", flush=True)
            num_printed = max(num_printed, len(ready))
    seconds = time.perf_counter() - started_at
    if as_json:
        text_so_far = text.tokenizer.decode([*encoded.tolist(), *tokens])
        new = text.tokenizer.decode(tokens)
        print(json.dumps({"prompt": prompt, "continuation": new, "text": text_so_far}))
    num_later = len(tokens) - num_first
    speed = f", then {num_later / (seconds - first_s):,.0f} tokens/s" if num_later else ""
    print(
        f"{len(tokens):,} tokens in {seconds:.2f} s: the first {num_first} in {first_s:.2f} s with "
        f"compilation{speed}",
        file=sys.stderr,
    )


def _decoder(source: Path) -> tuple[Decoder, Weights, TextFormat]:
    """Return the decoder of a run or an export, its weights, and the format of its texts.

    Raises DataError unless it predicts the next token.
    """
    if is_export(source):
        exported = read_export(source)
        samples = exported.samples
    else:
        spare_gpus(source)
        run = read_trained_run(source)
        samples = run.samples
    text = samples.text
    if text is None or text.predicts != "next_token":
        raise DataError(f"{source}: does not predict the next token; --prompt needs one that does")
    if not is_export(source):
        return make_decoder(run), run.arrays, text
    context = samples.shape[0]
    if exported.next_token is not None:
        return make_exported_decoder(exported.next_token, context), exported.arrays, text
    return (
        make_uncached_decoder(exported.program.call, context, samples.dtype),
        exported.arrays,
        text,
    )
