"""Figures of a program for an absent chip, from the files of XLA's compiler.

XLA lists launches as thunks, indented as a tree: inside `kCommandBuffer` are the launches of a CUDA
graph, inside `kWhile` the condition and the body of a loop.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from pipeline.backends.base import ProgramReport, ProgressClock
from pipeline.backends.compile_program import ProgramSpec, compile_program
from pipeline.backends.gpu.chip_target import ChipTarget
from pipeline.backends.gpu.optimized_hlo import HloFacts, read_hlo

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
