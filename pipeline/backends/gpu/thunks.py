"""The launches of a program, read from the list of thunks that XLA's compiler writes.

The list is a tree by indentation: `kCommandBuffer` holds the launches of a CUDA graph, `kWhile` a
condition and a body.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

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
"""Kinds of launches by the names of XLA; all others are kernels."""


@dataclass
class Thunk:
    """A launch, a graph or a loop with the thunks inside; `part` is condition or body of a loop."""

    kind: str
    name: str
    part: str = ""
    inside: list[Thunk] = field(default_factory=list)


@dataclass(frozen=True)
class Launches:
    """Launches of a step, or of a program without one: kernels and calls of libraries.

    `graphs` hold some of them, `alone` counts the others.
    """

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
    """Read a list of launches; lines of any other form are left out."""
    root = Thunk("Root", "")
    parents = [(-1, root)]
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
            parent.inside.append(thunk)
            parents.append((indent, thunk))
    return tuple(root.inside)


def count_launches(thunks: Sequence[Thunk], *, in_graph: bool = False) -> Launches:
    """Count the launches of thunks; the launches of a loop inside of them once."""
    counts: Counter[str] = Counter()

    def count(thunk: Thunk, in_graph: bool) -> None:
        if thunk.kind == GRAPH:
            counts["graphs"] += not in_graph
        elif thunk.kind == LOOP:
            counts["loops"] += 1
        elif not thunk.inside:
            library = (name for name, kinds in KINDS.items() if thunk.kind in kinds)
            counts[next(library, "kernels")] += 1
            counts["alone"] += not in_graph
        for inner in thunk.inside:
            count(inner, in_graph or thunk.kind == GRAPH)

    for thunk in thunks:
        count(thunk, in_graph)
    return Launches(**counts)


def outer_loops(
    thunks: Sequence[Thunk], *, in_graph: bool = False
) -> tuple[tuple[Thunk, bool], ...]:
    """Return the loops that are in no other loop, each with whether a graph holds it."""
    loops: list[tuple[Thunk, bool]] = []
    for thunk in thunks:
        if thunk.kind == LOOP:
            loops.append((thunk, in_graph))
        else:
            loops += outer_loops(thunk.inside, in_graph=in_graph or thunk.kind == GRAPH)
    return tuple(loops)
