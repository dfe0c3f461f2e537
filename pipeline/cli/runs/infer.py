"""`python -m pipeline infer RUN_DIR|EXPORT_DIR FILE...`: predictions of a trained network.

The inputs are images, sound, rows of a table or texts. With `--prompt`, a text is continued
instead. Several runs, or a sweep, are an ensemble.
"""

from __future__ import annotations

import json
import operator
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from scipy.special import softmax

from pipeline.core.errors import DataError, UsageError, printable
from pipeline.core.files.csv_file import write_csv
from pipeline.core.files.name_text import show_name
from pipeline.core.files.value_text import count_noun
from pipeline.core.reporter import WARNING
from pipeline.data.columns import Targets, Task
from pipeline.data.text.text_columns import read_text_columns
from pipeline.data.text.text_format import PAIR, TextFormat, read_text_lines
from pipeline.stages.export.export import is_export, read_export
from pipeline.stages.export.inference_files import (
    Arrays,
    count_samples,
    list_inputs,
    list_suffixes,
    make_mask_path,
    make_prediction_row,
    name_columns,
    read_samples,
    require_new_names,
    write_mask,
)
from pipeline.stages.export.prediction import Weights, compile_predict, read_network
from pipeline.stages.export.text_generation import (
    Decoder,
    Sampling,
    make_decoder,
    make_exported_decoder,
    make_uncached_decoder,
    sample_tokens,
)
from pipeline.stages.record.brightness import (
    UnusualImage,
    explain_unusual_images,
    find_unusual_image,
)
from pipeline.stages.record.member_runs import is_run_or_sweep, list_members
from pipeline.stages.record.trained_run import Samples, TrainedRun, spare_gpus
from pipeline.training.contrastive import compute_cosines
from pipeline.training.sequences import read_symbols

USAGE = "infer takes RUN_DIR or FOLDER, and FILE ..., --text or --prompt"
MAX_BATCH = 64
"""Most samples of a batch."""
DEFAULT_TOKENS = 200
"""Number of tokens by which a prompt is continued."""

ComputeLogits = Callable[[Arrays], np.ndarray]
"""Function from samples (n, *shape) to logits float32 (n, classes), or (n, H, W, classes)."""
PromptOptions = Mapping[str, int | float | None]
"""Options of a prompt: tokens, temperature, top_k and seed; None if not typed."""


@dataclass(frozen=True)
class InferArguments:
    """The parsed arguments."""

    sources: tuple[Path, ...]
    files: tuple[Path, ...]
    texts: tuple[str, ...]
    """Texts to classify from the command line."""
    as_json: bool
    top: int | None
    masks: Path | None
    """Folder for masks."""
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
    **prompt_options: int | float | None,
) -> int:
    """Print the prediction for every input, or the continuation of a prompt; return 0.

    `source` is a run, a sweep or an export. Runs and sweeps at the start of `files` are further
    members of an ensemble. `prompt_options` are tokens, temperature, top_k and seed. Raises
    UsageError for options that exclude each other, RecipeError and DataError for unreadable files.
    """
    runs = tuple(takewhile(is_run_or_sweep, files))
    inputs = tuple(files[len(runs) :])
    sources = (source, *runs)
    arguments = InferArguments(sources, inputs, tuple(texts), as_json, top, masks, csv)
    _require_options(arguments, prompt, prompt_options)
    if prompt is not None:
        _print_continuation(sources, prompt, prompt_options, as_json=as_json)
        return 0
    if masks is not None:
        require_new_names(masks, [file for path in inputs for file in list_inputs(path)])
    if csv is not None and csv.resolve() in {file.resolve() for file in inputs}:
        raise DataError(f"{csv}: is also an input; name another file")
    compute_logits, samples = _load_network(sources)
    targets = samples.targets
    rows = []
    unusual: list[UnusualImage] = []
    num_samples = 0
    for file, names, arrays in _read_inputs(arguments, samples):
        count = count_samples(arrays)
        num_samples += count
        unusual += _list_unusual_images(names, arrays, samples)
        all_logits = _compute_in_batches(compute_logits, arrays, targets.task)
        for index, (name, logits) in enumerate(zip(names, all_logits, strict=True)):
            if logits.ndim != 1 and targets.task != "sequence":
                if csv is not None:
                    raise UsageError([f"--csv {csv}"], "classes of pixels are written by --masks")
                path = make_mask_path(masks, file, index, count) if masks else None
                mask = logits.argmax(axis=-1)
                if path is not None:
                    write_mask(path, file, mask, len(targets))
                print(_format_mask(arguments, name, mask, targets, path))
            elif csv is None:
                print(_format_prediction(arguments, name, logits, targets))
            else:
                rows.append(make_prediction_row(name, logits, targets, top or 1))
    if csv is not None:
        write_csv(csv, rows)
        print(printable(f"{csv}: {count_noun(len(rows), 'line')}"))
    if unusual and samples.brightness is not None:
        text = explain_unusual_images(unusual, num_samples, samples.brightness)
        print(f"{WARNING} {text}", file=sys.stderr)
    return 0


