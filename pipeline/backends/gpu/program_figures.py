"""Figures of a program for an absent chip, from its optimized HLO and files of XLA's compiler.

XLA lists launches as thunks, indented as a tree: inside `kCommandBuffer` are the launches of a CUDA
graph, inside `kWhile` the condition and the body of a loop.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from pipeline.backends.base import ProgramReport, ProgressClock
from pipeline.backends.compile_program import ProgramSpec, compile_program
from pipeline.backends.gpu.chip_target import ChipTarget
from pipeline.backends.graph.hlo_program import HloLine, read_hlo_text

MB = 1e6
GB = 1e9
THUNK_FILES = ("*thunk_sequence_after_thunk_passes.txt", "*thunk_sequence.txt")
"""Files of thunks after and before CUDA graphs are made. The first that exists is read."""
WITHOUT_TRITON: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
"""Option that leaves products to libraries. XLA chooses tiles of Triton by timing them on a GPU."""

_LINE = re.compile(r"^( *)\d+: k(\w+)(.*)$")
_PART = re.compile(r"^ *(condition|body|branch[^:]*):\s*$")
_NAME = re.compile(r"\[[^\]]*\]\s+(\S+)")

GRAPH = "CommandBuffer"
LOOP = "While"
KINDS = {
    "cudnn": ("Convolution", "CuDnn", "ConvolutionReorder", "Norm"),
    "gemm": ("Gemm", "CublasLtMatmul", "CublasLtMatmulF8"),
    "copies": ("Copy", "Memcpy", "DeviceToDeviceCopy"),
    "fills": ("Memzero", "Memset32BitValue", "Memset"),
    "host": ("HostSend", "HostRecv", "HostExecuteStart", "Infeed", "Outfeed", "HostToDeviceCopy"),
}
"""XLA's names of thunks by kind of launch. Other thunks are kernels."""
_TRITON = re.compile(r'"kind":"(__triton\w*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BODY = re.compile(r"body=%?([\w.$-]+)")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")

MOVES = frozenset({"copy", "transpose", "copy-start"})
VIEWS = frozenset({"bitcast", "get-tuple-element", "tuple", "parameter", "reshape", "constant"})
"""Opcodes that may be in a computation of moves besides `MOVES`."""
HOST = frozenset({"infeed", "outfeed", "send", "recv"})
"""Opcodes of transfers between host and device."""
CALLBACK = "callback"
"""Part of the target's name in a custom call to the host."""


@dataclass
class Thunk:
    """A launch, CUDA graph or loop."""

    kind: str
    name: str
    part: str = ""
    """The part of a loop that the thunk is directly in: "condition" or "body"; else empty."""
    inner_thunks: list[Thunk] = field(default_factory=list)


@dataclass(frozen=True)
class Launches:
    """Number of launches by kind, of CUDA graphs, of launches outside graphs, and of loops."""

    kernels: int = 0
    cudnn: int = 0
    gemm: int = 0
    copies: int = 0
    fills: int = 0
    host: int = 0
    graphs: int = 0
    alone: int = 0
    loops: int = 0

    def __str__(self) -> str:
        return (
            f"{self.kernels} kernels, {self.cudnn} cuDNN, {self.gemm} GEMM, "
            f"{self.copies} copies, {self.fills} fills; "
            f"{self.graphs} CUDA graphs and {self.alone} launches beside them"
        )


def parse_thunks(text: str) -> tuple[Thunk, ...]:
    """Read a tree of thunks. Lines that aren't thunks are ignored."""
    root = Thunk("Root", "")
    parents = [(-1, root)]  # The thunks around the next line, with their indents.
    part = ""
    for line in text.splitlines():
        if header := _PART.match(line):
            part = header[1]
        elif match := _LINE.match(line):
            indent = len(match[1])
            while parents[-1][0] >= indent:
                parents.pop()
            parent = parents[-1][1]
            name = _NAME.search(match[3])
            thunk = Thunk(match[2], name[1] if name else "", part if parent.kind == LOOP else "")
            parent.inner_thunks.append(thunk)
            parents.append((indent, thunk))
    return tuple(root.inner_thunks)


def count_launches(thunks: Sequence[Thunk], *, in_graph: bool = False) -> Launches:
    """Count launches, a loop's once. `in_graph`: the thunks are in a CUDA graph."""
    counts: Counter[str] = Counter()

    def count(thunk: Thunk, in_graph: bool) -> None:
        if thunk.kind == GRAPH:
            counts["graphs"] += not in_graph
        elif thunk.kind == LOOP:
            counts["loops"] += 1
        elif not thunk.inner_thunks:
            launch_kinds = [kind for kind, thunks in KINDS.items() if thunk.kind in thunks]
            counts[launch_kinds[0] if launch_kinds else "kernels"] += 1
            counts["alone"] += not in_graph
        for inner in thunk.inner_thunks:
            count(inner, in_graph or thunk.kind == GRAPH)

    for thunk in thunks:
        count(thunk, in_graph)
    return Launches(**counts)


def find_outer_loops(
    thunks: Sequence[Thunk], *, in_graph: bool = False
) -> tuple[tuple[Thunk, bool], ...]:
    """Return the loops outside other loops, and whether each is in a CUDA graph."""
    loops: list[tuple[Thunk, bool]] = []
    for thunk in thunks:
        if thunk.kind == LOOP:
            loops.append((thunk, in_graph))
        else:
            loops += find_outer_loops(thunk.inner_thunks, in_graph=in_graph or thunk.kind == GRAPH)
    return tuple(loops)


@dataclass(frozen=True)
class ProgramFigures:
    """Figures of a program."""

    results: int
    """Number of returned arrays; each should reuse the memory of an argument."""
    argument_bytes: int
    temporary_bytes: int
    memory_bytes: int
    """Bytes of arguments, of results that don't reuse an argument's memory, and of temporaries."""
    chip_bytes: int
    loops: int
    loop_in_graph: bool
    step: Launches
    """Launches of an iteration of the first loop; without a loop, of the program."""
    around: Launches
    """Launches of a dispatch outside the first loop; none without a loop."""
    hlo: HloFacts

    @property
    def waits_for_host(self) -> bool:
        """Whether each iteration of the loop waits until the host has read the condition."""
        return self.loops > 0 and not self.loop_in_graph and self.hlo.known_steps is None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "waits_for_host": self.waits_for_host}

    def format_lines(self, name: str) -> tuple[str, ...]:
        unit = "a step" if self.loops else "each"
        in_body = _describe_bytes(self.hlo.body_moved_bytes)
        in_dispatch = _describe_bytes(self.hlo.state_moved_bytes)
        return (
            f"{name}, {unit}: {self.step}; {self._describe_loop()}",
            f"{name}, libraries: {_describe_calls(self.hlo.calls_by_library)}; "
            f"Triton: {_describe_calls(self.hlo.triton)}",
            f"{name}, memory: {self.memory_bytes / GB:,.2f} of the chip's "
            f"{self.chip_bytes / GB:,.0f} GB, {self.temporary_bytes / MB:,.1f} MB of it "
            f"temporaries; {self.hlo.donated} of {self.results} results take over the memory of "
            f"an argument; host callbacks: {self.hlo.callbacks}",
            f"{name}, copies and transposes: {self.hlo.body_moves} in the loop's body{in_body}, "
            f"{self.hlo.state_moves} of the state in a dispatch{in_dispatch}",
        )

    def _describe_loop(self) -> str:
        if not self.loops:
            return "no loop"
        if self.loop_in_graph:
            return "the loop is in a graph, and ends on the device"
        if self.hlo.known_steps is not None:
            return f"a loop of {self.hlo.known_steps} iterations, without waits for the host"
        return "a loop that waits before each iteration until the host has read its condition"


