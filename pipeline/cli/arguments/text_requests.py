"""Texts on the command line of `infer`: prompts to be continued, sentences to be classified."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeline.core.errors import DataError, UsageError
from pipeline.core.files.error_text import shown
from pipeline.data.text.text_files import read_lines_of_text
from pipeline.data.text.text_format import TextFormat
from pipeline.stages.export.export import is_export, read_export
from pipeline.stages.export.prediction import Weights
from pipeline.stages.export.text_generation import (
    Decoder,
    Sampling,
    continuation,
    decoder_of,
    exported_decoder,
    whole_decoder,
)
from pipeline.stages.export.trained_run import Samples, read_trained_run, spare_gpus

TOKENS = 200


@dataclass(frozen=True)
class TextRequest:
    """Request of the options: to continue a prompt, or to classify texts."""

    prompt: str | None = None
    texts: tuple[str, ...] = ()
    tokens: int = TOKENS
    sampling: Sampling = field(default_factory=Sampling)


def request_of(
    prompt: str | None, texts: Sequence[str], options: Mapping[str, int | float | None]
) -> TextRequest:
    """Return the request of the options; `options` are those of a prompt, None if not typed.

    Raises UsageError for options without a prompt, and for a prompt and texts at once.
    """
    typed = [f"--{name.replace('_', '-')}" for name in options if options[name] is not None]
    if typed and prompt is None:
        raise UsageError(typed, "needs --prompt, the text to be continued")
    if prompt is not None and texts:
        rule = "one continues a text, the other classifies texts"
        raise UsageError(["--prompt", "--text"], rule)
    temperature, top_k = options["temperature"], options["top_k"]
    sampling = Sampling(
        1.0 if temperature is None else float(temperature),
        None if top_k is None else int(top_k),
        int(options["seed"] or 0),
    )
    return TextRequest(prompt, tuple(texts), int(options["tokens"] or TOKENS), sampling)


def print_continuation(source: Path, request: TextRequest, *, as_json: bool) -> None:
    """Print a prompt and its continuation as it is drawn, and the speed on stderr.

    Raises DataError for a network that continues no texts, and a prompt that it can't read.
    """
    assert request.prompt is not None, "there is a prompt"
    decoder, weights, text = _decoder(source)
    prompt = text.encode_prompt(request.prompt)
    started_at = time.perf_counter()
    drawn: list[int] = []
    said = 0
    for part in continuation(decoder, weights, prompt, request.tokens, request.sampling):
        if not drawn:
            first_s, first = time.perf_counter() - started_at, len(part)
        drawn += part.tolist()
        if not as_json:
            said = _say(text, prompt, drawn, said, last=len(drawn) == request.tokens)
    seconds = time.perf_counter() - started_at
    if as_json:
        whole = text.tokenizer.decode([*prompt.tolist(), *drawn])
        new = text.tokenizer.decode(drawn)
        print(json.dumps({"prompt": request.prompt, "continuation": new, "text": whole}))
    rest_s, rest = seconds - first_s, len(drawn) - first
    speed = f", then {rest / rest_s:,.0f} tokens/s" if rest else ""
    print(
        f"{len(drawn):,} tokens in {seconds:.2f} s: the first {first} in {first_s:.2f} s with "
        f"compilation{speed}",
        file=sys.stderr,
    )


def _say(text: TextFormat, prompt: np.ndarray, drawn: list[int], said: int, *, last: bool) -> int:
    """Print the characters that are new, and return how many were printed in all."""
    whole = text.tokenizer.decode([*prompt.tolist(), *drawn])
    # A character of several tokens may be incomplete.
    ready = whole if last else whole.rstrip("\ufffd")
    print(_harmless(ready[said:]), end="\n" if last else "", flush=True)
    return max(said, len(ready))


def _harmless(text: str) -> str:
    """The text without control characters, which would command the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _decoder(source: Path) -> tuple[Decoder, Weights, TextFormat]:
    """The decoder of a run or an export, its weights, and the format of its texts."""
    if not is_export(source):
        spare_gpus(source)
        run = read_trained_run(source)
        text = _continued(run.samples, source)
        return decoder_of(run), run.arrays, text
    exported = read_export(source)
    samples = exported.samples
    text, context = _continued(samples, source), samples.shape[0]
    if exported.next_token is not None:
        return exported_decoder(exported.next_token, context), exported.arrays, text
    decoder = whole_decoder(exported.program.call, context, samples.dtype)
    return decoder, exported.arrays, text


def _continued(samples: Samples, source: Path) -> TextFormat:
    """The format of texts that are continued. Raises DataError for other samples."""
    if samples.text is None or samples.text.predicts != "next_token":
        raise DataError(f"{source}: does not predict the next token; --prompt needs one that does")
    return samples.text


def classified_texts(
    request: TextRequest, files: Sequence[Path], samples: Samples
) -> Iterator[tuple[list[str], np.ndarray]]:
    """Yield names and samples of the texts of the options, then of the lines of each file.

    Raises DataError where the network classifies no texts, and for files without any.
    """
    text = samples.text
    if text is None:
        raise DataError(f"the network reads {samples.dtype} images; --text needs one of texts")
    if text.predicts != "class":
        raise DataError("the network continues texts; give --prompt and a text to be continued")
    if request.texts:
        names = [shown(one) for one in request.texts]
        yield names, _encoded(text, request.texts, samples)
    for file in files:
        lines = read_lines_of_text(file)
        names = [f"{file}[{number}]" for number in range(len(lines))] if len(lines) > 1 else []
        yield names or [str(file)], _encoded(text, lines, samples)


def _encoded(text: TextFormat, texts: Sequence[str], samples: Samples) -> np.ndarray:
    try:
        return text.encode_all(texts, samples.shape[0])
    except ValueError as error:
        raise DataError(f"a text can't be read by the tokenizer: {error}") from error
