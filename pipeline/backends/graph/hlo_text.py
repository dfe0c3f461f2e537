"""Reader of HLO, XLA's text of a program. Lines that aren't known are left out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.$-]+) \(.*\) -> .* \{")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.$-]+) = (.*?[\])}]) ([\w-]+)\((.*)")
# Arrays such as f32[2,3]. Of f8e4m3fn[2], the type is read as f8.
_ARRAY = re.compile(r"([a-z]+\d*)(?:e\dm\d\w*)?\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.$-]+)")
_CALLED = re.compile(r"calls=%?([\w.$-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclass(frozen=True)
class HloArray:
    """An array in a program: its element type, such as `bf16`, and its dimensions."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements. An element has at least one byte; it has one in `pred`."""
        bits = "".join(filter(str.isdigit, self.dtype))
        return self.elements * max(1, int(bits or 8) // 8)


@dataclass(frozen=True)
class HloLine:
    """An instruction: its opcode, the arrays of its result, and the text from its operands on."""

    name: str
    opcode: str
    arrays: tuple[HloArray, ...]
    arguments: str
    is_root: bool = False

    @property
    def elements(self) -> int:
        return sum(array.elements for array in self.arrays)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions whose results it reads."""
        return tuple(_OPERAND.findall(self.arguments.partition("), ")[0]))

    @property
    def called_computation(self) -> str | None:
        """Name of the computation that a fusion or a call computes."""
        called = _CALLED.search(self.arguments)
        return called[1] if called else None

    @property
    def target(self) -> str:
        target = _TARGET.search(self.arguments)
        return target[1] if target else ""


@dataclass(frozen=True)
class HloText:
    """A program: instructions by computation and name. `entry` is the computation that it runs."""

    header: str
    computations: Mapping[str, Mapping[str, HloLine]]
    entry: str

    def parse_lines(self) -> Iterator[HloLine]:
        for computation in self.computations.values():
            yield from computation.values()


def read_hlo_text(text: str) -> HloText:
    """Read a program. Instructions outside of any computation are in the computation ""."""
    computations: dict[str, dict[str, HloLine]] = {}
    current = ""
    entry = ""
    for line in text.splitlines():
        if begin := _COMPUTATION.match(line):
            is_entry, current = begin.groups()
            if is_entry:
                entry = current
            computations.setdefault(current, {})
        elif match := _INSTRUCTION.match(line):
            root, name, shape, opcode, arguments = match.groups()
            arrays = tuple(
                HloArray(dtype, tuple(int(size) for size in sizes.split(",") if size))
                for dtype, sizes in _ARRAY.findall(shape)
            )
            instruction = HloLine(name, opcode, arrays, arguments, bool(root))
            computations.setdefault(current, {})[name] = instruction
    return HloText(text.lstrip().partition("\n")[0], computations, entry)
