"""Arrays in files that orbax reads: zarr 2 in an OCDBT database of tensorstore.

Tensorstore itself isn't used: if the clock is set back, it starts no threads until the clock has
its time again, so that writing or reading waits. The format is documented at
google.github.io/tensorstore/kvstore/ocdbt.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from pipeline.checkpoint.manifest import DESCRIPTION
from pipeline.core.files.bounded_read import parse_json, read_bytes
from pipeline.core.host.tensorboardx import import_tensorboardx

Buffer: TypeAlias = Any
"""Bytes, or an array of uint8."""

DATABASE = "manifest.ocdbt"
"""File of the database that lists its files of data."""
DATA = "d"
"""Folder of the files of data."""
FILE_BYTES = 1 << 28
"""Approximate size of a file of arrays. Arrays are in several files, which are hashed at once."""
INLINE_BYTES = 1024
"""Larger values are in the files of data, others in the node of the tree."""
NODE_BYTES = 100_000_000
"""Size of a node above which programs that change the database split it. Orbax sets it too."""
HEADER = b"/.zarray"
"""End of the key of an array's metadata."""
NODE_LIMIT_BYTES = 64 << 20
"""Largest manifest, node and keys that are read."""
TYPE = re.compile(r"[<>|](?:b1|[iu][1248]|f[248]|c8|c16)")
"""Names of NumPy types in zarr 2."""
MANIFEST_MAGIC = 0x0CDB3A2A
NODE_MAGIC = 0x0CDB20DE
NAMED_TYPES = frozenset(
    re.findall(
        r"\w+",
        "bfloat16 float4_e2m1fn float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz "
        "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int2 int4",
    )
)
"""Types that tensorstore's zarr has beside NumPy's own, by name."""
NUMBERS = frozenset(np.typecodes["AllInteger"] + "?efdFD")
"""Characters of the NumPy types that zarr has."""
HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
DICTIONARY_KEY = 2
"""Orbax's number for a key of a dictionary."""


@dataclass(frozen=True)
class _Place:
    """Place of bytes in the files of data."""

    file: int
    offset: int
    length: int


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays into a new folder. Raises OSError, and ValueError for types without a name in
    zarr and for arrays without elements, which orbax doesn't read."""
    began_ns = _read_clock_ns()
    leaves = {name: np.asarray(array) for name, array in arrays.items()}
    headers = {name: _format_header(name, array) for name, array in leaves.items()}
    (folder / DATA).mkdir(parents=True)
    with _DataFiles(folder) as files:
        entries: dict[bytes, bytes | _Place] = {}
        for name, array in leaves.items():
            entries[name.encode() + HEADER] = headers[name]
            chunk = _name_chunk(name.encode(), array.ndim)
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            is_small = content.nbytes <= INLINE_BYTES
            files.limit_size()
            entries[chunk] = content.tobytes() if is_small else files.append(content)
        node = _format_node(entries, files.names)
        root = files.append(node)
        names = files.names
    data_bytes = sum(place.length for place in entries.values() if isinstance(place, _Place))
    statistics = (len(entries), len(node), data_bytes)
    (folder / DATABASE).write_bytes(_format_manifest(root, names, statistics))
    (folder / DESCRIPTION).write_text(json.dumps(_describe_tree(leaves)), encoding="utf-8")
    ended = {"init_timestamp_nsecs": began_ns, "commit_timestamp_nsecs": _read_clock_ns()}
    described = {"item_handlers": HANDLER, "metrics": {}, "performance_metrics": {}, **ended}
    text = json.dumps({**described, "custom_metadata": {}})
    (folder / "_CHECKPOINT_METADATA").write_text(text, encoding="utf-8")