def _list_unusual_images(
    names: Sequence[str], images: Arrays, samples: Samples
) -> list[UnusualImage]:
    """Return the images that look unlike those of the training; none if these weren't measured."""
    if samples.brightness is None or isinstance(images, dict):
        return []
    pairs = zip(names, images, strict=True)
    findings = [find_unusual_image(name, image, samples.brightness) for name, image in pairs]
    return [finding for finding in findings if finding is not None]


def _require_options(
    arguments: InferArguments, prompt: str | None, prompt_options: PromptOptions
) -> None:
    """Raise UsageError for options that exclude each other, or if there is nothing to predict."""
    typed = [
        f"--{name.replace('_', '-')}" for name, value in prompt_options.items() if value is not None
    ]
    if typed and prompt is None:
        raise UsageError(typed, "needs --prompt, the text to be continued")
    if prompt is not None and arguments.texts:
        rule = "one continues a text, the other classifies texts"
        raise UsageError(["--prompt", "--text"], rule)
    if prompt is not None and arguments.files:
        raise UsageError(list(map(str, arguments.files)), f"a prompt has no files; {USAGE}")
    if prompt is None and not arguments.texts and not arguments.files:
        raise UsageError(list(map(str, arguments.sources)), USAGE)
    outputs = {"csv": arguments.csv, "masks": arguments.masks, "top": arguments.top}
    names = [f"--{name}" for name, value in outputs.items() if value]
    if arguments.csv and (arguments.as_json or arguments.masks):
        json_name = ["--json"] if arguments.as_json else []
        raise UsageError([*json_name, *names], "--csv writes a file instead of lines and masks")
    if prompt is not None and names:
        raise UsageError(names, "can't be used with --prompt")


def _read_inputs(
    arguments: InferArguments, samples: Samples
) -> Iterator[tuple[Path, list[str], Arrays]]:
    """Yield a file, and the names and the arrays of its samples.

    With texts, the run or export is yielded as the file: only masks need a file.
    """
    if samples.text is not None or arguments.texts:
        for names, texts in _read_texts(arguments, samples):
            yield arguments.sources[0], names, texts
        return
    for path in arguments.files:
        for file in list_inputs(path, list_suffixes(samples)):
            arrays = read_samples(file, samples)
            yield file, _name_samples(file, count_samples(arrays)), arrays


def _name_samples(file: Path, count: int) -> list[str]:
    """Return `file[0]`, `file[1]` and so on, or the file alone if it has one sample."""
    return [f"{file}[{index}]" for index in range(count)] if count > 1 else [str(file)]


def _read_texts(arguments: InferArguments, samples: Samples) -> Iterator[tuple[list[str], Arrays]]:
    """Yield the names and samples of the command line's texts, then of each file's lines."""
    text = samples.text
    if text is None:
        raise DataError(
            f"the network reads {', '.join(samples.columns)}; --text needs one of texts"
        )
    if text.predicts == "pair":
        yield from _read_pairs(arguments, samples, text)
        return
    if text.predicts != "class":
        raise DataError("the network continues texts; name the text with --prompt TEXT")

    def encode(texts: Sequence[str]) -> np.ndarray:
        try:
            return text.encode_all(texts, samples.single.shape[0])
        except ValueError as error:
            raise DataError(f"a text can't be read by the tokenizer: {error}") from error

    if arguments.texts:
        yield list(map(show_name, arguments.texts)), encode(arguments.texts)
    for file in arguments.files:
        lines = read_text_lines(file, text.encoding)
        yield _name_samples(file, len(lines)), encode(lines)


