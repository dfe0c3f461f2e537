"""The pickle inside a PyTorch file, read as data: nothing is imported, called or built.

A pickle is a program for a stack machine. Here the opcodes that torch writes for a dictionary of
tensors are executed on plain values. The name of a class or function stays a name. A call of a
function that torch needs becomes a record of the call. Everything else is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.core.files.error_text import show_name
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


class _Mark:
    """Marks the start of a collection's items on the stack."""


# Opcodes that push their argument.
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
# Opcodes that store the top of the stack in the memo, or push an entry of the memo.
_PUTS = {"BINPUT", "LONG_BINPUT", "PUT"}
_GETS = {"BINGET", "LONG_BINGET", "GET"}
# Opcodes that replace the top values by a tuple of them, with the number of values.
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_SKIPPED = {"PROTO", "FRAME", "STOP"}


def read_pickle(data: bytes) -> Any:
    """Return the content of a pickle, as dicts, lists, tuples, plain values and the types above.

    Raises ValueError for refused content and for a damaged pickle.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise ValueError(
            f"its table of contents has {len(data):,} bytes; must have at most {MAX_PICKLE_BYTES:,}"
        )
    machine = _Machine()
    try:
        for count, (name, argument) in enumerate(_read_opcodes(data)):
            if count == MAX_OPCODES:
                raise ValueError(f"its table of contents has more than {MAX_OPCODES:,} opcodes")
            machine.execute(name, argument)
        return machine.stack.pop()
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(_DAMAGED) from error


def _read_opcodes(data: bytes) -> Iterator[tuple[str, Any]]:
    """Yield each opcode with its argument."""
    try:
        for opcode, argument, _ in pickletools.genops(data):
            yield opcode.name, argument
    except ValueError as error:
        raise ValueError(_DAMAGED) from error


class _Machine:
    """The stack and the memo of a pickle. Methods raise the errors that `read_pickle` handles."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def execute(self, name: str, argument: Any) -> None:
        """Execute one opcode."""
        stack = self.stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _PUTS:
            self._memo[argument] = stack[-1]
        elif name in _GETS:
            stack.append(self._memo[argument])
        elif name in _TUPLES:
            count = _TUPLES[name]
            items = tuple(stack[len(stack) - count :])
            stack[len(stack) - count :] = [items]
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        elif name not in _SKIPPED:
            raise ValueError(f"{_REFUSED}: it holds the opcode {name}")

    def store_top(self, argument: Any) -> None:
        """Store the top of the stack in the memo under the number of its entries."""
        self._memo[len(self._memo)] = self.stack[-1]

    def pop_to_mark(self) -> list[Any]:
        """Pop everything above the last mark, and the mark."""
        items: list[Any] = []
        while not isinstance(item := self.stack.pop(), _Mark):
            items.append(item)
        return items[::-1]

    def set_items(self, pairs: list[Any]) -> None:
        """Add alternating keys and values to the dict on top of the stack."""
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise TypeError
        for key, value in zip(pairs[::2], pairs[1::2], strict=False):
            if not isinstance(key, str | int | float | None):
                raise TypeError
            target[key] = value

    def append(self, items: list[Any]) -> None:
        """Append items to the list on top of the stack."""
        if not isinstance(self.stack[-1], list):
            raise TypeError
        self.stack[-1].extend(items)

    def push_name(self, argument: Any) -> None:
        """Replace a module and a name on the stack by a `Name`."""
        name = self.stack.pop()
        module = self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TypeError
        self.stack.append(_check_name(f"{module}.{name}"))

    def push_call(self, argument: Any) -> None:
        """Replace a function and its arguments on the stack by a `Call`.

        OrderedDict() becomes an empty dict.
        """
        arguments = self.stack.pop()
        function = self.stack[-1]
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise TypeError
        if function.text not in CALLABLE:
            raise ValueError(f"{_REFUSED}: it calls {show_name(function.text)}")
        if function.text != ORDERED_DICT:
            self.stack[-1] = Call(function.text, arguments)
        elif arguments:
            raise TypeError
        else:
            self.stack[-1] = {}

    def drop_attributes(self, argument: Any) -> None:
        """Pop the attributes of a dict, such as versions of modules, since they aren't weights."""
        self.stack.pop()
        if not isinstance(self.stack[-1], dict):
            raise ValueError(f"{_REFUSED}: it sets attributes of an object")


def _check_name(text: str) -> Name:
    if text not in CALLABLE and text not in STORAGES:
        raise ValueError(f"{_REFUSED}: it names {show_name(text)}")
    return Name(text)


def _replace_marked(make: Callable[[list[Any]], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(make(machine.pop_to_mark()))


_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": lambda machine, _: machine.stack.append(_Mark()),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "TUPLE": _replace_marked(tuple),
    "LIST": _replace_marked(list),
    "MEMOIZE": _Machine.store_top,
    "GLOBAL": lambda machine, text: machine.stack.append(_check_name(text.replace(" ", "."))),
    "STACK_GLOBAL": _Machine.push_name,
    "REDUCE": _Machine.push_call,
    "BUILD": _Machine.drop_attributes,
    "BINPERSID": lambda machine, _: machine.stack.append(Persistent(machine.stack.pop())),
    "SETITEM": lambda machine, _: machine.set_items(_pop_items(machine, 2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "APPEND": lambda machine, _: machine.append(_pop_items(machine, 1)),
    "APPENDS": lambda machine, _: machine.append(machine.pop_to_mark()),
}


def _pop_items(machine: _Machine, count: int) -> list[Any]:
    items = machine.stack[-count:]
    del machine.stack[-count:]
    return items