class _DataFiles:
    """The files of data of a database, to which values are appended."""

    def __init__(self, folder: Path) -> None:
        self.names: list[str] = []
        """Names of the files, relative to the folder of the database."""
        self._folder = folder
        self._open_file()

    def append(self, content: Buffer) -> _Place:
        """Write bytes to the last file, and return their place. Raises OSError."""
        offset = self._file.tell()
        self._file.write(content)
        return _Place(len(self.names) - 1, offset, self._file.tell() - offset)

    def limit_size(self) -> None:
        """Begin another file if the last one is full. Raises OSError."""
        if self._file.tell() >= FILE_BYTES:
            self._file.close()
            self._open_file()

    def _open_file(self) -> None:
        self.names.append(_name_file(len(self.names)))
        self._file = (self._folder / self.names[-1]).open("xb")

    def __enter__(self) -> _DataFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _name_file(number: int) -> str:
    return f"{DATA}/{number:032x}"


def _name_chunk(name: bytes, num_axes: int) -> bytes:
    """Return the key of the only chunk of an array."""
    return name + b"/" + (b".".join([b"0"] * num_axes) or b"0")


def _format_header(name: str, array: np.ndarray) -> bytes:
    """Return the metadata of an array in zarr 2: one chunk, not compressed. Raises ValueError."""
    dtype = array.dtype
    if dtype.char not in NUMBERS and dtype.name not in NAMED_TYPES:
        raise ValueError(f"{name}: arrays of {dtype} can't be saved")
    if array.size == 0:
        raise ValueError(f"{name}: arrays without elements can't be saved, shape {array.shape}")
    header = {
        "chunks": list(array.shape),
        "compressor": None,
        "dimension_separator": ".",
        "dtype": dtype.name if dtype.name in NAMED_TYPES else dtype.str,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(array.shape),
        "zarr_format": 2,
    }
    return json.dumps(header, separators=(",", ":")).encode()


def _describe_tree(arrays: Iterable[str]) -> Mapping[str, Any]:
    """Return orbax's description of a dictionary of arrays."""
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    tree = {
        str((name,)): {
            "key_metadata": [{"key": name, "key_type": DICTIONARY_KEY}],
            "value_metadata": value,
        }
        for name in arrays
    }
    settings = {"use_ocdbt": True, "use_zarr3": False}
    more = {"store_array_data_equal_to_fill_value": True, "custom_metadata": None}
    return {"tree_metadata": tree, **settings, **more}


def _format_manifest(root: _Place, names: Sequence[str], statistics: Sequence[int]) -> bytes:
    """Return the manifest of a database with one version, whose tree is the node at `root`.

    `statistics` are the numbers of keys, bytes of nodes and bytes of values outside of nodes.
    """
    configuration = b"".join(
        [
            secrets.token_bytes(16),
            *map(_varint, (0, INLINE_BYTES, NODE_BYTES)),  # 0: a manifest in one file
            bytes([4]),  # logarithm of the arity of the tree of versions
            _varint(0),  # nodes aren't compressed
        ]
    )
    generation, height, children = 1, 0, 0
    version = b"".join(
        [
            *map(_varint, (1, generation)),
            bytes([height]),
            *map(_varint, (root.file, root.offset, root.length, *statistics)),
            struct.pack("<Q", _read_clock_ns()),
            _varint(children),
        ]
    )
    return _seal(MANIFEST_MAGIC, configuration + _format_names(names) + version)


def _format_node(entries: Mapping[bytes, bytes | _Place], names: Sequence[str]) -> bytes:
    """Return a leaf of the tree: all keys with their values, or places of values."""
    keys = sorted(entries)
    values = [entries[key] for key in keys]
    places = [value for value in values if isinstance(value, _Place)]
    inline = [value for value in values if isinstance(value, bytes)]
    lengths = [value.length if isinstance(value, _Place) else len(value) for value in values]
    body = b"".join(
        [
            bytes([0]),  # height
            _format_names(names),
            _varint(len(keys)),
            *_share_prefixes(keys),
            *map(_varint, lengths),
            bytes(isinstance(value, _Place) for value in values),
            *(_varint(place.file) for place in places),
            *(_varint(place.offset) for place in places),
            *inline,
        ]
    )
    return _seal(NODE_MAGIC, body)


def _format_names(names: Sequence[str]) -> bytes:
    """Return the table of the files of data, whose names are in ascending order."""
    return b"".join(
        [
            _varint(len(names)),
            *_share_prefixes([name.encode() for name in names], [0] * len(names)),
        ]
    )


