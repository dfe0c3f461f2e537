"""What the operations of a compiled program are, read off the text that XLA writes of it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.$-]+) = (.*?[\])}]) ([\w-]+)\((.*)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.$-]+) \(.*\) -> .* \{")
_SHAPE = re.compile(r"(pred|[a-z]+)(\d*)\[([\d,]*)\]")
_CALLED = re.compile(r"calls=%?([\w.$-]+)")
_OPERAND = re.compile(r"%([\w.$-]+)")

CONTAINERS = frozenset({"while", "conditional", "call"})
"""What is only there for what is inside."""

PRODUCTS = frozenset({"dot", "convolution"})
MOVES = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "iota", "broadcast"),
        *("bitcast", "bitcast-convert", "convert", "copy", "transpose", "reverse", "reshape"),
        *("slice", "pad", "concatenate", "dynamic-slice", "dynamic-update-slice"),
    }
)


@dataclass(frozen=True)
class Instruction:
    """One operation: what it is called, all that is fused into it, and what it reads and writes."""

    opcode: str
    inside: frozenset[str]
    moved_bytes: int


@dataclass(frozen=True)
class Program:
    """The operations of a program, by the names that a profiler has for them."""

    instructions: Mapping[str, Instruction]

    def kind_of(self, name: str) -> str | None:
        """What an operation is counted among; None where others inside of it are."""
        if "onednn$" in name:
            product = "convolutions" if "convolution" in name else "matrix products"
            return f"{product}, by oneDNN"
        known = self.instructions.get(name)
        if known is None or known.opcode in CONTAINERS:
            return None
        return _kind(known.inside)

    def bytes_of(self, name: str) -> int:
        """Of operands and results together."""
        known = self.instructions.get(name) or self.instructions.get(name.partition("__")[0])
        return known.moved_bytes if known is not None else 0


def _kind(inside: frozenset[str]) -> str:
    if inside & PRODUCTS:
        return "convolutions, by XLA" if "convolution" in inside else "matrix products, by XLA"
    if any(opcode.startswith(("reduce", "select-and")) for opcode in inside):
        return "sums and maxima"
    if "gather" in inside or "scatter" in inside:
        return "gathers"
    return "moves and conversions" if inside <= MOVES else "element by element"


def parse_program(text: str) -> Program:
    """Read a program. What is not understood counts as no bytes and nothing inside."""
    opcodes, shapes, lines = _read(text)
    instructions = {}
    for name, (opcode, rest) in lines.items():
        called = _CALLED.search(rest)
        inside = opcodes.get(called[1], frozenset()) if called else frozenset((opcode,))
        operands = _OPERAND.findall(rest.partition("), ")[0])
        read = [shapes.get(operand, 0) for operand in operands]
        instructions[name] = Instruction(opcode, inside, _moved(inside, read, shapes[name]))
    return Program(instructions)


def _moved(inside: frozenset[str], read: list[int], written: int) -> int:
    """Bytes read and written; of an array that a piece is taken from or put into, the piece."""
    if inside & {"dynamic-slice", "gather"}:
        return 2 * written
    if "dynamic-update-slice" in inside:
        return 2 * sum(nbytes for nbytes in read if nbytes < written)
    return written + sum(read)


def _read(
    text: str,
) -> tuple[dict[str, frozenset[str]], dict[str, int], dict[str, tuple[str, str]]]:
    """The opcodes of each computation; of each instruction its bytes, and its opcode and rest."""
    inside: dict[str, set[str]] = {}
    shapes: dict[str, int] = {}
    lines: dict[str, tuple[str, str]] = {}
    computation = ""
    for line in text.splitlines():
        if begins := _COMPUTATION.match(line):
            computation = begins[1]
        elif found := _INSTRUCTION.match(line):
            name, shape, opcode, rest = found.groups()
            inside.setdefault(computation, set()).add(opcode)
            shapes[name], lines[name] = _bytes(shape), (opcode, rest)
    return {name: frozenset(opcodes) for name, opcodes in inside.items()}, shapes, lines


def _bytes(shape: str) -> int:
    """Of an array, or of all in a tuple: `bf16[32,56,56,64]{3,2,1,0}`."""
    return sum(
        math.prod(map(int, filter(None, sizes.split(",")))) * max(1, int(bits or 8) // 8)
        for _, bits, sizes in _SHAPE.findall(shape)
    )