def compile_for_target(
    target: ChipTarget, spec: ProgramSpec, watch: ProgressClock
) -> tuple[Any, ProgramReport]:
    """Return a program that is compiled for a target, and its report with the program's figures."""
    spec = replace(spec, platforms=("cuda",))
    with tempfile.TemporaryDirectory() as folder:
        dump: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        program, report = compile_program(spec.with_options(WITHOUT_TRITON | dump), watch)
        file = next((file for pattern in THUNK_FILES for file in Path(folder).glob(pattern)), None)
        text = "" if file is None else file.read_text(encoding="utf-8")
    figures = read_figures(program, parse_thunks(text), target)
    lines = figures.format_lines(spec.name)
    return program, replace(report, figures=figures.to_json(), lines=lines)


def read_figures(program: Any, thunks: tuple[Thunk, ...], target: ChipTarget) -> ProgramFigures:
    """Return the figures of a compiled program."""
    memory = program.memory_analysis()
    memory_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    memory_bytes += memory.output_size_in_bytes - memory.alias_size_in_bytes
    launches = count_launches(thunks)
    step = launches
    around = Launches()
    loop, in_graph = next(iter(find_outer_loops(thunks)), (None, False))
    if loop is not None:
        body = [thunk for thunk in loop.inner_thunks if thunk.part == "body"]
        step = count_launches(body, in_graph=in_graph)
        around = count_launches([thunk for thunk in thunks if thunk is not loop])
    return ProgramFigures(
        results=len(jax.tree.leaves(program.out_info)),
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        memory_bytes=memory_bytes,
        chip_bytes=target.memory_bytes,
        loops=launches.loops,
        loop_in_graph=in_graph,
        step=step,
        around=around,
        hlo=read_hlo(program.as_text()),
    )