def _read_pairs(
    arguments: InferArguments, samples: Samples, text: TextFormat
) -> Iterator[tuple[list[str], dict[str, np.ndarray]]]:
    """Yield the names and samples of the command line's pairs of texts, then of each file's rows.

    Columns that the network doesn't read are left out.
    """
    lengths = [samples.columns[name].shape[0] if name in samples.columns else 1 for name in PAIR]

    def encode(pairs: Sequence[Sequence[str]]) -> dict[str, np.ndarray]:
        try:
            columns = text.encode_pairs(pairs, lengths)
        except ValueError as error:
            raise DataError(f"a text can't be read by the tokenizer: {error}") from error
        return {name: columns[name] for name in samples.columns}

    if len(arguments.texts) % 2:
        options = [f"--text {show_name(arguments.texts[-1])}"]
        raise UsageError(options, "the network reads pairs; must be two --text for each")
    if arguments.texts:
        pairs = list(zip(arguments.texts[::2], arguments.texts[1::2], strict=True))
        yield [", ".join(map(show_name, pair)) for pair in pairs], encode(pairs)
    for file in arguments.files:
        rows = read_text_columns(file, text.columns, text.encoding)
        yield _name_samples(file, len(rows)), encode(rows)


def _load_network(sources: Sequence[Path]) -> tuple[ComputeLogits, Samples]:
    """Return the function that computes logits of runs or an export, and its samples' format."""
    if is_export(sources[0]) and len(sources) == 1:
        exported = read_export(sources[0])
        weights = jax.device_put(exported.arrays)
        call = jax.jit(exported.program.call)
        return lambda arrays: np.asarray(call(weights, arrays)), exported.samples
    run = _read_runs(sources)
    weights = jax.device_put(dict(run.arrays))
    predict = compile_predict(run)
    return lambda arrays: np.asarray(predict(weights, arrays)), run.samples


def _read_runs(sources: Sequence[Path]) -> TrainedRun:
    """Read a run, or the ensemble of several. GPUs are hidden if a run was trained without."""
    members = list_members(sources)
    for member in members:
        spare_gpus(member)
    return read_network(members)


def _compute_in_batches(
    compute_logits: ComputeLogits, samples: Arrays, task: Task
) -> Iterator[np.ndarray]:
    """Yield the logits of each sample, float64 (classes,), or (H, W, classes) of its pixels, or
    (positions, classes) of a sequence.

    Raises DataError for outputs of another rank, for NaN and infinity. Negative infinity, whose
    probability is 0, is permitted beside a finite logit.
    """
    count = count_samples(samples)
    for start in range(0, count, MAX_BATCH):
        size = min(MAX_BATCH, count - start)
        # The last batch is padded, since another size would need another compilation.
        rows = np.minimum(np.arange(start, start + min(MAX_BATCH, count)), count - 1)
        padded = jax.tree.map(operator.itemgetter(rows), samples)
        logits = compute_logits(padded)[:size].astype(np.float64)
        if logits.ndim not in ((3,) if task == "sequence" else (2, 4)):
            raise DataError(
                f"the network returns logits of shape {logits.shape[1:]} for a sample; must be one "
                "for each class: export it and call the program"
            )
        least = logits.min(axis=-1) if task == "regression" else logits.max(axis=-1)
        if not ((logits < np.inf).all() and (least > -np.inf).all()):
            raise DataError("the network returns NaN or infinity; did its training diverge?")
        yield from logits


def _format_prediction(
    arguments: InferArguments, name: str, logits: np.ndarray, targets: Targets
) -> str:
    """Return the line of a sample, whose logits are (classes,): classes, labels or numbers; of
    (positions, classes), the sequence."""
    if arguments.masks is not None:
        raise UsageError([f"--masks {arguments.masks}"], "the network has one class for an image")
    if targets.task == "sequence":
        symbols = [targets.names[number] for number in read_symbols(logits)]
        if arguments.as_json:
            return json.dumps({_name_source(arguments, name): name, "sequence": symbols})
        return f"{printable(name)}: {' '.join(map(show_name, symbols)) or 'no symbol'}"
    if targets.task == "matching":
        cosine = float(compute_cosines(logits[np.newaxis])[0])
        if arguments.as_json:
            return json.dumps({_name_source(arguments, name): name, "cosine": round(cosine, 6)})
        return f"{printable(name)}: cosine {cosine:.4f}"
    if targets.task == "regression":
        values = list(map(float, targets.to_data_units(logits)))
        if arguments.as_json:
            by_column = dict(zip(name_columns(targets), values, strict=True))
            return json.dumps({"file": name, **by_column})
        pairs = zip(targets.names, values, strict=True)
        text = ", ".join(f"{show_name(key)} {value:.6g}" for key, value in pairs)
        return f"{printable(name)}: {text}"
    if targets.task == "multi_label":
        key = "labels"
        probabilities = 1 / (1 + np.exp(-logits))
        ranked = np.argsort(-probabilities, kind="stable")
        labels = [label for label in ranked if probabilities[label] > 0.5]
    else:
        key = "top"
        probabilities = softmax(logits)
        labels = list(np.argsort(-probabilities, kind="stable")[: arguments.top or 1])
    predictions: list[dict[str, Any]] = [
        {
            "class": targets.names[label],
            "label": int(label),
            "probability": round(float(probabilities[label]), 6),
        }
        for label in labels
    ]
    if arguments.as_json:
        best = predictions[0] if key == "top" else {}
        return json.dumps({_name_source(arguments, name): name, **best, key: predictions})
    text = ", ".join(f"{show_name(row['class'])} {row['probability']:.4f}" for row in predictions)
    return f"{printable(name)}: {text or 'no label'}"


