"""Texts: the format that a network reads, by the tokenizer, and files of texts.

Files are read whole or by lines, or are columns of CSV files.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal, cast

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_bytes
from pipeline.core.files.name_text import show_name
from pipeline.core.files.paths import expand_home
from pipeline.core.host.memory import require_room
from pipeline.data.file_errors import name_file
from pipeline.data.inputs import name_mask
from pipeline.data.table import require_encoding
from pipeline.data.text.file_names import TOKENIZER
from pipeline.data.text.tokenizer import (
    UNKNOWN,
    ByteTokenizer,
    Tokenizer,
    WordTokenizer,
    make_character_tokenizer,
    make_word_tokenizer,
    split_words,
)

MAX_TOKENIZER_BYTES = 64 * 2**20
SPECIAL_TOKENS = ("<padding>", "<unknown>", "<start>")
"""Tokens 0, 1 and 2 for text classification with a tokenizer of this package."""
UNKNOWN_TOKEN = 1
START_TOKEN = 2
NO_TOKEN = -1
"""Padding of short texts in requests for predictions, which have no sizes."""
Predicts = Literal["next_token", "class", "pair"]
PAIR = ("text_a", "text_b")
"""Columns of a pair of texts, int32 (tokens,). The mask of each, bool (tokens,), is false for
padding."""
MAX_TEXT_BYTES = 16 * 2**30
ROOM_PER_BYTE = 24
"""Bytes of memory for each byte of a text, for its bytes, characters and tokens, with copies."""


@dataclass(frozen=True)
class TextFormat:
    """The tokenizer of texts, and whether a network continues them, classifies them or reads pairs.

    As in BERT, texts that aren't continued begin with special tokens: <start>, or a
    tokenizer.json's.
    """

    tokenizer: Tokenizer
    predicts: Predicts
    columns: tuple[str, ...] = ()
    """Names of the columns of a CSV that have the texts of a pair; empty for other texts."""
    encoding: str = "utf-8"
    """The encoding of files of texts."""

    @property
    def adds_special(self) -> bool:
        """Whether the numbers 0 to 2 are `SPECIAL_TOKENS`, and the tokenizer's tokens follow."""
        return self.predicts != "next_token" and not self.tokenizer.has_special_tokens

    @property
    def vocabulary(self) -> int:
        """The number of different tokens that the network reads."""
        return self.tokenizer.vocabulary + (len(SPECIAL_TOKENS) if self.adds_special else 0)

    def encode(self, text: str, max_tokens: int) -> np.ndarray:
        """Return the first tokens of a text to classify, int32 (n,), 1 to `max_tokens` of them."""
        if not self.adds_special:
            tokens = self.tokenizer.encode(text)[:max_tokens]
            return tokens if len(tokens) else np.zeros(1, np.int32)
        if self.tokenizer.kind in ("bytes", "characters"):
            text = text[:max_tokens]  # each character has at least one token
        tokens = self.tokenizer.encode(text)
        numbers = np.where(tokens == UNKNOWN, UNKNOWN_TOKEN, tokens + len(SPECIAL_TOKENS))
        return np.concatenate([[START_TOKEN], numbers])[:max_tokens].astype(np.int32)

    def encode_all(self, texts: Sequence[str], length: int) -> np.ndarray:
        """Return tokens of texts to classify, int32 (n, length), padded with `NO_TOKEN`."""
        samples = np.full((len(texts), length), NO_TOKEN, np.int32)
        for row, text in zip(samples, texts, strict=True):
            tokens = self.encode(text, length)
            row[: len(tokens)] = tokens
        return samples

    def encode_pairs(
        self, pairs: Sequence[Sequence[str]], lengths: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """Return the columns of `PAIR` for pairs of texts, int32 (n, length), padded with zeros,
        and the mask of each, bool (n, length)."""
        columns = {}
        for place, (name, length) in enumerate(zip(PAIR, lengths, strict=True)):
            tokens = self.encode_all([pair[place] for pair in pairs], length)
            columns[name] = np.maximum(tokens, 0)
            columns[name_mask(name)] = tokens != NO_TOKEN
        return columns

    def encode_prompt(self, prompt: str) -> np.ndarray:
        """Return the tokens of a prompt, int32 (n,). Raises DataError for an unknown token, and for
        a prompt without tokens."""
        if not prompt:
            raise DataError("the prompt is empty; must have at least one token")
        try:
            tokens = self.tokenizer.encode(prompt)
        except Exception as error:  # the library has no error class
            raise DataError(f"the prompt can't be read by the tokenizer: {error}") from error
        unknown = np.flatnonzero(tokens == UNKNOWN)
        if len(unknown):
            # Tokenizers of characters or words have a token for each of these.
            is_words = isinstance(self.tokenizer, WordTokenizer)
            parts = split_words(prompt) if is_words else prompt
            missing = ", ".join(map(repr, dict.fromkeys(parts[n] for n in unknown.tolist())))
            raise DataError(
                f"the prompt has {show_name(missing)}, not among the {self.tokenizer.vocabulary:,} "
                f"{self.tokenizer.kind} that the network was trained on"
            )
        if not len(tokens):
            raise DataError(
                f"the prompt {show_name(prompt)!r} has no tokens; must have at least one"
            )
        return tokens

    def to_dict(self) -> dict[str, Any]:
        """Return what is predicted as JSON. The tokenizer has a separate file."""
        columns = {"columns": list(self.columns)} if self.columns else {}
        encoding = {} if self.encoding == "utf-8" else {"encoding": self.encoding}
        return {"predicts": self.predicts, **columns, **encoding}


def write_tokenizer(folder: Path, text: TextFormat) -> None:
    """Write the tokenizer into a folder. Raises OSError if it can't be written."""
    write_whole(folder / TOKENIZER, text.tokenizer.to_bytes())


def read_tokenizer(path: Path, *, special_tokens: bool = False) -> Tokenizer:
    """Read a tokenizer.json. Raises DataError if it can't be read or isn't one."""
    # Imported here, since most runs make their tokenizers.
    from pipeline.data.text.tokenizer_file import parse_tokenizer

    try:
        return parse_tokenizer(read_bytes(path, MAX_TOKENIZER_BYTES), special_tokens=special_tokens)
    except OSError as error:
        raise DataError(f"{path}: can't be read as a tokenizer: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def make_tokenizer(
    name: str, texts: Iterable[str], *, max_words: int | None = None, special_tokens: bool = False
) -> Tokenizer:
    """Make the tokenizer that a recipe names: bytes, characters, words or the path of a file. The
    characters or words of `texts` are the vocabulary. If `max_words` is None, "words" is a path
    too. With `special_tokens`, the tokenizer of a file adds its special tokens to texts."""
    match name:
        case "bytes":
            return ByteTokenizer()
        case "characters":
            return make_character_tokenizer(texts)
        case "words" if max_words is not None:
            return make_word_tokenizer(texts, max_words)
    return read_tokenizer(expand_home(Path(name)), special_tokens=special_tokens)


def read_text_format(folder: Path, record: Mapping[str, Any]) -> TextFormat | None:
    """Read the text format of a run or an export from its folder and its `record`. None: samples
    aren't texts. Raises DataError for a damaged tokenizer, ValueError for an invalid record."""
    text = record.get("text")
    if text is None:
        return None
    encoding = "utf-8"
    if isinstance(text, Mapping):
        encoding = require_encoding(str(text.get("encoding", "utf-8")))
    match text:
        case {"predicts": ("next_token" | "class") as predicts}:
            tokenizer = read_tokenizer(folder / TOKENIZER, special_tokens=predicts == "class")
            return TextFormat(tokenizer, cast(Predicts, predicts), encoding=encoding)
        case {"predicts": "pair", "columns": [str(first), str(second)]}:
            tokenizer = read_tokenizer(folder / TOKENIZER, special_tokens=True)
            return TextFormat(tokenizer, "pair", (first, second), encoding)
    raise ValueError("text is not described as a run describes it")


def list_text_files(root: Path, pattern: str) -> list[Path]:
    """Return `root` if it is a file, else the files in it that match `pattern`, sorted. Raises
    DataError if none match, for a pattern that isn't relative or valid, and for links out of
    `root`."""
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DataError(f"{root}: there is no such file or folder")
    try:
        # Python 3.13 reads ** inside a name as *, older ones raise ValueError.
        if any("**" in part and part != "**" for part in PurePath(pattern).parts):
            raise ValueError("** must be a folder's name of its own")
        files = sorted(path for path in root.glob(pattern) if path.is_file())
    except (NotImplementedError, ValueError, IndexError) as error:
        raise DataError(
            f"dataset.pattern = {show_name(pattern)!r}: {error}; must be relative to dataset.root, "
            "as in *.txt or **/*.txt"
        ) from error
    if not files:
        raise DataError(
            f"{root}: holds no file that matches dataset.pattern = {show_name(pattern)}"
        )
    resolved_root = root.resolve()
    for file in files:
        if not file.resolve().is_relative_to(resolved_root):
            raise DataError(f"{file}: leads out of {root}, to {file.resolve()}; copy its target")
    return files


def read_files(files: list[Path]) -> list[bytes]:
    """Return the content of each file. Raises DataError for an unreadable file, or too little
    memory."""
    size_bytes = 0
    for file in files:
        with name_file(file):
            size_bytes += file.stat().st_size
    with name_file(files[0].parent):
        description = f"{len(files):,} files of {size_bytes / 1e6:,.1f} MB"
        require_room(ROOM_PER_BYTE * size_bytes, description)
    return [read_file(file) for file in files]


def decode_text(content: bytes, encoding: str) -> str:
    """Decode the text of a file. Raises ValueError with the first byte of another encoding."""
    try:
        return content.decode(encoding)
    except UnicodeError as error:
        # Some codecs raise UnicodeError without a place.
        start = error.start if isinstance(error, UnicodeDecodeError) else 0
        byte = f": byte 0x{content[start]:02x} at {start:,}" if start < len(content) else ""
        raise ValueError(
            f"is not {encoding.upper()}{byte}; set dataset.encoding, such as latin-1 or utf-16"
        ) from error


def read_text(file: Path, encoding: str = "utf-8") -> str:
    """Return the text of a file without a byte order mark, which Excel and Windows write. Raises
    DataError if it can't be read, and ValueError for another encoding."""
    return decode_text(read_file(file), encoding).removeprefix("\ufeff")


def read_text_lines(file: Path, encoding: str = "utf-8") -> list[str]:
    """Return the stripped lines of a text file that aren't empty. Raises DataError without any."""
    with name_file(file):
        # Only \n, \r\n and \r end a line.
        text = read_text(file, encoding)
        lines = [line.strip() for line in io.StringIO(text, newline=None)]
    texts = [line for line in lines if line]
    if not texts:
        raise DataError(f"{file}: holds no text; must have one on each line")
    return texts


def read_file(file: Path) -> bytes:
    """Return the content of a file. Raises DataError if it can't be read, or for too little
    memory."""
    with name_file(file):
        require_room(ROOM_PER_BYTE * file.stat().st_size, f"the text of {file.name}")
        return read_bytes(file, MAX_TEXT_BYTES)
