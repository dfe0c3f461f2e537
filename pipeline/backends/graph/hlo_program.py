"""Operations of a compiled program: kinds, bytes, FLOP and scopes, from its HLO text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.backends.graph.hlo_text import HloArray, HloLine, read_hlo_text

_SCOPE = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")

CONTAINERS = frozenset({"while", "conditional", "call"})
"""Opcodes of operations that only call computations."""

PRODUCTS = frozenset({"dot", "convolution"})
"""Opcodes of sums of products."""
MOVES = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "iota", "broadcast", "bitcast",
     "bitcast-convert", "convert", "copy", "transpose", "reverse", "reshape", "slice", "pad",
     "concatenate", "dynamic-slice", "dynamic-update-slice"}
)  # fmt: skip
"""Opcodes that move values, and compute none but conversions."""
FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast"})
"""Opcodes of instructions that take no time."""
CALLBACK = "python"
"""A word in the name of a custom call of Python on the host."""
# Prefixes of the targets of custom calls.
ONEDNN = "onednn$"
CUDNN = "__cudnn$"
CUBLAS = "__cublas$"
CONVERSIONS = "conversions of types"
MAX_DISTANCE = 4
"""An instruction inherits the scope of another one that is at most this many edges away."""


@dataclass(frozen=True)
class HloInstruction:
    """An operation.

    `inner_opcodes` are the opcodes fused into it, `moved_bytes` the bytes that it reads and writes.
    `scope` is the name scope that it was traced in, `target` the target of a custom call.
    """

    opcode: str
    inner_opcodes: frozenset[str]
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
        """Whether it only moves values and changes their type."""
        return "convert" in self.inner_opcodes and self.inner_opcodes <= MOVES


@dataclass(frozen=True)
class HloProgram:
    """The operations of a program, by the names in a profiler's trace."""

    instructions: Mapping[str, HloInstruction]
    name: str = ""
    """Name of the module, such as `jit_loop`."""

    def find(self, name: str) -> HloInstruction | None:
        """Return the operation of a name, or of a name without its suffix `__...`; else None."""
        return self.instructions.get(name) or self.instructions.get(name.partition("__")[0])

    def find_kind(self, name: str) -> str | None:
        """Return the kind of an operation; None for a container of other operations."""
        if ONEDNN in name:
            product = "convolutions" if "convolution" in name else "matrix products"
            return f"{product}, by oneDNN"
        instruction = self.instructions.get(name)
        if instruction is None or instruction.opcode in CONTAINERS:
            return None
        if instruction.target.startswith(CUDNN):
            is_convolution = "$conv" in instruction.target
            return "convolutions, by cuDNN" if is_convolution else "other calls of cuDNN"
        if instruction.target.startswith(CUBLAS):
            return "matrix products, by cuBLAS"
        return _name_kind(instruction.inner_opcodes)


def _name_kind(opcodes: frozenset[str]) -> str:
    if opcodes & PRODUCTS:
        return "convolutions, by XLA" if "convolution" in opcodes else "matrix products, by XLA"
    if any(opcode.startswith(("reduce", "select-and")) for opcode in opcodes):
        return "sums and maxima"
    if "gather" in opcodes or "scatter" in opcodes:
        return "gathers"
    return "moves and conversions" if opcodes <= MOVES else "element by element"


def parse_program(text: str) -> HloProgram:
    """Parse `compiled.as_text()`. Unknown operations have no bytes and no FLOP."""
    program = read_hlo_text(text)
    lines = {line.name: line for line in program.parse_lines()}
    shapes = {name: line.arrays[0] for name, line in lines.items() if line.arrays}
    opcodes: dict[str | None, frozenset[str]] = {}
    flops: dict[str | None, float] = {}
    for computation, body in program.computations.items():
        opcodes[computation] = frozenset(line.opcode for line in body.values())
        flops[computation] = sum(_count_flops(line, shapes) for line in body.values())
    instructions = {}
    for name, line in lines.items():
        called = line.called_computation
        inner = opcodes.get(called, frozenset()) if called else frozenset((line.opcode,))
        read_bytes = [lines[operand].nbytes for operand in line.operands if operand in lines]
        scope = _SCOPE.search(line.arguments)
        instructions[name] = HloInstruction(
            line.opcode,
            inner,
            _count_moved_bytes(inner, read_bytes, line.nbytes),
            flops.get(called, 0.0) if called else _count_flops(line, shapes),
            scope[1] if scope else "",
            line.target or "",
        )
    inherited_scopes = _inherit_scopes(instructions, lines)
    instructions = {
        name: replace(instruction, scope=instruction.scope or inherited_scopes.get(name, ""))
        for name, instruction in instructions.items()
    }
    header = program.header
    module = header.removeprefix("HloModule ").partition(",")[0] if "HloModule" in header else ""
    return HloProgram(instructions, module.strip())