def _name_source(arguments: InferArguments, name: str) -> Literal["text", "file"]:
    """Return whether a sample is a text, or a pair of texts, of the command line or of a file."""
    texts = list(map(show_name, arguments.texts))
    pairs = map(", ".join, zip(texts[::2], texts[1::2], strict=False))
    return "text" if name in (*texts, *pairs) else "file"


def _format_mask(
    arguments: InferArguments, name: str, mask: np.ndarray, targets: Targets, path: Path | None
) -> str:
    """Return the line of an image whose pixels have classes, the largest share first."""
    shares = np.bincount(mask.ravel(), minlength=len(targets)) / mask.size
    ranked = [int(label) for label in np.argsort(-shares, kind="stable") if shares[label]]
    share_by_class = {targets.names[label]: round(float(shares[label]), 6) for label in ranked}
    if arguments.as_json:
        mask_file = {} if path is None else {"mask": str(path)}
        return json.dumps({"file": name, **mask_file, "pixels": share_by_class})
    text = ", ".join(f"{show_name(key)} {value:.4f}" for key, value in share_by_class.items())
    place = "" if path is None else f"; mask in {printable(str(path))}"
    return f"{printable(name)}: {text} of the pixels{place}"


def _print_continuation(
    sources: Sequence[Path], prompt: str, options: PromptOptions, *, as_json: bool
) -> None:
    """Print a prompt and its continuation as it is drawn, and the speed on stderr."""
    temperature = options["temperature"]
    top_k = options["top_k"]
    sampling = Sampling(
        1.0 if temperature is None else float(temperature),
        None if top_k is None else int(top_k),
        int(options["seed"] or 0),
    )
    num_tokens = int(options["tokens"] or DEFAULT_TOKENS)
    decoder, weights, text = _load_decoder(sources)
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
            # A character at the end is decoded as U+FFFD until all of its tokens are drawn.
            complete = text_so_far if is_last else text_so_far.rstrip("\ufffd")
            # Control characters would command the terminal.
            harmless = (c if c.isprintable() or c in "\n\t" else "\ufffd" for c in complete)
            print("".join(harmless)[num_printed:], end="\n" if is_last else "", flush=True)
            num_printed = max(num_printed, len(complete))
    seconds = time.perf_counter() - started_at
    if as_json:
        text_so_far = text.tokenizer.decode([*encoded.tolist(), *tokens])
        continuation = text.tokenizer.decode(tokens)
        print(json.dumps({"prompt": prompt, "continuation": continuation, "text": text_so_far}))
    num_later = len(tokens) - num_first
    speed = f", then {num_later / (seconds - first_s):,.0f} tokens/s" if num_later else ""
    print(
        f"{len(tokens):,} tokens in {seconds:.2f} s: the first {num_first} in {first_s:.2f} s with "
        f"compilation{speed}",
        file=sys.stderr,
    )


def _load_decoder(sources: Sequence[Path]) -> tuple[Decoder, Weights, TextFormat]:
    """Return the decoder of runs or an export, its weights, and the format of its texts."""
    if len(sources) > 1 or not is_export(sources[0]):
        run = _read_runs(sources)
        text = _require_text(run.samples, sources[0])
        return make_decoder(run), run.arrays, text
    exported = read_export(sources[0])
    samples = exported.samples
    text = _require_text(samples, sources[0])
    tokens = samples.single
    context = tokens.shape[0]
    if exported.next_token is not None:
        decoder = make_exported_decoder(exported.next_token, context)
    else:
        decoder = make_uncached_decoder(exported.program.call, context, tokens.dtype)
    return decoder, exported.arrays, text


def _require_text(samples: Samples, source: Path) -> TextFormat:
    """Return the format of texts. Raises DataError unless the network predicts the next token."""
    text = samples.text
    if text is None or text.predicts != "next_token":
        raise DataError(f"{source}: --prompt needs a network that predicts the next token")
    return text
