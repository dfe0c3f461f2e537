"""TensorFlow's checkpoints and the variables of a SavedModel: `NAME.index` with `NAME.data-*`.

The index is a sorted table in LevelDB's format (its table_format.md):

    file    blocks, then a footer of 48 bytes
    footer  offset and size of the metaindex block, offset and size of the index block (varints),
            padding, a magic number of 8 bytes; the index block lists the data blocks
    block   entries, offsets of restarts (uint32), number of restarts (uint32); then a byte for the
            compression, which TensorFlow doesn't use, and a checksum of 4 bytes
    entry   number of bytes that the key shares with the previous key, number of its other bytes,
            number of bytes of the value (varints), the key's other bytes, the value

Each value is a protocol buffer message of tensor_bundle.proto or trackable_object_graph.proto:

    key                 message                 fields by number
    ""                  BundleHeaderProto       1: num_shards   2: endianness
    name of a tensor    BundleEntryProto        1: dtype   2: shape   3: shard_id   4: offset
                                                5: size   7: slices
                        TensorShapeProto        2: dimensions, each a message with 1: size
    object graph        TrackableObjectGraph    1: nodes, each a message with 2: attributes
                        SerializedTensor        2: full_name   3: checkpoint_key (an attribute)

The index is read entry by entry within bounds. All arrays together are at most as large as the data
files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from pipeline.core.files.bounded_read import read_bytes
from pipeline.core.files.name_text import show_name
from pipeline.core.files.npy import MAX_ENTRIES, count_array_bytes
from pipeline.models.weights.files.named_arrays import (
    BFLOAT16,
    MAX_NAME_LENGTH,
    Arrays,
    add_array,
    decode_array,
    make_natural_key,
)
from pipeline.models.weights.files.protobuf_fields import Message, decode_varint

_KIND = "a TensorFlow checkpoint"
_MAX_INDEX_BYTES = 2**28
_MAX_FIELDS = 64
"""Most fields of the header, of an entry and of each message in an entry."""
_FOOTER_BYTES = 48
_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_TRAILER_BYTES = 5
"""Size of the byte for the compression and of the checksum, which follow a block."""
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_STRING = 7
"""The number of DT_STRING, the type of texts, in TensorFlow's types.proto."""
_DTYPES: Mapping[int, np.dtype] = {
    1: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype("<i4"),
    4: np.dtype("u1"),
    5: np.dtype("<i2"),
    6: np.dtype("i1"),
    9: np.dtype("<i8"),
    10: np.dtype("bool"),
    14: BFLOAT16,
    19: np.dtype("<f2"),
    22: np.dtype("<u4"),
    23: np.dtype("<u8"),
}
"""Dtypes that are read, by their numbers in TensorFlow's types.proto."""
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_NO_MODEL_VARIABLE = re.compile(
    r"(?:.*/)?(?:optimizer|keras_api)/(?!_trainable_variables/)"
    r"|_all_"  # In a SavedModel of Keras 3, `_all_variables` has every variable a second time.
)
"""Matches keys of variables that don't belong to the model, and of second copies. It doesn't match
`optimizer/_trainable_variables/`, under which Keras 3 has the model's trained variables."""


def read_tensorflow(path: Path) -> Arrays:
    """Return the arrays of a checkpoint by name. Raises OSError, and ValueError if it is damaged.

    First are the model's variables, in the order of the object graph. Their names are the layer's
    number and the full name, such as `3.sequential.conv2d.kernel`. All other arrays follow in
    natural order, named by their keys. In names, slashes become dots.
    """
    entries = dict(_read_table(read_bytes(path, _MAX_INDEX_BYTES)))
    header = _read_message(entries.pop("", b""))
    shards = header.integer(1)
    if not 1 <= shards <= 10_000 or header.integer(2) != 0:
        raise ValueError("its header isn't a little-endian checkpoint's")
    files = [
        path.with_name(f"{path.stem}.data-{shard:05}-of-{shards:05}") for shard in range(shards)
    ]
    graph = entries.pop(_OBJECT_GRAPH, None)
    names = {} if graph is None else _name_variables(_read_object_graph(graph, files))
    arrays: Arrays = {}
    unread_bytes = sum(file.stat().st_size for file in files if file.is_file())
    other_keys = sorted(set(entries) - set(names), key=make_natural_key)
    for key in [*names, *other_keys]:
        if key not in entries:
            raise ValueError(f"its object graph has {show_name(key)}, which is missing")
        array = _read_tensor(key, entries[key], files)
        if array is not None:
            name = names.get(key, key.removesuffix(_SUFFIX).replace("/", "."))
            add_array(arrays, name, array)
            unread_bytes -= array.nbytes
            if unread_bytes < 0:
                raise ValueError("its tensors have more bytes than its data files")
    return arrays


