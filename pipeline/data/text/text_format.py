"""The format of a network's texts: its tokenizer, and what is predicted of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_bytes
from pipeline.core.files.error_text import shown
from pipeline.data.text.tokenizer import UNKNOWN, LibraryTokenizer, Tokenizer, parse_tokenizer

TOKENIZER = "tokenizer.json"
"""The file of a run, or of an export, that keeps the tokenizer."""
MAX_TOKENIZER_BYTES = 64 * 2**20

SPECIAL = ("<padding>", "<unknown>", "<start>")
"""The first three tokens of texts that are classified with a tokenizer of this package."""
UNKNOWN_TOKEN, START_TOKEN = 1, 2

NO_TOKEN = -1
"""Filler of texts up to the length of the longest, where no sizes go with them."""

Predicts = Literal["next_token", "class"]


@dataclass(frozen=True)
class TextFormat:
    """The tokenizer of texts, and whether a network continues or classifies them.

    Texts to be classified begin with a token of their own, as in BERT: the first of `SPECIAL`, or
    what a tokenizer.json puts around a text.
    """

    tokenizer: Tokenizer
    predicts: Predicts

    @property
    def adds_special(self) -> bool:
        """Whether tokens are numbered from 3, after `SPECIAL`."""
        return self.predicts == "class" and not isinstance(self.tokenizer, LibraryTokenizer)

    @property
    def vocabulary(self) -> int:
        """The number of different tokens that the network reads."""
        return self.tokenizer.vocabulary + (len(SPECIAL) if self.adds_special else 0)

    def encode(self, text: str, most: int) -> np.ndarray:
        """The first `most` tokens of a text to be classified, int32 (n,), one at least."""
        if not self.adds_special:
            tokens = self.tokenizer.encode(text)[:most]
            return tokens if len(tokens) else np.zeros(1, np.int32)
        tokens = self.tokenizer.encode(text[: _enough(self.tokenizer, most)])
        numbers = np.where(tokens == UNKNOWN, UNKNOWN_TOKEN, tokens + len(SPECIAL))
        return np.concatenate([[START_TOKEN], numbers])[:most].astype(np.int32)

    def encode_all(self, texts: Sequence[str], length: int) -> np.ndarray:
        """Texts to be classified, int32 (n, length, 1, 1), filled up with `NO_TOKEN`."""
        samples = np.full((len(texts), length), NO_TOKEN, np.int32)
        for row, text in zip(samples, texts, strict=True):
            tokens = self.encode(text, length)
            row[: len(tokens)] = tokens
        return samples[..., np.newaxis, np.newaxis]

    def encode_prompt(self, prompt: str) -> np.ndarray:
        """The tokens of a text to be continued, int32 (n,).

        Raises DataError for one without tokens, and where the vocabulary lacks one.
        """
        if not prompt:
            raise DataError("the prompt is empty; must have one token at least to be continued")
        try:
            tokens = self.tokenizer.encode(prompt)
        except Exception as error:  # of the library, which has none of its own
            raise DataError(f"the prompt can't be read by the tokenizer: {error}") from error
        unknown = np.flatnonzero(tokens == UNKNOWN)
        if len(unknown):
            # Only characters are one to one with tokens, and only of these some are unknown.
            found = ", ".join(repr(c) for c in dict.fromkeys(prompt[i] for i in unknown.tolist()))
            raise DataError(
                f"the prompt has {shown(found)}, not among the {self.tokenizer.vocabulary:,} "
                f"{self.tokenizer.kind} that the network was trained on"
            )
        if not len(tokens):
            raise DataError(f"the prompt {shown(prompt)!r} has no tokens; must have one at least")
        return tokens

    def to_dict(self) -> dict[str, Any]:
        """Return what is predicted, as JSON; the tokenizer is in a file of its own."""
        return {"predicts": self.predicts}


def _enough(tokenizer: Tokenizer, tokens: int) -> int | None:
    """The number of characters that hold `tokens` tokens; None where it is not known."""
    return tokens if tokenizer.kind in ("bytes", "characters") else None


def write_tokenizer(folder: Path, text: TextFormat) -> None:
    """Keep the tokenizer in a folder. Raises OSError where the system refuses."""
    write_whole(folder / TOKENIZER, text.tokenizer.to_bytes())


def read_tokenizer(path: Path, *, special_tokens: bool = False) -> Tokenizer:
    """Read a tokenizer.json. Raises DataError where it can't be read or is none."""
    try:
        content = read_bytes(path, MAX_TOKENIZER_BYTES)
        return parse_tokenizer(content, special_tokens=special_tokens)
    except OSError as error:
        raise DataError(f"{path}: can't be read as a tokenizer: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def read_text_format(folder: Path, about: Mapping[str, Any]) -> TextFormat | None:
    """The format of texts of a run or an export, which `about` describes; None of other samples.

    Raises DataError where the tokenizer is missing or damaged, ValueError for another description.
    """
    match about.get("text"):
        case None:
            return None
        case {"predicts": ("next_token" | "class") as predicts}:
            special = predicts == "class"
            tokenizer = read_tokenizer(folder / TOKENIZER, special_tokens=special)
            return TextFormat(tokenizer, cast(Predicts, predicts))
    raise ValueError("text is not described as a run describes it")
