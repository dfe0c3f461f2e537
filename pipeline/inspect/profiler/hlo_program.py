"""Operations of a compiled program, read from the text that XLA writes of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.$-]+) = (.*?[\])}]) ([\w-]+)\((.*)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.$-]+) \(.*\) -> .* \{")
_SHAPE = re.compile(r"(pred|[a-z]+)(\d*)(?:e\dm\d\w*)?\[([\d,]*)\]")
_CALLED = re.compile(r"calls=%?([\w.$-]+)")
_OPERAND = re.compile(r"%([\w.$-]+)")
_SCOPE = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")

CONTAINERS = frozenset({"while", "conditional", "call"})
"""Opcodes of operations that only hold others."""

PRODUCTS = frozenset({"dot", "convolution"})
MOVES = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "iota", "broadcast"),
        *("bitcast", "bitcast-convert", "convert", "copy", "transpose", "reverse", "reshape"),
        *("slice", "pad", "concatenate", "dynamic-slice", "dynamic-update-slice"),
    }
)
FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast"})
"""Opcodes that nothing is executed for."""
CALLBACK = "python"
"""Part of the name of a custom call that calls Python on the host."""
ONEDNN = "onednn$"
CUDNN, CUBLAS = "__cudnn$", "__cublas$"
CONVERSIONS = "conversions of types"
FARTHEST = 4
"""Instructions between one without a scope and the one whose scope it gets, at most."""


class Shape(NamedTuple):
    """An array in a program: its element type and its dimensions."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class HloInstruction:
    """One operation: its opcode, all opcodes that are fused into it, the bytes that it reads and
    writes, its FLOP, the scope that it was traced in, and the target of a custom call."""

    opcode: str
    inside: frozenset[str]
    moved_bytes: int
    flops: float = 0.0
    scope: str = ""
    target: str = ""

    @property
    def is_callback(self) -> bool:
        """Whether it calls Python on the host."""
        return self.opcode == "custom-call" and CALLBACK in self.target

    @property
    def converts(self) -> bool:
        """Whether it only changes the type of what it moves."""
        return "convert" in self.inside and self.inside <= MOVES


@dataclass(frozen=True)
class HloProgram:
    """The operations of a program, by the names that a profiler has for them."""

    instructions: Mapping[str, HloInstruction]
    name: str = ""
    """The name of the module, `jit_loop`."""

    def find(self, name: str) -> HloInstruction | None:
        """Return the operation of a profiler's name; None where the text has none."""
        return self.instructions.get(name) or self.instructions.get(name.partition("__")[0])

    def kind_of(self, name: str) -> str | None:
        """Return the kind of an operation; None where others inside of it are counted."""
        if ONEDNN in name:
            product = "convolutions" if "convolution" in name else "matrix products"
            return f"{product}, by oneDNN"
        known = self.instructions.get(name)
        if known is None or known.opcode in CONTAINERS:
            return None
        return _library_kind(known.target) or _kind(known.inside)

    def bytes_of(self, name: str) -> int:
        """Return the bytes of operands and results together."""
        known = self.find(name)
        return known.moved_bytes if known is not None else 0


def _library_kind(target: str) -> str | None:
    """Return the kind of a call of NVIDIA's libraries, by its target; None for any other."""
    if target.startswith(CUDNN):
        return "convolutions, by cuDNN" if "$conv" in target else "other calls of cuDNN"
    return "matrix products, by cuBLAS" if target.startswith(CUBLAS) else None


def _kind(inside: frozenset[str]) -> str:
    if inside & PRODUCTS:
        return "convolutions, by XLA" if "convolution" in inside else "matrix products, by XLA"
    if any(opcode.startswith(("reduce", "select-and")) for opcode in inside):
        return "sums and maxima"
    if "gather" in inside or "scatter" in inside:
        return "gathers"
    return "moves and conversions" if inside <= MOVES else "element by element"


