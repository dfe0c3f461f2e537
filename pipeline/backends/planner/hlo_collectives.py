"""Collectives of a compiled program: kinds, counts, bytes and group sizes, read off its text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_INSTRUCTION = re.compile(
    r"= (?P<shape>\([^)]*\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?P<start>-start)?\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"\b(pred|[a-z]+[0-9]+(?:e[0-9a-z]+)?)\[([0-9,]*)\]")
_BITS = re.compile(r"[a-z]+([0-9]+)")
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
"""Names of the kinds by XLA's."""


@dataclass(frozen=True, slots=True, order=True)
class CompiledCollective:
    """Collectives of one kind over groups of one size in a compiled program.

    `nbytes` is the size of the whole array of one device, summed over all `count` of them: what an
    all-reduce starts and ends with, what an all-gather ends with and a reduce-scatter starts with.
    An instruction in a loop is counted once.
    """

    kind: str
    group_size: int
    count: int
    nbytes: int


def read_collectives(text: str, least_bytes: int = 0) -> tuple[CompiledCollective, ...]:
    """Return the collectives of `compiled.as_text()`, by kind and group size.

    Those of less than `least_bytes` are left out.
    """
    counts: Counter[tuple[str, int]] = Counter()
    sizes: Counter[tuple[str, int]] = Counter()
    for kind, group, nbytes in _instructions(text):
        if nbytes >= least_bytes:
            counts[kind, group] += 1
            sizes[kind, group] += nbytes
    return tuple(
        CompiledCollective(kind, group, count, sizes[kind, group])
        for (kind, group), count in sorted(counts.items())
    )


def bytes_by_kind(collectives: Iterable[CompiledCollective]) -> dict[str, int]:
    """Sum of the bytes of collectives by kind."""
    total: Counter[str] = Counter()
    for collective in collectives:
        total[collective.kind] += collective.nbytes
    return dict(sorted(total.items()))


def _instructions(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield kind, group size and bytes of each collective of a program."""
    for line in text.splitlines():
        found = _INSTRUCTION.search(line)
        if found is None:
            continue
        group = _group_size(found["rest"])
        nbytes = _array_bytes(found["shape"], found["kind"] if found["start"] else "")
        if found["kind"] == "reduce-scatter":
            nbytes *= group
        yield KINDS[found["kind"]], group, nbytes


def _array_bytes(shape: str, started: str) -> int:
    """Bytes of a shape, or of all shapes of a tuple.

    What starts a gather or a permutation in the background returns its operand and its result.
    """
    sizes = [_size(*array) for array in _ARRAY.findall(shape)]
    if started in ("all-gather", "collective-permute") and len(sizes) > 1:
        return sum(sizes[len(sizes) // 2 :]) if started == "all-gather" else sizes[0]
    return sum(sizes)


def _size(dtype: str, dimensions: str) -> int:
    found = _BITS.match(dtype)
    bits = 8 if found is None else int(found[1])
    return math.prod(int(size) for size in dimensions.split(",") if size) * bits // 8


def _group_size(rest: str) -> int:
    """Number of devices that communicate together; 2 for a permutation's pairs."""
    if listed := _LIST.search(rest):
        return listed[1].count(",") + 1
    if iota := _IOTA.search(rest):
        return int(iota[1].rpartition(",")[2])
    if mesh := _MESH.search(rest):
        sizes = {name: int(size) for name, size in _AXIS.findall(mesh[1])}
        return math.prod(sizes[name] for name, _ in _AXIS.findall(mesh[2]))
    return 2
