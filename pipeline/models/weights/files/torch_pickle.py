"""The pickle inside a PyTorch file, read as data: nothing is imported, called or built.

A pickle is a program for a stack machine. Here the opcodes that torch writes for a dictionary of
tensors are executed on plain values. The name of a class or function stays a name. A call of a
function that torch needs becomes a record of the call. Everything else is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.core.files.name_text import show_name
from pipeline.models.weights.files.named_arrays import BFLOAT16

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
