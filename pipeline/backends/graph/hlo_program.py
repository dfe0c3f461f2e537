"""A compiled program by its HLO, XLA's text of a program: operations and collectives.

Operations have kinds, bytes, FLOP and scopes; collectives kinds, counts, bytes and group sizes.
Lines that aren't known are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.$-]+) \(.*\) -> .* \{")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.$-]+) = (.*?[\])}]) ([\w-]+)\((.*)")
# Arrays such as f32[2,3]. Of f8e4m3fn[2], the type is read as f8.
_ARRAY = re.compile(r"([a-z]+\d*)(?:e\dm\d\w*)?\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.$-]+)")
_CALLED = re.compile(r"calls=%?([\w.$-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_SCOPE = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
# A letter for each dimension of a convolution's kernel: `01io` in `dim_labels=b01f_01io->b01f`.
_KERNEL_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")

CONTAINERS = frozenset({"while", "conditional", "call"})
"""Opcodes of operations that only call computations."""
PRODUCTS = frozenset({"dot", "convolution"})
"""Opcodes of matrix products and convolutions."""
MOVES = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "iota", "broadcast", "bitcast",
     "bitcast-convert", "convert", "copy", "transpose", "reverse", "reshape", "slice", "pad",
     "concatenate", "dynamic-slice", "dynamic-update-slice"}
)  # fmt: skip
"""Opcodes that move values or convert their types, and compute nothing else."""
FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast"})
"""Opcodes of instructions that take no time."""
CALLBACK = "python"
"""Word in the target of a custom call that runs Python on the host."""
# Prefixes of the targets of custom calls.
ONEDNN = "onednn$"
CUDNN = "__cudnn$"
CUBLAS = "__cublas$"

CONVERSION_KIND = "conversions of types"
"""Kind of the operations in a profile for which `HloInstruction.converts` is true."""
MAX_DISTANCE = 4
"""Largest distance, in edges, from an instruction to the instruction whose scope it inherits."""
# HLO has three notations of groups of devices. {{0,1},{2,3}} lists them; [2,2]<=[4] has the numbers
# of groups and of devices in a group; mesh['x'=2,'y'=2] {'x'} has the axes that a group spans.
_LIST = re.compile(r"replica_groups=\{\{([0-9,]*)\}")
_ALL = "replica_groups={}"
"""Groups of a collective over all devices."""
_COUNT = re.compile(r"(?:replica_count|num_partitions)=([0-9]+)")
"""Number of devices, or a factor of it, in the header of a program."""
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_AXIS = re.compile(r"'(\w+)'(?:=([0-9]+))?")

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "send",
}
"""Kinds of collectives by XLA's opcode."""


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


@dataclass(frozen=True)
class HloInstruction:
    """An operation."""

    opcode: str
    inner_opcodes: frozenset[str]
    """Opcodes of the computation that it calls, such as a fusion's, else its own opcode."""
    moved_bytes: int
    """Bytes that it reads and writes."""
    flops: float = 0.0
    scope: str = ""
    """Name scope that it was traced in, or that it inherits."""
    target: str = ""
    """Target of a custom call."""

    @property
    def is_callback(self) -> bool:
        """Whether it calls Python on the host."""
        return self.opcode == "custom-call" and CALLBACK in self.target

    @property
    def converts(self) -> bool:
        """Whether it changes the type of values, and only moves them otherwise."""
        return "convert" in self.inner_opcodes and self.inner_opcodes <= MOVES


@dataclass(frozen=True)
class HloProgram:
    """The operations of a program by name, which are also the names in a profiler's trace."""

    instructions: Mapping[str, HloInstruction]
    name: str = ""
    """Name of the module, such as `jit_loop`."""

    def find(self, name: str) -> HloInstruction | None:
        """Return the operation called `name`, else the operation called `name` without its suffix
        `__...`; None if there is neither."""
        return self.instructions.get(name) or self.instructions.get(name.partition("__")[0])

    def find_kind(self, name: str) -> str | None:
        """Return the kind of an operation; None for an unknown name and for an operation that only
        calls computations."""
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
        return "gathers and scatters"
    return "moves and conversions" if opcodes <= MOVES else "element by element"


def parse_program(text: str) -> HloProgram:
    """Parse `compiled.as_text()`. Lines that `read_hlo_text` can't parse are left out."""
    program = read_hlo_text(text)
    lines = {line.name: line for line in program.parse_lines()}
    shapes = {name: line.arrays[0] for name, line in lines.items() if line.arrays}
    computation_opcodes: dict[str, frozenset[str]] = {}
    computation_flops: dict[str, float] = {}
    for computation, body in program.computations.items():
        computation_opcodes[computation] = frozenset(line.opcode for line in body.values())
        computation_flops[computation] = sum(_count_flops(line, shapes) for line in body.values())
    instructions = {}
    for name, line in lines.items():
        called = line.called_computation
        if called:
            inner_opcodes = computation_opcodes.get(called, frozenset())
            flops = computation_flops.get(called, 0.0)
        else:
            inner_opcodes = frozenset((line.opcode,))
            flops = _count_flops(line, shapes)
        read_bytes = [lines[operand].nbytes for operand in line.operands if operand in lines]
        scope = _SCOPE.search(line.arguments)
        instructions[name] = HloInstruction(
            opcode=line.opcode,
            inner_opcodes=inner_opcodes,
            moved_bytes=_count_moved_bytes(inner_opcodes, read_bytes, line.nbytes),
            flops=flops,
            scope=scope[1] if scope else "",
            target=line.target,
        )
    for name, scope_name in _inherit_scopes(instructions, lines).items():
        instructions[name] = replace(instructions[name], scope=scope_name)
    module = re.match(r"HloModule ([^,\s]*)", program.header)
    return HloProgram(instructions, module[1] if module else "")