def _read_table(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the keys and values of the index."""
    if len(content) < _FOOTER_BYTES or content[-8:] != _MAGIC:
        raise ValueError(f"it is not {_KIND}")
    message = memoryview(content)
    position = len(content) - _FOOTER_BYTES
    footer_numbers = []
    for _ in range(4):
        number, position = decode_varint(message, position, _KIND)
        footer_numbers.append(number)
    _, _, index_offset, index_size = footer_numbers
    num_entries = 0
    unread_bytes = len(content)
    for _, location in _read_block(message, index_offset, index_size):
        offset, position = decode_varint(memoryview(location), 0, _KIND)
        size, _ = decode_varint(memoryview(location), position, _KIND)
        unread_bytes -= size
        if unread_bytes < 0:
            raise ValueError("its blocks overlap")
        for key, value in _read_block(message, offset, size):
            num_entries += 1
            if num_entries > MAX_ENTRIES:
                raise ValueError(f"it has more than {MAX_ENTRIES:,} entries")
            yield str(key, "utf-8"), value


def _read_block(content: memoryview, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a block."""
    end = offset + size
    if offset < 0 or size < 4 or end + _TRAILER_BYTES > len(content):
        raise ValueError("it ends in the middle of a block")
    if content[end]:
        raise ValueError("its index is compressed, which isn't read")
    block = content[offset:end]
    num_restarts = int.from_bytes(block[-4:], "little")
    entries_end = len(block) - 4 * (num_restarts + 1)
    if entries_end < 0:
        raise ValueError("a block has more restarts than bytes; the file is damaged")
    at = 0
    key = b""
    while at < entries_end:
        shared, at = decode_varint(block, at, _KIND)
        added, at = decode_varint(block, at, _KIND)
        length, at = decode_varint(block, at, _KIND)
        is_negative = min(shared, added, length) < 0
        if is_negative or shared > len(key) or at + added + length > entries_end:
            raise ValueError("it ends in the middle of an entry")
        if shared + added > MAX_NAME_LENGTH:
            raise ValueError(f"a name has more than {MAX_NAME_LENGTH} bytes")
        key = key[:shared] + bytes(block[at : at + added])
        at += added
        yield key, bytes(block[at : at + length])
        at += length


def _read_tensor(name: str, entry: bytes, files: list[Path]) -> np.ndarray | None:
    """Return the array of an entry, or None if the entry is a text."""
    message = _read_message(entry)
    if 7 in message.fields:
        raise ValueError(f"{show_name(name)} is in slices, which aren't read")
    kind = message.integer(1)
    if kind == _STRING:
        return None
    if kind not in _DTYPES:
        raise ValueError(f"{show_name(name)} is of type {kind} of TensorFlow, which isn't read")
    dtype = _DTYPES[kind]
    sizes = [size.integer(1) for shape in message.messages(2) for size in shape.messages(2)]
    num_bytes = message.integer(5)
    if count_array_bytes(name, dtype, sizes) != num_bytes:
        raise ValueError(f"{show_name(name)} has {num_bytes} bytes for shape {sizes}")
    return decode_array(name, dtype, sizes, _read_data(name, message, files))


def _read_message(content: bytes, max_fields: int = _MAX_FIELDS) -> Message:
    return Message(memoryview(content), max_fields, _KIND)


def _read_data(name: str, entry: Message, files: list[Path]) -> bytes:
    """Return the bytes of a tensor in its data file."""
    shard, offset, size = map(entry.integer, (3, 4, 5))
    if not 0 <= shard < len(files) or offset < 0 or size < 0:
        raise ValueError(
            f"{show_name(name)} can't have shard {shard}, offset {offset} and size {size}; there "
            f"are {len(files)} shards"
        )
    file = files[shard]
    if not file.is_file() or file.stat().st_size < offset + size:
        raise ValueError(f"{show_name(name)} is in {file.name}, which is missing or too short")
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(size)


def _read_object_graph(entry: bytes, files: list[Path]) -> dict[str, str]:
    """Return the full names of variables by key, in the order of the graph's nodes."""
    # The data begin with the graph's length (a varint) and a checksum of the length (4 bytes).
    data = _read_data(_OBJECT_GRAPH, _read_message(entry), files)
    _, checksum_start = decode_varint(memoryview(data), 0, _KIND)
    names: dict[str, str] = {}
    for node in _read_message(data[checksum_start + 4 :], MAX_ENTRIES).messages(1):
        for attribute in node.messages(2):
            full_name = attribute.text(2)
            key = attribute.text(3)
            if full_name and key.endswith(_SUFFIX):
                names.setdefault(key, full_name)
    return names


def _name_variables(full_names: Mapping[str, str]) -> dict[str, str]:
    """Return the names of a model's variables by key, such as `3.sequential.conv2d.kernel`.

    Layers are numbered from 0 in the order of `full_names`.
    """
    numbers: dict[str, int] = {}
    names: dict[str, str] = {}
    used_names: set[str] = set()
    for key, full_name in full_names.items():
        layer = full_name.rpartition("/")[0]
        if layer and not _NO_MODEL_VARIABLE.match(key):
            number = numbers.setdefault(layer, len(numbers))
            name = f"{number}.{full_name.partition(':')[0].replace('/', '.')}"
            # A second variable with the same name has its key as name.
            if name not in used_names:
                names[key] = name
                used_names.add(name)
    return names
