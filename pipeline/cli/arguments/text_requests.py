"""Texts on the command line of `infer`: prompts to be continued, sentences to be classified."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
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

PROMPT, TEXT = "--prompt", "--text"
TOKENS, TEMPERATURE, TOP_K, SEED = "--tokens", "--temperature", "--top-k", "--seed"
OPTIONS = (PROMPT, TEXT, TOKENS, TEMPERATURE, TOP_K, SEED)
MAX_TOKENS = 1_000_000
MAX_SEED = 2**31 - 1
MAX_TEMPERATURE = 1e6


@dataclass(frozen=True)
class TextRequest:
    """Request of the options: to continue a prompt, or to classify texts."""

    prompt: str | None = None
    texts: tuple[str, ...] = ()
    tokens: int = 200
    sampling: Sampling = field(default_factory=Sampling)


def take_text_options(args: Sequence[str]) -> tuple[TextRequest, list[str]]:
    """Take the options of texts, `--tokens=9` or `--tokens 9`, out of the arguments.

    Raises UsageError for a value that is missing or wrong, and for options without a prompt.
    """
    given: dict[str, list[str]] = {}
    rest: list[str] = []
    words = iter(args)
    for word in words:
        option, has_value, value = word.partition("=")
        if option not in OPTIONS:
            rest.append(word)
            continue
        following = value if has_value else next(words, None)
        if following is None:
            raise UsageError([word], "needs a value after it")
        given.setdefault(option, []).append(following)
    last = {option: values[-1] for option, values in given.items()}
    of_prompts = [option for option in (TOKENS, TEMPERATURE, TOP_K, SEED) if option in last]
    if of_prompts and PROMPT not in last:
        raise UsageError(of_prompts, f"needs {PROMPT}, the text to be continued")
    if PROMPT in last and TEXT in last:
        raise UsageError([PROMPT, TEXT], "one continues a text, the other classifies texts")
    temperature = _number(TEMPERATURE, last.get(TEMPERATURE, "1"))
    top_k = _whole(TOP_K, last[TOP_K], 1, MAX_SEED) if TOP_K in last else None
    sampling = Sampling(temperature, top_k, _whole(SEED, last.get(SEED, "0"), 0, MAX_SEED))
    tokens = _whole(TOKENS, last.get(TOKENS, "200"), 1, MAX_TOKENS)
    return TextRequest(last.get(PROMPT), tuple(given.get(TEXT, ())), tokens, sampling), rest


def _whole(option: str, given: str, least: int, most: int) -> int:
    is_whole = given.isascii() and given.isdecimal() and len(given) <= len(str(most))
    if not is_whole or not least <= int(given) <= most:
        raise UsageError(
            [f"{option} {shown(given)}"], f"must be a whole number, {least} to {most:,}"
        )
    return int(given)


def _number(option: str, given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_TEMPERATURE:
        raise UsageError(
            [f"{option} {shown(given)}"], f"must be a number, 0 to {MAX_TEMPERATURE:g}"
        )
    return value


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
        raise DataError(f"{source}: does not predict the next token; {PROMPT} needs one that does")
    return samples.text


def classified_texts(
    request: TextRequest, files: Sequence[Path], samples: Samples
) -> Iterator[tuple[list[str], np.ndarray]]:
    """Yield names and samples of the texts of the options, then of the lines of each file.

    Raises DataError where the network classifies no texts, and for files without any.
    """
    text = samples.text
    if text is None:
        raise DataError(f"the network reads {samples.dtype} images; {TEXT} needs one of texts")
    if text.predicts != "class":
        raise DataError(f"the network continues texts; give {PROMPT} and a text to be continued")
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