def _inherit_scopes(
    instructions: Mapping[str, HloInstruction], lines: Mapping[str, HloLine]
) -> dict[str, str]:
    """Return scopes by name for instructions without one, such as copies that the compiler adds.

    A scope is that of the nearest reader of the result, else of the nearest operand, else "".
    """
    readers: dict[str, list[str]] = {}
    for name, line in lines.items():
        for operand in line.operands:
            readers.setdefault(operand, []).append(name)
    operands = {name: line.operands for name, line in lines.items()}

    def find_scope(name: str, neighbours: Mapping[str, Sequence[str]]) -> str:
        visited = {name}
        frontier = [name]
        for _ in range(MAX_DISTANCE):
            nearby = (other for name in frontier for other in neighbours.get(name, ()))
            frontier = [other for other in nearby if other not in visited]
            visited.update(frontier)
            for other in frontier:
                # All other scopes are the training loop's, which don't name a layer.
                scope = instructions[other].scope if other in instructions else ""
                if "jvp(" in scope or "step." in scope:
                    return scope
        return ""

    return {
        name: find_scope(name, readers) or find_scope(name, operands)
        for name, instruction in instructions.items()
        if not instruction.scope and instruction.opcode not in FREE | CONTAINERS
    }


def _count_moved_bytes(opcodes: frozenset[str], read_bytes: list[int], result_bytes: int) -> int:
    """Return bytes read and written; of a sliced or updated array, only the slice's bytes."""
    if opcodes & {"dynamic-slice", "gather"}:
        return 2 * result_bytes
    if "dynamic-update-slice" in opcodes:
        return 2 * sum(nbytes for nbytes in read_bytes if nbytes < result_bytes)
    return result_bytes + sum(read_bytes)


def _count_flops(line: HloLine, shapes: Mapping[str, HloArray]) -> float:
    """Return the FLOP of an instruction.

    Each product in a sum of products counts as two. Arithmetic counts as one per element of the
    result, a reduction as one per element of its operand. Moves, containers and unknown calls have
    none.
    """
    operands = [shapes[name] for name in line.operands if name in shapes]
    if line.opcode == "dot" and operands:
        contracted = _CONTRACTED.search(line.arguments)
        dims = [int(dim) for dim in contracted[1].split(",") if dim] if contracted else []
        return 2.0 * line.elements * math.prod(operands[0].sizes[dim] for dim in dims)
    if line.opcode == "convolution" and len(operands) > 1:
        labels = _LABELS.search(line.arguments)
        features_axis = labels[1].find("o") if labels else -1
        return 2.0 * line.elements * _count_products_per_output(operands[1], features_axis)
    if line.opcode == "custom-call" and ONEDNN in line.arguments and len(operands) > 1:
        left, right = operands[:2]
        if "convolution" in line.arguments:
            return 2.0 * line.elements * _count_products_per_output(right, -1)
        # (m, k) times (k, n) has m n elements; so k is this root, even if a side is transposed.
        depth = math.sqrt(left.elements * right.elements / max(1, line.elements))
        return 2.0 * line.elements * depth
    if line.opcode.startswith("reduce") and operands:
        return float(operands[0].elements)
    if line.opcode in MOVES | CONTAINERS | {"fusion", "custom-call"}:
        return 0.0
    return float(line.elements)


def _count_products_per_output(kernel: HloArray, features_axis: int) -> float:
    """Return the number of products that are summed for one output of a convolution."""
    return kernel.elements / max(1, kernel.sizes[features_axis]) if kernel.sizes else 0.0
