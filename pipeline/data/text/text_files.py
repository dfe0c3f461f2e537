"""Functions that read text files, whole or by lines."""

from __future__ import annotations

import io
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.core.files.bounded_read import read_bytes
from pipeline.core.files.name_text import show_name
from pipeline.core.host.memory import require_room
from pipeline.data.file_errors import name_file
from pipeline.data.text.tokenizer import decode_utf8

MAX_TEXT_BYTES = 16 * 2**30
ROOM_PER_BYTE = 24
"""Bytes of memory for each byte of a text, for its bytes, characters and tokens, with copies."""


def list_text_files(root: Path, pattern: str) -> list[Path]:
    """Return `root` if it is a file, else the files in it that match `pattern`, sorted. Raises
    DataError if none match, and for links out of `root`."""
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DataError(f"{root}: there is no such file or folder")
    files = sorted(path for path in root.glob(pattern) if path.is_file())
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


def read_text_lines(file: Path) -> list[str]:
    """Return the stripped lines of a text file that aren't empty. Raises DataError without any."""
    with name_file(file):
        # Windows writes a byte order mark. Only \n, \r\n and \r end a line.
        text = decode_utf8(read_file(file)).removeprefix("\ufeff")
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