def _share_prefixes(keys: Sequence[bytes], more_lengths: Sequence[int] = ()) -> Iterator[bytes]:
    """Yield ascending keys without what each shares with the one before: the lengths shared, the
    other lengths, `more_lengths`, and the bytes."""
    shared = [0, *(_count_shared(*pair) for pair in pairwise(keys))]
    yield from map(_varint, shared[1:])
    yield from (_varint(len(key) - count) for key, count in zip(keys, shared, strict=True))
    yield from map(_varint, more_lengths)
    yield from (key[count:] for key, count in zip(keys, shared, strict=True))


def _count_shared(first: bytes, second: bytes) -> int:
    """Return the number of bytes with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(first), len(second)))


def _seal(magic: int, body: bytes) -> bytes:
    """Return a body with its header, version 0 without compression, and its CRC-32C."""
    import_tensorboardx()
    from tensorboardX.crc32c import crc32c

    length = 4 + 8 + 2 + len(body) + 4
    content = struct.pack(">I", magic) + struct.pack("<Q", length) + bytes(2) + body
    return content + struct.pack("<I", crc32c(content))


def read_database(folder: Path) -> Mapping[str, np.ndarray] | None:
    """Read the arrays of a folder by name; None if `write_arrays` hasn't written it.

    Raises ValueError for content that doesn't fit together or exceeds the memory, and OSError.
    """
    content = read_bytes(folder / DATABASE, NODE_LIMIT_BYTES)
    if not _is_sealed(content, MANIFEST_MAGIC):
        return None
    manifest = _Reader(content)
    manifest.skip(16)
    if [manifest.read() for _ in range(3)] != [0, INLINE_BYTES, NODE_BYTES]:
        return None
    manifest.skip(1)
    if manifest.read() != 0:
        return None
    names = manifest.read_names()
    if names != [_name_file(number) for number in range(len(names))] or manifest.read() != 1:
        return None
    manifest.skip(2)
    root = _Place(manifest.read(), manifest.read(), manifest.read())
    if root.length > NODE_LIMIT_BYTES:
        raise ValueError(f"{folder / DATABASE}: its node has more than {NODE_LIMIT_BYTES:,} bytes")
    content = _read_place(folder, names, root).tobytes()
    if not _is_sealed(content, NODE_MAGIC):
        raise ValueError(f"{folder / DATABASE}: its node must be a leaf without compression")
    node = _Reader(content)
    node.skip(1)
    if node.read_names() != names:
        raise ValueError(f"{folder / DATABASE}: lists other files than its node")
    entries = node.read_entries()
    headers = {key[: -len(HEADER)]: key for key in entries if key.endswith(HEADER)}
    described = {name: _parse_header(entries[key]) for name, key in headers.items()}
    require_memory(math.prod(shape) * dtype.itemsize for dtype, shape in described.values())
    arrays = {}
    for name, (dtype, shape) in described.items():
        value = entries.get(_name_chunk(name, len(shape)))
        length = value.length if isinstance(value, _Place) else len(value or b"")
        if length != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name.decode()}: must have the bytes of shape {shape}")
        if isinstance(value, _Place):
            array = _read_place(folder, names, value)
        else:
            array = np.frombuffer(bytearray(value or b""), np.uint8)
        arrays[name.decode()] = array.view(dtype).reshape(shape)
    return arrays


def require_memory(sizes_bytes: Iterable[int]) -> None:
    """Raise ValueError if arrays of these sizes need more bytes than the memory has."""
    claimed_bytes = sum(sizes_bytes)
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if claimed_bytes > memory_bytes:
        limit = f"this machine has {memory_bytes:,}"
        raise ValueError(f"claims {claimed_bytes:,} bytes of arrays; {limit}")


class _Reader:
    """Reads a manifest or a node after its header. Raises ValueError at its end."""

    def __init__(self, content: bytes) -> None:
        self._body = content[14:-4]
        self._at = 0

    def skip(self, count: int) -> bytes:
        """Return the next bytes."""
        part = self._body[self._at : self._at + count]
        self._at += count
        if len(part) < count:
            raise ValueError(f"ends before {count:,} bytes at {self._at - count:,}")
        return part

    def read(self) -> int:
        """Return the next number, of nine groups of seven bits at most."""
        number = 0
        for shift in range(0, 63, 7):
            group = self.skip(1)[0]
            number |= (group & 0x7F) << shift
            if group < 0x80:
                return number
        raise ValueError(f"a number at {self._at:,} is too large")

    def read_all(self, count: int) -> list[int]:
        """Return the next numbers, each of a byte at least."""
        if count > len(self._body):
            raise ValueError(f"has no {count:,} numbers")
        return [self.read() for _ in range(count)]

    def read_keys(self, count: int, num_more: int = 0) -> list[bytes]:
        """Return keys that `_share_prefixes` has written."""
        shared = [0, *self.read_all(max(count - 1, 0))]
        lengths = self.read_all(count)
        self.read_all(num_more)
        if sum(shared) + sum(lengths) > NODE_LIMIT_BYTES:
            raise ValueError(f"keys have more than {NODE_LIMIT_BYTES:,} bytes")
        keys: list[bytes] = []
        for prefix, length in zip(shared, lengths, strict=False):
            keys.append((keys[-1][:prefix] if keys else b"") + self.skip(length))
        return keys

    def read_names(self) -> list[str]:
        """Return the names of the files of data."""
        count = self.read()
        return [key.decode() for key in self.read_keys(count, count)]

    def read_entries(self) -> dict[bytes, bytes | _Place]:
        """Return the values of a leaf by key."""
        keys = self.read_keys(count := self.read())
        lengths = self.read_all(count)
        are_places = self.skip(count)
        num_places = sum(map(bool, are_places))
        files = iter(self.read_all(num_places))
        offsets = iter(self.read_all(num_places))
        entries: dict[bytes, bytes | _Place] = {}
        for key, length, is_place in zip(keys, lengths, are_places, strict=True):
            is_elsewhere = bool(is_place)
            entries[key] = (
                _Place(next(files), next(offsets), length) if is_elsewhere else self.skip(length)
            )
        return entries


def _is_sealed(content: bytes, magic: int) -> bool:
    """Return whether content has the header that `_seal` writes."""
    return content[:4] == struct.pack(">I", magic) and content[12:14] == bytes(2)


def _read_place(folder: Path, names: Sequence[str], place: _Place) -> np.ndarray:
    """Return the bytes at a place, uint8 (length,). Raises ValueError if a file lacks them."""
    if place.file >= len(names):
        raise ValueError(f"names file {place.file} of {len(names)}")
    file = folder / names[place.file]
    if place.offset + place.length > file.stat().st_size:
        raise ValueError(
            f"{names[place.file]}: must have {place.length:,} bytes at {place.offset:,}"
        )
    return np.fromfile(file, np.uint8, place.length, offset=place.offset)


def _parse_header(header: bytes | _Place) -> tuple[np.dtype, tuple[int, ...]]:
    """Return type and shape in the metadata of an array. Raises ValueError."""
    if isinstance(header, _Place):
        raise ValueError("the metadata of an array must be in the node")
    match parse_json(header.decode()):
        case {"dtype": str(name), "shape": list(shape), "chunks": list(chunks), **other}:
            pass
        case _:
            raise ValueError("the metadata of an array must have type, shape and chunks")
    if shape != chunks or other.get("compressor") is not None or other.get("order") != "C":
        raise ValueError("an array must be one chunk, not compressed")
    if not all(type(size) is int and 0 < size < 1 << 48 for size in shape) or len(shape) > 64:
        raise ValueError(f"can't be a shape: {shape}")
    if name not in NAMED_TYPES and not TYPE.fullmatch(name):
        raise ValueError(f"can't be a type: {name}")
    dtype = np.dtype(getattr(ml_dtypes, name) if name in NAMED_TYPES else name)
    return dtype, tuple(shape)


def _read_clock_ns() -> int:
    """Return the nanoseconds since 1970, from 1: a clock may be wrong."""
    return max(time.time_ns(), 1)


def _varint(number: int) -> bytes:
    """Return a number from 0 in groups of seven bits, as protobuf writes it."""
    groups = []
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])
