"""Join kernels that read the same values, and order all kernels.

A kernel's level is one above the highest level of its producers. A join puts two kernels on one
level, and is allowed only if all other kernels can keep their levels, so that no kernel waits for
itself.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Literal

from pipeline.backends.ascend.chip.tasks import Phase

SMALL_ELEMENTS = 16384
"""Values of up to this many elements, 64 KiB in float32, are computed again, not stored."""

FUSABLE = ("elementwise", "rows")
"""Kinds of nodes that share a kernel with others. A node of kind "reduce" can end such a kernel."""

Form = Literal["elementwise", "rows", "reduce", "update", "random", "single"]


@dataclass(eq=False)
class Kernel:
    """Nodes that run together, and the values (indices) that they read and write.

    `form` is "update" for an op of an optimizer whose ops aren't fused, "random" for an op that
    draws numbers, "single" for one node that isn't fused: these join no other kernels.
    `roots` are the values written to memory, `sources` the values read, in the order of first use.
    `elements` is the size of the largest value. `loop`, `repeat` and `call` are as in `Node`, but
    `call` is None if kernels may join several calls.
    """

    form: Form
    phase: Phase
    roots: list[int]
    nodes: list[int]
    sources: list[int]
    elements: int
    loop: int
    repeat: int
    scope: str = ""
    level: int = 0
    call: Hashable = None

    @property
    def position(self) -> int:
        """Position of the last node in program order."""
        return max(self.nodes)


def join_kernels(kernels: list[Kernel], is_large: Callable[[int], bool]) -> list[Kernel]:
    """Return the kernels, joined as the device joins them, in the order in which they run."""
    levels: dict[int, int] = {}
    for kernel in kernels:
        kernel.level = 1 + max((levels.get(index, 0) for index in kernel.sources), default=0)
        levels.update(dict.fromkeys(kernel.roots, kernel.level))
    joins = _Joins(_merge_kernels(kernels, is_large))
    joins.join_statistics()
    joins.join_updates()
    return _sort_kernels(joins.kernels)


def _merge_kernels(kernels: list[Kernel], is_large: Callable[[int], bool]) -> list[Kernel]:
    """Join kernels of the same size if one reads all that the other reads.

    `is_large` returns whether a value is too large to be computed again.
    """
    leader: dict[tuple[object, ...], Kernel] = {}
    merged: list[Kernel] = []
    for kernel in kernels:
        if kernel.form in ("update", "random", "single"):
            merged.append(kernel)
            continue
        form = "reduce" if kernel.form == "reduce" else "elementwise"
        keys = [
            (form, kernel.phase, kernel.level, kernel.loop, kernel.elements, kernel.call, index)
            for index in kernel.sources
            if is_large(index) or kernel.elements <= SMALL_ELEMENTS
        ]
        hosts = (leader[key] for key in keys if key in leader)
        host = next((host for host in hosts if _has_nested_sources(host, kernel, is_large)), None)
        if host is None:
            merged.append(kernel)
            host = kernel
        else:
            _join(host, kernel)
        leader.update(dict.fromkeys(keys, host))
    return merged


def _has_nested_sources(kernel: Kernel, other: Kernel, is_large: Callable[[int], bool]) -> bool:
    """Return whether the large sources of one kernel are all sources of the other.

    Two normalisations that share a gradient aren't joined, as each reads another feature map.
    """
    large = set(filter(is_large, kernel.sources))
    other_large = set(filter(is_large, other.sources))
    return large <= other_large or other_large <= large


def _join(host: Kernel, guest: Kernel) -> None:
    host.roots += guest.roots
    host.nodes = list(dict.fromkeys([*host.nodes, *guest.nodes]))
    sources = dict.fromkeys([*host.sources, *guest.sources])
    host.sources = [index for index in sources if index not in host.roots]
    host.form = "rows" if "rows" in (host.form, guest.form) else host.form
    guest.level = host.level


class _Joins:
    """Joins of kernels on different levels."""

    def __init__(self, kernels: list[Kernel]) -> None:
        self.kernels = kernels
        self.maker = {root: kernel for kernel in kernels for root in kernel.roots}
        self.readers: dict[int, list[Kernel]] = defaultdict(list)
        for kernel in kernels:
            for index in kernel.sources:
                self.readers[index].append(kernel)

    def _can_join(self, host: Kernel, guest: Kernel) -> bool:
        """Return whether the guest can have the host's level while all others keep theirs."""
        if host is guest or host.loop != guest.loop or host.phase != guest.phase:
            return False
        if guest.level < host.level:
            readers = (reader for root in guest.roots for reader in self.readers[root])
            return all(reader is host or reader.level > host.level for reader in readers)
        makers = (self.maker[index] for index in guest.sources if index in self.maker)
        return all(maker is host or maker.level < host.level for maker in makers)

    def _join(self, host: Kernel, guest: Kernel) -> None:
        for root in guest.roots:
            self.maker[root] = host
        for index in guest.sources:
            self.readers[index].append(host)
        _join(host, guest)

    def join_statistics(self) -> None:
        """Join small kernels that read a normalisation's sums with the normalisation.

        Examples are the updates of running means and the gradient of a scale.
        """
        sums = (kernel.roots for kernel in self.kernels if kernel.form == "reduce")
        reduced = {root for roots in sums for root in roots}
        hosts: dict[tuple[str, int], Kernel] = {}
        for kernel in reversed(self.kernels):
            if _is_fusable(kernel) and kernel.elements > SMALL_ELEMENTS:
                shared = reduced.intersection(kernel.sources)
                hosts.update({(kernel.phase, index): kernel for index in shared})
        unjoined = []
        for kernel in self.kernels:
            is_small = _is_fusable(kernel) and kernel.elements <= SMALL_ELEMENTS
            joinable = (hosts.get((kernel.phase, index)) for index in kernel.sources if is_small)
            host = next((host for host in joinable if host is not None), None)
            if host is not None and host.call == kernel.call and self._can_join(host, kernel):
                self._join(host, kernel)
            else:
                unjoined.append(kernel)
        self.kernels = unjoined

    def join_updates(self) -> None:
        """Join the kernels of an optimizer for one parameter: ApplyAdam also writes the moments."""
        joined: set[int] = set()
        for kernel in self.kernels:
            if kernel.phase != "optimizer" or kernel.form != "elementwise":
                continue
            hosts = self._find_moments(kernel)
            if not hosts or any(host.loop != kernel.loop for host in hosts):
                continue
            makers = (self.maker[index] for index in kernel.sources if index in self.maker)
            if all(maker in hosts or maker.level < hosts[0].level for maker in makers):
                for guest in (*hosts[1:], kernel):
                    self._join(hosts[0], guest)
                    joined.add(id(guest))
        self.kernels = [kernel for kernel in self.kernels if id(kernel) not in joined]

    def _find_moments(self, kernel: Kernel) -> list[Kernel]:
        """Return the optimizer's kernels of the same size, on one level, that an update reads."""
        makers = {
            id(maker): maker
            for maker in (self.maker.get(index) for index in kernel.sources)
            if maker is not None
            and maker.phase == "optimizer"
            and maker.form == "elementwise"
            and maker.elements == kernel.elements
        }
        hosts = list(makers.values())
        return [host for host in hosts if host.level == hosts[-1].level]


def _is_fusable(kernel: Kernel) -> bool:
    """Return whether `join_statistics` may join a kernel."""
    return kernel.form in FUSABLE and kernel.phase in ("forward", "backward")


def _sort_kernels(kernels: list[Kernel]) -> list[Kernel]:
    """Return the kernels in program order, each after the producers of its inputs."""
    maker = {root: place for place, kernel in enumerate(kernels) for root in kernel.roots}
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for place, kernel in enumerate(kernels):
        makers = {maker[index] for index in kernel.sources if index in maker}
        sorter.add(place, *(makers - {place}))
    sorter.prepare()
    ready: list[tuple[int, int]] = []
    ordered = []
    while sorter.is_active():
        for place in sorter.get_ready():
            heapq.heappush(ready, (kernels[place].position, place))
        place = heapq.heappop(ready)[1]
        ordered.append(kernels[place])
        sorter.done(place)
    return ordered
