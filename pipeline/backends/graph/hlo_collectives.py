"""Collectives in the text of a compiled program: kinds, counts, bytes and group sizes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pipeline.backends.graph.hlo_text import HloLine, read_hlo_text

# HLO has three notations of groups of devices. {{0,1},{2,3}} lists them; [2,2]<=[4] has the numbers
# of groups and of devices in a group; mesh['x'=2,'y'=2] {'x'} has the axes that a group spans.
_LIST = re.compile(r"replica_groups=\{\{([0-9,]*)\}")
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
    for line in read_hlo_text(text).parse_lines():
        opcode = line.opcode.removesuffix("-start")  # of an asynchronous collective
        if opcode not in KINDS:
            continue
        group_size = _find_group_size(line.arguments)
        nbytes = _count_bytes(line) * (group_size if opcode == "reduce-scatter" else 1)
        sizes.setdefault((KINDS[opcode], group_size), []).append(nbytes)
    return tuple(
        CompiledCollective(kind, group_size, len(nbytes), sum(nbytes))
        for (kind, group_size), nbytes in sorted(sizes.items())
    )


def _count_bytes(line: HloLine) -> int:
    """Return the bytes of a result, without the operands that some `-start` opcodes also return."""
    sizes = [array.nbytes for array in line.arrays]
    if len(sizes) > 1 and line.opcode == "all-gather-start":
        return sum(sizes[len(sizes) // 2 :])
    if len(sizes) > 1 and line.opcode == "collective-permute-start":
        return sizes[0]
    return sum(sizes)


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
