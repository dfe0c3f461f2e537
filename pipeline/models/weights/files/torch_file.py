"""PyTorch's files, `.pt` and `.pth`: a zip of a pickle and the bytes of each storage.

The pickle is read as data: nothing is imported, called or built. A pickle is a program for a stack
machine. Here the opcodes that torch writes for a dictionary of tensors are executed on plain
values. The name of a class or function stays a name. A call of a function that torch needs becomes
a record of the call. Everything else is refused.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from pipeline.core.files.name_text import show_name
from pipeline.core.files.npy import MAX_ENTRIES, count_array_bytes
from pipeline.models.weights.files.named_arrays import BFLOAT16, Arrays, add_array

MAX_SHARING = 16
"""Most bytes of all tensors per byte of the file. Tied weights share bytes of the file."""

_PICKLE = "data.pkl"
_OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of a file that torch before 1.6 wrote."""
_STATE_DICTS = ("state_dict", "model_state_dict", "model", "model_state", "net")
"""Keys under which training scripts save a state dict."""
ORDERED_DICT = "collections.OrderedDict"
REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
REBUILD_PARAMETER = "torch._utils._rebuild_parameter"
CALLABLE = (ORDERED_DICT, REBUILD_TENSOR, REBUILD_PARAMETER)
STORAGES = {
    "torch.FloatStorage": np.dtype(np.float32),
    "torch.DoubleStorage": np.dtype(np.float64),
    "torch.HalfStorage": np.dtype(np.float16),
    "torch.BFloat16Storage": BFLOAT16,
    "torch.LongStorage": np.dtype(np.int64),
    "torch.IntStorage": np.dtype(np.int32),
    "torch.ShortStorage": np.dtype(np.int16),
    "torch.CharStorage": np.dtype(np.int8),
    "torch.ByteStorage": np.dtype(np.uint8),
    "torch.BoolStorage": np.dtype(np.bool_),
}

MAX_PICKLE_BYTES = 64 * 2**20
MAX_OPCODES = 5_000_000
"""A tensor has about forty opcodes."""
_DAMAGED = "its table of contents is damaged"
_REFUSED = "it holds more than a dictionary of tensors; save only model.state_dict()"


def read_torch(path: Path) -> Arrays:
    """Return the tensors of the file's state dict by name. No code of the file is run.

    The file has the state dict itself, or a dict with the state dict under one of a few keys.
    Raises ValueError and zipfile.BadZipFile for an invalid file.
    """
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            if file.read(len(_OLD_FORMAT)) == _OLD_FORMAT:
                raise ValueError(
                    "torch.save wrote it in the format before torch 1.6; load and save it again"
                )
        raise ValueError("it is not a file that torch.save wrote")
    with zipfile.ZipFile(path) as archive:
        size = path.stat().st_size
        bytes_left = float(size)
        storages = _Storages(archive, size)
        tensors = _find_tensors(read_pickle(storages.read(_PICKLE)))
        arrays: Arrays = {}
        for name, value in tensors.items():
            add_array(arrays, name, _read_tensor(str(name), value, storages))
            bytes_left -= arrays[name].nbytes / MAX_SHARING
            if bytes_left < 0:
                raise ValueError(f"its tensors are more than {MAX_SHARING} times its size")
    return arrays