@dataclass(frozen=True)
class _Line:
    """An instruction as it is written."""

    shapes: tuple[Shape, ...]
    opcode: str
    rest: str

    @property
    def elements(self) -> int:
        return sum(shape.elements for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        return sum(shape.elements * _item_bytes(shape.dtype) for shape in self.shapes)

    @property
    def operands(self) -> list[str]:
        return _OPERAND.findall(self.rest.partition("), ")[0])


def parse_program(text: str) -> HloProgram:
    """Read a program. Anything that is not understood counts as no bytes, no FLOP and nothing
    inside."""
    computations, lines = _read(text)
    shapes = {name: line.shapes[0] for name, line in lines.items() if line.shapes}
    opcodes = {
        called: frozenset(lines[name].opcode for name in names)
        for called, names in computations.items()
    }
    flops = {
        called: sum(_flops(lines[name], shapes) for name in names)
        for called, names in computations.items()
    }
    instructions = {}
    for name, line in lines.items():
        called = _CALLED.search(line.rest)
        inside = opcodes.get(called[1], frozenset()) if called else frozenset((line.opcode,))
        read = [lines[operand].nbytes if operand in lines else 0 for operand in line.operands]
        scope, target = _SCOPE.search(line.rest), _TARGET.search(line.rest)
        instructions[name] = HloInstruction(
            line.opcode,
            inside,
            _moved(inside, read, line.nbytes),
            flops.get(called[1], 0.0) if called else _flops(line, shapes),
            scope[1] if scope else "",
            target[1] if target else "",
        )
    instructions = {
        name: replace(one, scope=one.scope or scope)
        for (name, one), scope in zip(
            instructions.items(), _inherited(instructions, lines), strict=True
        )
    }
    first = text.lstrip().partition("\n")[0]
    module = first.removeprefix("HloModule ").partition(",")[0] if "HloModule" in first else ""
    return HloProgram(instructions, module.strip())


def _inherited(
    instructions: Mapping[str, HloInstruction], lines: Mapping[str, _Line]
) -> Iterator[str]:
    """Yield for each instruction the scope of the nearest one that reads its result, else of the
    nearest one that it reads: the compiler adds copies and conversions without a scope."""
    readers: dict[str, list[str]] = {}
    for name, line in lines.items():
        for operand in line.operands:
            readers.setdefault(operand, []).append(name)

    def nearest(name: str, next_to: Callable[[str], Sequence[str]]) -> str:
        seen, layer = {name}, [name]
        for _ in range(FARTHEST):
            layer = [one for before in layer for one in next_to(before) if one not in seen]
            seen.update(layer)
            for one in layer:
                if one in instructions and _is_named(instructions[one].scope):
                    return instructions[one].scope
        return ""

    for name, one in instructions.items():
        if one.scope or one.opcode in FREE | CONTAINERS:
            yield ""
            continue
        read_by = nearest(name, lambda other: readers.get(other, ()))
        yield read_by or nearest(
            name, lambda other: lines[other].operands if other in lines else ()
        )


def _is_named(scope: str) -> bool:
    """Whether a scope says more than the loop's own."""
    return "jvp(" in scope or "step." in scope


def _moved(inside: frozenset[str], read: list[int], written: int) -> int:
    """Bytes read and written; of an array that a piece is taken from or put into, the piece."""
    if inside & {"dynamic-slice", "gather"}:
        return 2 * written
    if "dynamic-update-slice" in inside:
        return 2 * sum(nbytes for nbytes in read if nbytes < written)
    return written + sum(read)


def _flops(line: _Line, shapes: Mapping[str, Shape]) -> float:
    """FLOP of an instruction: two for each product of a sum of products, one for each element of
    arithmetic, or of what is reduced; 0 for moves, containers and unknown calls."""
    operands = [shapes[name] for name in line.operands if name in shapes]
    if line.opcode == "dot" and operands:
        contracted = _CONTRACTED.search(line.rest)
        dims = [int(n) for n in contracted[1].split(",") if n] if contracted else []
        inner = math.prod(operands[0].sizes[dim] for dim in dims)
        return 2.0 * line.elements * inner
    if line.opcode == "convolution" and len(operands) > 1:
        labels = _LABELS.search(line.rest)
        place = labels[1].find("o") if labels else -1
        return 2.0 * line.elements * _per_output(operands[1], place)
    if line.opcode == "custom-call" and ONEDNN in line.rest and len(operands) > 1:
        return _onednn_flops(line, operands)
    if line.opcode.startswith("reduce") and operands:
        return float(operands[0].elements)
    if line.opcode in MOVES | CONTAINERS | {"fusion", "custom-call"}:
        return 0.0
    return float(line.elements)


def _onednn_flops(line: _Line, operands: Sequence[Shape]) -> float:
    left, right = operands[:2]
    if "convolution" in line.rest:
        return 2.0 * line.elements * _per_output(right, -1)
    # (m, k) times (k, n) has m n elements, so that k is a root whichever side is transposed.
    inner = math.sqrt(left.elements * right.elements / max(1, line.elements))
    return 2.0 * line.elements * inner


def _per_output(kernel: Shape, place: int) -> float:
    """Products that each output of a convolution is the sum of; `place` is that of its features."""
    return kernel.elements / max(1, kernel.sizes[place]) if kernel.sizes else 0.0


def _read(text: str) -> tuple[dict[str, list[str]], dict[str, _Line]]:
    """Return the instructions of each computation by name, and all lines."""
    inside: dict[str, list[str]] = {}
    lines: dict[str, _Line] = {}
    computation = ""
    for line in text.splitlines():
        if begins := _COMPUTATION.match(line):
            computation = begins[1]
        elif found := _INSTRUCTION.match(line):
            name, shape, opcode, rest = found.groups()
            inside.setdefault(computation, []).append(name)
            lines[name] = _Line(_shapes(shape), opcode, rest)
    return inside, lines


def _shapes(text: str) -> tuple[Shape, ...]:
    """Return the array, or those in a tuple: `bf16[32,56,56,64]{3,2,1,0}`."""
    return tuple(
        Shape(f"{kind}{bits}", tuple(map(int, filter(None, sizes.split(",")))))
        for kind, bits, sizes in _SHAPE.findall(text)
    )


def _item_bytes(dtype: str) -> int:
    bits = "".join(filter(str.isdigit, dtype))
    return max(1, int(bits or 8) // 8)
