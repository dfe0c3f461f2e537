"""The launches of a program, read from the list of them that XLA's compiler writes.

XLA calls them thunks. The list is a tree by indentation: `kCommandBuffer` holds those of a CUDA
graph, `kWhile` a condition and a body.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_LINE = re.compile(r"^( *)\d+: k(\w+)(.*)$")
_PART = re.compile(r"^ *(condition|body|branch[^:]*):\s*$")
_NAME = re.compile(r"\[[^\]]*\]\s+(\S+)")

GRAPH, LOOP = "CommandBuffer", "While"
KINDS = {
    "cudnn": ("Convolution", "CuDnn", "ConvolutionReorder", "Norm"),
    "gemm": ("Gemm", "CublasLtMatmul", "CublasLtMatmulF8"),
    "copies": ("Copy", "Memcpy", "DeviceToDeviceCopy"),
    "fills": ("Memzero", "Memset32BitValue", "Memset"),
    "host": ("HostSend", "HostRecv", "HostExecuteStart", "Infeed", "Outfeed", "HostToDeviceCopy"),
}
"""Kinds of launches by the names of XLA; all others are kernels."""


@dataclass
class Thunk:
    """A launch, a graph or a loop, and those inside of it; `inside` says in which part."""

    kind: str
    name: str
    part: str = ""
    inside: list[Thunk] = field(default_factory=list)

    def walk(self) -> Iterator[Thunk]:
        """Yield it and all inside of it."""
        yield self
        for one in self.inside:
            yield from one.walk()


@dataclass(frozen=True)
class Launches:
    """Launches of a step, or of a program without one: kernels and calls of libraries, how many
    graphs hold some of them, and how many are in none."""

    kernels: int = 0
    cudnn: int = 0
    gemm: int = 0
    copies: int = 0
    fills: int = 0
    host: int = 0
    graphs: int = 0
    alone: int = 0
    loops: int = 0


def parse_thunks(text: str) -> tuple[Thunk, ...]:
    """Read a list of launches; lines that are not understood are left out."""
    root = Thunk("Root", "")
    open_ones: list[tuple[int, Thunk]] = [(-1, root)]
    part = ""
    for line in text.splitlines():
        if named := _PART.match(line):
            part = named[1]
            continue
        found = _LINE.match(line)
        if found is None:
            continue
        indent = len(found[1])
        while open_ones[-1][0] >= indent:
            open_ones.pop()
        parent = open_ones[-1][1]
        name = _NAME.search(found[3])
        thunk = Thunk(found[2], name[1] if name else "", part if parent.kind == LOOP else "")
        parent.inside.append(thunk)
        open_ones.append((indent, thunk))
    return tuple(root.inside)


def count_launches(thunks: Sequence[Thunk], *, in_graph: bool = False) -> Launches:
    """Count the launches of some thunks; those of a loop inside of them once."""
    counts = dict.fromkeys(Launches.__dataclass_fields__, 0)
    for thunk in thunks:
        _count(thunk, counts, in_graph)
    return Launches(**counts)


def _count(thunk: Thunk, counts: dict[str, int], in_graph: bool) -> None:
    if thunk.kind == GRAPH:
        counts["graphs"] += not in_graph
        in_graph = True
    elif thunk.kind == LOOP:
        counts["loops"] += 1
    elif not thunk.inside:
        kind = next((name for name, kinds in KINDS.items() if thunk.kind in kinds), "kernels")
        counts[kind] += 1
        counts["alone"] += not in_graph
    for one in thunk.inside:
        _count(one, counts, in_graph)


def outer_loops(thunks: Sequence[Thunk]) -> tuple[tuple[Thunk, bool], ...]:
    """Return the loops that are in no other one, each with whether a graph holds it."""
    found: list[tuple[Thunk, bool]] = []

    def look(one: Thunk, in_graph: bool) -> None:
        if one.kind == LOOP:
            found.append((one, in_graph))
            return
        for inner in one.inside:
            look(inner, in_graph or one.kind == GRAPH)

    for thunk in thunks:
        look(thunk, False)
    return tuple(found)