class _Storages:
    """The entries of a file of `size` bytes. Each entry is checked when it is read."""

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        self._archive = archive
        self._bytes_left = size
        if len(archive.infolist()) > MAX_ENTRIES:
            raise ValueError(f"it has more than {MAX_ENTRIES:,} parts")
        names = [name for name in archive.namelist() if PurePosixPath(name).name == _PICKLE]
        if len(names) != 1:
            raise ValueError("it is a zip file, but torch.save didn't write it")
        self._folder = names[0].removesuffix(_PICKLE)
        self._read: dict[str, bytes] = {}
        order = f"{self._folder}byteorder"
        if order in archive.namelist() and self.read("byteorder") != b"little":
            raise ValueError("its bytes are in big-endian order; must be little-endian")

    def read(self, name: str) -> bytes:
        """Return the bytes of an entry. Raises ValueError if it is missing or compressed."""
        if name not in self._read:
            try:
                info = self._archive.getinfo(self._folder + name)
            except KeyError:
                raise ValueError(f"it lacks its part {show_name(name)}") from None
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(
                    f"its part {show_name(name)} is compressed; torch stores without compression"
                )
            self._bytes_left -= info.file_size
            if self._bytes_left < 0:
                raise ValueError("its parts overlap")
            self._read[name] = self._archive.read(info)
        return self._read[name]

    def read_values(self, storage: Any) -> np.ndarray:
        """Return the values (n,) of a storage of the pickle. Raises ValueError if it is invalid."""
        match storage:
            case Persistent(("storage", Name(kind), str(key), str(_), int(count))) if (
                kind in STORAGES and key.isalnum()
            ):
                data = self.read(f"data/{key}")
                if count < 0 or len(data) != count * STORAGES[kind].itemsize:
                    raise ValueError(f"storage {key} doesn't have the size of its {count:,} values")
                return np.frombuffer(data, STORAGES[kind])
        raise ValueError("a tensor has no storage that can be read")


def _find_tensors(content: Any) -> Mapping[Any, Any]:
    """Return the state dict. Raises ValueError unless there is exactly one."""
    if _is_state_dict(content):
        return content
    if not isinstance(content, dict):
        raise ValueError("it holds no dictionary of tensors; save model.state_dict()")
    state_dicts = [content[key] for key in _STATE_DICTS if _is_state_dict(content.get(key))]
    if len(state_dicts) != 1:
        keys = ", ".join(show_name(str(key)) for key in list(content)[:10])
        raise ValueError(
            f"it holds a dictionary of {keys or 'nothing'}; must be a state dict, or have "
            f"one under one of {', '.join(_STATE_DICTS)}"
        )
    return state_dicts[0]


def _is_state_dict(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and bool(content)
        and all(isinstance(value, Call) for value in content.values())
    )


def _read_tensor(name: str, value: Call, storages: _Storages) -> np.ndarray:
    """Return a tensor in C order. Raises ValueError if it reaches beyond its storage."""
    if value.function == REBUILD_PARAMETER and value.arguments:
        value = value.arguments[0]
    match value:
        # The other arguments are requires_grad, hooks, and in newer files flags such as conjugate.
        case Call(function, (storage, int(offset), tuple(shape), tuple(strides), _, _, *flags)) if (
            function == REBUILD_TENSOR and len(shape) == len(strides) and not any(flags)
        ):
            values = storages.read_values(storage)
            return _copy_strided(name, values, offset, shape, strides)
    raise ValueError(f"{show_name(name)} isn't a tensor of numbers")