def _describe_calls(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing"


def _describe_bytes(nbytes: int) -> str:
    return f" ({nbytes / MB:,.2f} MB)" if nbytes else ""


@dataclass(frozen=True)
class HloFacts:
    """Facts of a program. Moves are copies and transposes of arrays of two or more dimensions."""

    donated: int
    """Number of arguments whose memory a result uses again."""
    body_moves: int
    """Number of moves in the bodies of loops."""
    body_moved_bytes: int
    state_moves: int
    """Number of moves of the state into or out of a dispatch."""
    state_moved_bytes: int
    known_steps: int | None
    """Trip count of the loop; None if the compiler hasn't determined it."""
    calls_by_library: Mapping[str, int]
    """Number of custom calls by "target dtype"."""
    triton: Mapping[str, int]
    """Number of Triton's kernels by kind."""
    callbacks: int
    """Number of transfers and calls between device and host."""


def read_hlo(text: str) -> HloFacts:
    """Read the facts from a program's text. Lines that aren't instructions are ignored."""
    program = read_hlo_text(text)
    lines = list(program.parse_lines())
    moving_computations = {
        name for name, body in program.computations.items() if _only_moves(body.values())
    }
    main = program.computations.get(program.entry, {})
    loops = [line for line in lines if line.opcode == "while"]
    body_names = {name for line in loops for name in _BODY.findall(line.arguments)}
    bodies = [body for name, body in program.computations.items() if name in body_names]
    body_lines = [line for body in bodies for line in body.values()]
    body_moves = [line for line in body_lines if _is_move(line, moving_computations)]
    _, _, aliases = program.header.partition("input_output_alias={")
    aliases = aliases.partition("entry_computation_layout")[0]
    donated = {int(number) for _, number in _ALIAS.findall(aliases)}
    # The state is read from a donated argument, or written to a result or a loop's input.
    main_moves = [line for line in main.values() if _is_move(line, moving_computations)]
    state_moves = [
        line
        for line in main_moves
        if _is_output(line, main) or any(_is_donated(name, main, donated) for name in line.operands)
    ]
    trips = [trip for line in main.values() for trip in _TRIPS.findall(line.arguments)]
    calls = [
        f"{line.target.lstrip('_')} {line.arrays[0].dtype}"
        for line in lines
        if line.opcode == "custom-call" and line.target and line.arrays
    ]
    triton = [kind for line in lines for kind in _TRITON.findall(line.arguments)]
    return HloFacts(
        donated=len(donated),
        body_moves=len(body_moves),
        body_moved_bytes=sum(line.nbytes for line in body_moves),
        state_moves=len(state_moves),
        state_moved_bytes=sum(line.nbytes for line in state_moves),
        known_steps=int(trips[0]) if trips else None,
        calls_by_library=dict(sorted(Counter(calls).items())),
        triton=dict(sorted(Counter(triton).items())),
        callbacks=sum(line.opcode in HOST or CALLBACK in line.target for line in lines),
    )


def _only_moves(lines: Iterable[HloLine]) -> bool:
    opcodes = {line.opcode for line in lines}
    return bool(opcodes & MOVES) and opcodes <= MOVES | VIEWS


def _is_move(line: HloLine, moving_computations: set[str]) -> bool:
    """Return whether an instruction only moves an array of two dimensions or more, or several."""
    rank = len(line.arrays[0].sizes) if line.arrays else 0
    if rank < 2 and not (line.opcode == "fusion" and len(line.arrays) > 1):
        return False
    return line.opcode in MOVES or line.called_computation in moving_computations


def _is_output(line: HloLine, main: Mapping[str, HloLine]) -> bool:
    """Return whether a value, or a tuple or bitcast of it, is a result or a loop's input."""
    readers = [reader for reader in main.values() if line.name in reader.operands]
    return any(
        reader.opcode == "while"
        or reader.is_root
        or (reader.opcode in ("tuple", "bitcast") and _is_output(reader, main))
        for reader in readers
    )


def _is_donated(name: str, main: Mapping[str, HloLine], donated: set[int]) -> bool:
    """Return whether a value is, or views, a donated argument or a loop's result."""
    line = main.get(name)
    if line is None:
        return False
    if line.opcode == "parameter":
        number = line.arguments.partition(")")[0]
        return number.isdigit() and int(number) in donated
    if line.opcode in ("bitcast", "get-tuple-element"):
        return any(_is_donated(operand, main, donated) for operand in line.operands)
    # A loop's results reuse the donated memory, so a move of a result moves the state out.
    return line.opcode == "while"
