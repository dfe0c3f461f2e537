"""Tars of samples, as the webdataset package writes them: members KEY.EXT, grouped by KEY.

KEY is a path up to the first dot in the name of the file, EXT the text after it. Nothing is
extracted: members of a plain tar are read in place. Sources:
https://webdataset.github.io/webdataset, "The WebDataset Format"; POSIX, pax, "ustar Interchange
Format" and "pax Header Block".
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
from pydantic_core import from_json

from pipeline.core.files.name_text import show_name
from pipeline.core.files.npy import parse_npy
from pipeline.data.image_file import SUFFIXES
from pipeline.data.records.tfrecord_file import Feature, Visit

MAX_MEMBER_BYTES = 2**26
"""Most bytes of a member that are read."""
MAX_EXTENSIONS = 64
"""Most different extensions of a tar. `TarShard.spans` has a column for each."""
_BLOCK_BYTES = tarfile.BLOCKSIZE
_CHUNK_BYTES = 2**20
_PROGRAMS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstd"}
"""Programs that compress files, by their first bytes."""
_PAX_TYPES = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_PREFIX_TYPES = (*_PAX_TYPES, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
"""Types of headers whose content describes the next member."""
_PAX_RECORD = re.compile(rb"(\d{1,9}) ([^=]+)=")
_SAMPLE_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)


@dataclass(frozen=True)
class TarShard:
    """A tar whose headers were read. Samples are read one by one."""

    path: Path
    extensions: tuple[str, ...]
    """The extensions of all samples, in lower case."""
    spans: np.ndarray
    """Start and bytes of each sample's members, int64 (samples, extensions, 2); -1 if missing."""
    labels: Mapping[str, int]
    """The label of each class, by the name of the class."""

    def read_example(self, record: int) -> Mapping[str, Feature]:
        """Return the features of a sample, by name. Labels and JSON are read now, other members on
        access. Raises OSError, and ValueError if the sample is damaged."""
        members = zip(self.extensions, self.spans[record].tolist(), strict=True)
        spans = {name: (start, size_bytes) for name, (start, size_bytes) in members if start >= 0}
        return _make_features(self.path, spans, self.labels)


@dataclass(frozen=True)
class _Features(Mapping[str, Feature]):
    """The features of a sample: values, and members of a tar that are read on access."""

    path: Path
    fields: Mapping[str, Feature]
    """Labels, and the fields of JSON."""
    spans: Mapping[str, tuple[int, int]]
    """Start and size of the members, in bytes, by feature."""

    def __getitem__(self, name: str) -> Feature:
        """Return a feature. Raises KeyError, OSError, and ValueError if it is damaged."""
        if name not in self.spans:
            return self.fields[name]
        content = _read_member(self.path, name, self.spans[name])
        return parse_npy(name, content) if name == "npy" else (content,)

    def __contains__(self, name: object) -> bool:
        return name in self.spans or name in self.fields

    def __iter__(self) -> Iterator[str]:
        return iter({**self.fields, **self.spans})

    def __len__(self) -> int:
        return len({**self.fields, **self.spans})


def index_tar(path: Path, visit: Visit, labels: Mapping[str, int]) -> TarShard:
    """Call `visit` for each sample, and return the indexed tar. Samples are in the order of their
    first members. Files without a key or an extension are left out, as webdataset does. `labels`
    has the label of each class, by the name of the class. Raises OSError, and ValueError for a
    damaged tar or sample."""
    rows: dict[str, int] = {}
    columns: dict[str, int] = {}
    members = {}
    for member in scan_tar(path):
        match = _SAMPLE_NAME.fullmatch(member.name)
        if match is None:
            continue
        key, extension = match.groups()
        row = rows.setdefault(key, len(rows))
        column = columns.setdefault(extension.lower(), len(columns))
        if (row, column) in members:
            raise ValueError(f"has two members {show_name(member.name)}")
        if len(columns) > MAX_EXTENSIONS:
            raise ValueError(
                f"has more than {MAX_EXTENSIONS} extensions, such as {show_name(extension)}; an "
                "extension begins at the first dot of a name"
            )
        members[row, column] = member.offset_data, member.size
    spans = np.full((len(rows), len(columns), 2), -1, np.int64)
    for (row, column), span in members.items():
        spans[row, column] = span
    shard = TarShard(path, tuple(columns), spans, labels)
    for key, record in rows.items():
        try:
            visit(record, shard.read_example(record))
        except ValueError as error:
            raise ValueError(f"sample {show_name(key)}: {error}") from error
    return shard