def _copy_strided(
    name: str, values: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    """Return elements of a storage in C order. Raises ValueError for elements outside of it."""
    size = count_array_bytes(name, values.dtype, shape)
    is_valid = all(type(stride) is int and stride >= 0 for stride in strides)
    is_valid &= offset >= 0 and size <= values.nbytes
    if is_valid and size:
        pairs = zip(shape, strides, strict=True)
        last_index = offset + sum((length - 1) * stride for length, stride in pairs)
        is_valid = last_index < len(values)
    if not is_valid:
        raise ValueError(f"{show_name(name)} does not fit into its storage")
    if not size:
        return np.empty(shape, values.dtype)
    itemsize = values.dtype.itemsize
    view = np.lib.stride_tricks.as_strided(
        values[offset:], shape, tuple(stride * itemsize for stride in strides), writeable=False
    )
    return np.ascontiguousarray(view).reshape(shape)


@dataclass(frozen=True)
class Name:
    """The name of a class or function in the file, such as `torch.FloatStorage`."""

    text: str


@dataclass(frozen=True)
class Call:
    """A record of a call in the file, which is never made."""

    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Persistent:
    """A reference to a storage, which is outside of the pickle: torch's description of it."""

    fields: Any


_MARK = object()
"""Marks the start of a collection's items on the stack."""

_LITERALS = {
    *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"),
}
"""Opcodes that push their argument."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
"""Opcodes that replace the top values by a tuple of them, with the number of values."""


def read_pickle(data: bytes) -> Any:
    """Return the content of a pickle, as dicts, lists, tuples, plain values and the types above.

    Raises ValueError for refused content and for a damaged pickle.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise ValueError(
            f"its table of contents has {len(data):,} bytes; must have at most {MAX_PICKLE_BYTES:,}"
        )
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for count, (name, argument) in enumerate(_read_opcodes(data)):
            if count == MAX_OPCODES:
                raise ValueError(f"its table of contents has more than {MAX_OPCODES:,} opcodes")
            _execute(name, argument, stack, memo)
        return stack.pop()
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(_DAMAGED) from error


def _read_opcodes(data: bytes) -> Iterator[tuple[str, Any]]:
    """Yield each opcode with its argument."""
    try:
        for opcode, argument, _ in pickletools.genops(data):
            yield opcode.name, argument
    except ValueError as error:
        raise ValueError(_DAMAGED) from error


def _execute(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    """Execute one opcode. Raises the errors that `read_pickle` handles."""
    if name in _LITERALS:
        stack.append(argument)
        return
    match name:
        case "PROTO" | "FRAME" | "STOP":
            pass
        case "NONE" | "NEWTRUE" | "NEWFALSE":
            stack.append(_CONSTANTS[name])
        case "BINPUT" | "LONG_BINPUT" | "PUT":
            memo[argument] = stack[-1]
        case "MEMOIZE":
            memo[len(memo)] = stack[-1]
        case "BINGET" | "LONG_BINGET" | "GET":
            stack.append(memo[argument])
        case "MARK":
            stack.append(_MARK)
        case "EMPTY_DICT":
            stack.append({})
        case "EMPTY_LIST":
            stack.append([])
        case "EMPTY_TUPLE":
            stack.append(())
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            stack.append(tuple(_pop_items(stack, _TUPLES[name])))
        case "TUPLE":
            stack.append(tuple(_pop_to_mark(stack)))
        case "LIST":
            stack.append(_pop_to_mark(stack))
        case "GLOBAL":
            stack.append(_check_name(argument.replace(" ", ".")))
        case "STACK_GLOBAL":
            stack.append(_check_name(".".join(_pop_items(stack, 2))))
        case "REDUCE":
            arguments = stack.pop()
            stack.append(_record_call(stack.pop(), arguments))
        case "BINPERSID":
            stack.append(Persistent(stack.pop()))
        case "SETITEM":
            _set_items(_pop_items(stack, 2), stack[-1])
        case "SETITEMS":
            _set_items(_pop_to_mark(stack), stack[-1])
        case "APPEND":
            _append_items(_pop_items(stack, 1), stack[-1])
        case "APPENDS":
            _append_items(_pop_to_mark(stack), stack[-1])
        case "BUILD":
            # The attributes of a dict, such as versions of modules, aren't weights.
            stack.pop()
            if not isinstance(stack[-1], dict):
                raise ValueError(f"{_REFUSED}: it sets attributes of an object")
        case _:
            raise ValueError(f"{_REFUSED}: it holds the opcode {name}")


def _pop_items(stack: list[Any], count: int) -> list[Any]:
    items = stack[-count:]
    del stack[-count:]
    return items


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    """Pop everything above the last mark, and the mark."""
    items: list[Any] = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _check_name(text: str) -> Name:
    if text not in CALLABLE and text not in STORAGES:
        raise ValueError(f"{_REFUSED}: it names {show_name(text)}")
    return Name(text)


def _record_call(function: Any, arguments: Any) -> Call | dict[Any, Any]:
    """Return a `Call`, but an empty dict for OrderedDict()."""
    if not isinstance(function, Name) or not isinstance(arguments, tuple):
        raise TypeError
    if function.text not in CALLABLE:
        raise ValueError(f"{_REFUSED}: it calls {show_name(function.text)}")
    if function.text != ORDERED_DICT:
        return Call(function.text, arguments)
    if arguments:
        raise TypeError
    return {}


def _set_items(pairs: list[Any], target: Any) -> None:
    """Add alternating keys and values to a dict."""
    if not isinstance(target, dict):
        raise TypeError
    for key, value in zip(pairs[::2], pairs[1::2], strict=False):
        if not isinstance(key, str | int | float | None):
            raise TypeError
        target[key] = value


def _append_items(items: list[Any], target: Any) -> None:
    if not isinstance(target, list):
        raise TypeError
    target.extend(items)