def _inherit_scopes(
    instructions: Mapping[str, HloInstruction], lines: Mapping[str, HloLine]
) -> dict[str, str]:
    """Return scopes for instructions without one, such as copies that the compiler inserted.

    It is the scope of the nearest reader of the result, or else of the nearest operand; "" without
    either.
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
            nearby = [near for member in frontier for near in neighbours.get(member, ())]
            frontier = [near for near in nearby if near not in visited]
            visited.update(frontier)
            for near in frontier:
                scope = instructions[near].scope if near in instructions else ""
                # Other scopes belong to the training loop, without a layer.
                if "jvp(" in scope or "step." in scope:
                    return scope
        return ""

    return {
        name: find_scope(name, readers) or find_scope(name, operands)
        for name, instruction in instructions.items()
        if not instruction.scope and instruction.opcode not in FREE | CONTAINERS
    }


def _count_moved_bytes(opcodes: frozenset[str], read_bytes: list[int], result_bytes: int) -> int:
    """Return the bytes that an instruction reads and writes: of an array that it slices or updates,
    only the slice."""
    if opcodes & {"dynamic-slice", "gather"}:
        return 2 * result_bytes
    if "dynamic-update-slice" in opcodes:
        return 2 * sum(nbytes for nbytes in read_bytes if nbytes < result_bytes)
    return result_bytes + sum(read_bytes)


def _count_flops(line: HloLine, shapes: Mapping[str, HloArray]) -> float:
    """Return the number of floating-point operations of an instruction.

    It is two for each product in a sum of products, one for each operand's element of a reduction,
    none for moves, containers, fusions and unknown custom calls, and one for each element of the
    result of other instructions.
    """
    operands = [shapes[name] for name in line.operands if name in shapes]
    if line.opcode == "dot" and operands:
        contracted = _CONTRACTED.search(line.arguments)
        dims = [int(dim) for dim in contracted[1].split(",") if dim] if contracted else []
        return 2.0 * line.elements * math.prod(operands[0].sizes[dim] for dim in dims)
    if line.opcode == "convolution" and len(operands) > 1:
        match = _KERNEL_LABELS.search(line.arguments)
        kernel_labels = match[1] if match else ""
        output_features_axis = kernel_labels.find("o")
        return 2.0 * line.elements * _count_products_per_output(operands[1], output_features_axis)
    if line.opcode == "custom-call" and ONEDNN in line.arguments and len(operands) > 1:
        left, right = operands[:2]
        if "convolution" in line.arguments:
            return 2.0 * line.elements * _count_products_per_output(right, -1)
        # Operands have m k and k n elements, the result has m n, so k is this root.
        depth = math.sqrt(left.elements * right.elements / max(1, line.elements))
        return 2.0 * line.elements * depth
    if line.opcode.startswith("reduce") and operands:
        return float(operands[0].elements)
    if line.opcode in MOVES | CONTAINERS | {"fusion", "custom-call"}:
        return 0.0
    return float(line.elements)


def _count_products_per_output(kernel: HloArray, output_features_axis: int) -> float:
    """Return the number of products that are summed for one output of a convolution."""
    if not kernel.sizes:
        return 0.0
    return kernel.elements / max(1, kernel.sizes[output_features_axis])


@dataclass(frozen=True, slots=True, order=True)
class CompiledCollective:
    """Collectives of one kind over groups of one size in a compiled program.

    `nbytes` is the size of all `count` arrays together on one device: of arrays that all-reduces
    read and write, that all-gathers write, or that reduce-scatters read. Instructions in a loop are
    counted once.
    """

    kind: str
    group_size: int
    count: int
    nbytes: int


def read_collectives(text: str) -> tuple[CompiledCollective, ...]:
    """Return the collectives of `compiled.as_text()`, by kind and group size."""
    sizes: dict[tuple[str, int], list[int]] = {}
    program = read_hlo_text(text)
    devices = math.prod(int(count) for count in _COUNT.findall(program.header))
    for line in program.parse_lines():
        opcode = line.opcode.removesuffix("-start")  # of an asynchronous collective
        if opcode not in KINDS:
            continue
        group_size = devices if _ALL in line.arguments else _find_group_size(line.arguments)
        nbytes = _count_bytes(line) * (group_size if opcode == "reduce-scatter" else 1)
        sizes.setdefault((KINDS[opcode], group_size), []).append(nbytes)
    return tuple(
        CompiledCollective(kind, group_size, len(nbytes), sum(nbytes))
        for (kind, group_size), nbytes in sorted(sizes.items())
    )


def _count_bytes(line: HloLine) -> int:
    """Return the bytes of a result, without the operands that some `-start` opcodes also return."""
    if not line.opcode.endswith("-start") or line.opcode == "all-reduce-start":
        return line.nbytes
    # Operands, as many results, and scalars of the runtime: a permutation's two, or a call's one.
    count = len(line.operands)
    return sum(array.nbytes for array in line.arrays[count : 2 * count])


def _find_group_size(arguments: str) -> int:
    """Return the number of devices in a group; 2 for a permutation, which has pairs of devices."""
    if listed_ids := _LIST.search(arguments):
        return listed_ids[1].count(",") + 1
    if iota := _IOTA.search(arguments):
        return int(iota[1].rpartition(",")[2])
    if mesh := _MESH.search(arguments):
        sizes = {name: int(size) for name, size in _AXIS.findall(mesh[1])}
        return math.prod(sizes[name] for name, _ in _AXIS.findall(mesh[2]))
    return 2