def scan_tar(path: Path) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of a plain tar's files, in order, with name, offset_data and size. Raises
    OSError, and ValueError for a damaged or compressed tar, links, and names that lead out."""
    file_bytes = path.stat().st_size
    position = 0
    next_fields: Mapping[str, str] = {}  # path and size of the next file, from prefix headers
    with path.open("rb") as file:
        while (header := _read_header(file, position)) is not None:
            is_prefix = header.type in _PREFIX_TYPES
            if not is_prefix:
                header.name = next_fields.get("path", header.name).removeprefix("./")
                size_text = next_fields.get("size", header.size)
                # Some programs write a size for a folder, but it has no bytes in the tar.
                header.size = 0 if header.isdir() else int(size_text)
            header.offset_data = position + _BLOCK_BYTES
            if not 0 <= header.size <= file_bytes - header.offset_data:
                problem = f"{show_name(header.name)} has {header.size:,} bytes"
                raise ValueError(f"is truncated: {problem}, the file {file_bytes:,}")
            num_blocks = -(-header.size // _BLOCK_BYTES)
            position = header.offset_data + num_blocks * _BLOCK_BYTES
            if is_prefix:
                next_fields = {**next_fields, **_read_prefix(file, header)}
                continue
            next_fields = {}
            _require_file(header)
            if header.isreg():
                yield header
        while block := file.read(_CHUNK_BYTES):
            if any(block):
                raise ValueError(f"goes on after its end, at byte {position:,}; it is several tars")


def _read_header(file: BinaryIO, position: int) -> tarfile.TarInfo | None:
    """Return the header at a position; None for the zeros at the end. Raises ValueError for a
    compressed, truncated or damaged tar."""
    file.seek(position)
    block = file.read(_BLOCK_BYTES)
    for mark, program in _PROGRAMS.items():
        if position == 0 and block.startswith(mark):
            raise ValueError(f"is compressed; decompress it with {program} -d")
    if len(block) < _BLOCK_BYTES:
        raise ValueError("is truncated: it lacks the zeros at the end of a tar")
    if not any(block):
        return None
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        problem = f"the header at byte {position:,} is damaged" if position else "isn't a tar"
        raise ValueError(f"{problem}: {error}") from error


def _read_prefix(file: BinaryIO, header: tarfile.TarInfo) -> Mapping[str, str]:
    """Return the fields `path` and `size` of the next member, as far as the content of a header of
    `_PREFIX_TYPES` has them. Raises ValueError for a damaged header, and for a sparse file."""
    if header.size > _CHUNK_BYTES:
        raise ValueError(f"has a header of {header.size:,} bytes; must be at most {_CHUNK_BYTES:,}")
    content = file.read(header.size)
    if header.type == tarfile.GNUTYPE_LONGNAME:
        return {"path": content.partition(b"\0")[0].decode(errors="surrogateescape")}
    fields = {}
    while header.type in _PAX_TYPES and content:
        match = _PAX_RECORD.match(content)
        length = int(match[1]) if match else 0
        if match is None or not match.end() < length <= len(content):
            raise ValueError(f"the pax header before byte {file.tell():,} is damaged")
        value = content[match.end() : length - 1].decode(errors="surrogateescape")
        fields[match[2].decode(errors="replace")] = value
        content = content[length:]
    if any(name.startswith("GNU.sparse.") for name in fields):
        raise ValueError(f"has a sparse file at byte {file.tell():,}, which can't be read")
    if not re.fullmatch(r"[0-9]{1,18}", fields.get("size", "0")):
        raise ValueError(f"the pax header before byte {file.tell():,} is damaged")
    return {name: fields[name] for name in ("path", "size") if name in fields}


def _require_file(header: tarfile.TarInfo) -> None:
    """Raise ValueError for a link, a device or a sparse file, and a name that leads out."""
    name = show_name(header.name)
    if header.name.startswith("/") or ".." in PurePosixPath(header.name).parts:
        raise ValueError(f"{name} leads out of the tar")
    if header.issym() or header.islnk():
        raise ValueError(
            f"{name} is a link to {show_name(header.linkname)}; "
            "tar --dereference --hard-dereference writes its content"
        )
    if header.issparse() or not (header.isreg() or header.isdir()):
        raise ValueError(f"{name} must be a plain file, not of type {header.type!r}")


def _read_member(path: Path, extension: str, span: tuple[int, int]) -> bytes:
    """Return the content of a member. Raises OSError, and ValueError if it is too large."""
    start, size_bytes = span
    if size_bytes > MAX_MEMBER_BYTES:
        raise ValueError(
            f"{show_name(extension)} has {size_bytes:,} bytes; "
            f"at most {MAX_MEMBER_BYTES:,} are read"
        )
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size_bytes)


def _make_features(
    path: Path, spans: Mapping[str, tuple[int, int]], labels: Mapping[str, int]
) -> _Features:
    """Return the features of a sample: its members by extension, and the fields of its JSON.
    `image` is the member with an image's extension, if there is only one. `label` is the member
    cls, else the field of JSON, or JSON that isn't an object, else the member txt. Raises OSError,
    and ValueError for damaged JSON."""
    texts = {
        name: _read_member(path, name, spans[name]).decode(errors="replace").strip()
        for name in ("txt", "cls")
        if name in spans
    }
    values: dict[str, Any] = {"label": texts.get("txt")}
    if "json" in spans:
        tree = from_json(_read_member(path, "json", spans["json"]))
        values |= tree if isinstance(tree, dict) else {"label": tree}
    if "cls" in texts:
        values["label"] = texts["cls"]
    values |= texts
    fields = {
        name: _make_label(value, labels) for name, value in values.items() if value is not None
    }
    members = {name: span for name, span in spans.items() if name not in texts}
    images = [span for name, span in members.items() if f".{name}" in SUFFIXES]
    if len(images) == 1:
        members["image"] = images[0]
    return _Features(path, fields, members)


def _make_label(value: Any, labels: Mapping[str, int]) -> Feature:
    """Convert a value to a feature: the label of a class's name, else numbers, else bytes."""
    parsers: Sequence[Callable[[Any], Any]] = (np.asarray,)
    if isinstance(value, str):
        parsers = (labels.__getitem__, int, float)
    for parse in parsers:
        with suppress(KeyError, ValueError):
            numbers = np.atleast_1d(np.asarray(parse(value)))
            if numbers.dtype.kind in "if":
                return numbers
    return (str(value).encode(),)
