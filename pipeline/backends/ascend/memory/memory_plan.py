"""Device memory of a step: the place and purpose of every buffer, and whether all fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.tasks import TaskGraph
from pipeline.backends.ascend.memory.lifetimes import Lifetime, lifetimes, owners
from pipeline.backends.ascend.memory.placement import Block, find_overlap, live_bytes, pack

GIB = 2**30
TIGHT = 0.1
"""A plan that leaves less than this share of a budget free is tight."""

Pool = Literal["parameters", "feature maps", "communication"]
POOLS: tuple[Pool, ...] = get_args(Pool)
Budget = Literal["split", "pooled_30", "pooled_31"]
"""split: GE's pools of 5, 26 and 1 of 32 GiB (CANN `variable_memory_max_size`,
`graph_memory_max_size`); pooled_30: all but 2 GiB in one pool, MindSpore r1.5's default;
pooled_31: all but a 16th and at most 1 GiB, later MindSpore (ascend_memory_adapter.cc)."""
Verdict = Literal["fits", "tight", "out of memory"]
Component = Literal[
    "parameters",
    "state",
    "gradients",
    "saved activations",
    "workspace and casts",
    "communication",
    "input",
    "constants",
]
COMPONENTS: tuple[Component, ...] = get_args(Component)


@dataclass(frozen=True, slots=True)
class Placement:
    """Place of a buffer in its pool, and its tasks: `birth` .. `death - 1`.

    `nbytes` are aligned. Gradients that are all-reduced together have the lifetime of them all.
    """

    buffer: int
    pool: Pool
    component: Component
    offset_bytes: int
    nbytes: int
    birth: int
    death: int


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Bytes that a plan takes of a pool; `lower_bound_bytes` are the most that live at once."""

    used_bytes: int
    lower_bound_bytes: int


@dataclass(frozen=True, slots=True)
class Limit:
    """Used and available bytes of one pool, or of all together."""

    what: str
    used_bytes: int
    limit_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Device memory of one step on one device.

    `live_bytes` has the bytes live during each task, all pools together, `peak_task` where they are
    most; `components` divide them by purpose.
    """

    placements: tuple[Placement, ...]
    pools: Mapping[Pool, PoolUse]
    limits: tuple[Limit, ...]
    live_bytes: tuple[int, ...]
    peak_task: int
    components: Mapping[Component, int]

    @property
    def used_bytes(self) -> int:
        """Bytes that the pools take."""
        return sum(pool.used_bytes for pool in self.pools.values())

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes that any placement of these lifetimes takes at least."""
        return sum(pool.lower_bound_bytes for pool in self.pools.values())

    @property
    def fragmentation(self) -> float:
        """Excess of the plan over its lower bound, as a share."""
        return self.used_bytes / self.lower_bound_bytes - 1 if self.lower_bound_bytes else 0.0

    @property
    def tightest(self) -> Limit:
        """The limit that is nearest to full, or furthest exceeded."""
        return max(self.limits, key=lambda limit: limit.used_bytes / limit.limit_bytes)

    @property
    def verdict(self) -> Verdict:
        """Whether the plan fits; tight if less than a tenth is free."""
        share = self.tightest.used_bytes / self.tightest.limit_bytes
        if share > 1:
            return "out of memory"
        return "tight" if share > 1 - TIGHT else "fits"

    def verify(self) -> None:
        """Check independently that no two live buffers overlap.

        Raises AssertionError that names the two.
        """
        for pool in POOLS:
            inside = [placed for placed in self.placements if placed.pool == pool]
            blocks = tuple(Block(p.nbytes, p.birth, p.death) for p in inside)
            pair = find_overlap(blocks, tuple(p.offset_bytes for p in inside))
            if pair is not None:
                one, other = (inside[index] for index in pair)
                raise AssertionError(f"{pool}: {one} and {other} are live together and overlap")


@dataclass(frozen=True)
class _Chunk:
    """Buffers side by side, with `guard_bytes` free at both ends."""

    members: tuple[int, ...]
    block: Block
    guard_bytes: int
    pool: Pool
    component: Component


def plan_memory(
    graph: TaskGraph,
    hw: Hardware,
    devices: int = 1,
    *,
    budget: Budget = "split",
    buckets: Sequence[Sequence[int]] | None = None,
) -> MemoryPlan:
    """Place every buffer of a step: parameters and state permanently, the rest by lifetime.

    On several devices, gradients that are all-reduced together lie side by side, with a guard of
    one alignment at both ends (as MindSpore allocates communication memory); `buckets` has the
    positions in `graph.gradients` of each all-reduce, None: all in one. A bucket lies in the
    communication pool, or with the feature maps where that has no room left for it.
    """
    unit = int(hw.memory_alignment_bytes)
    lives = {i: life for i, life in lifetimes(graph).items() if graph.buffers[i].nbytes}
    sizes = {index: -(-graph.buffers[index].nbytes // unit) * unit for index in lives}
    groups = _buckets(graph, lives, buckets) if devices > 1 else []
    room = _pool_limits(hw)["communication"]
    chunks = [*_fused(groups, lives, sizes, unit, room)]
    chunks += _single(graph, lives, sizes, {index for group in groups for index in group})
    plan = _lay_out(chunks, sizes, max(len(graph.tasks), 1), hw, budget)
    plan.verify()
    return plan


def _lay_out(
    chunks: Sequence[_Chunk], sizes: Mapping[int, int], tasks: int, hw: Hardware, budget: Budget
) -> MemoryPlan:
    placements: list[Placement] = []
    uses: dict[Pool, PoolUse] = {}
    live = np.zeros(tasks, np.int64)
    for pool in POOLS:
        inside = [chunk for chunk in chunks if chunk.pool == pool]
        blocks = tuple(chunk.block for chunk in inside)
        held = live_bytes(blocks, tasks)
        packing = pack(blocks, int(held.max()))
        uses[pool] = PoolUse(packing.extent_bytes, int(held.max()))
        live += held
        for chunk, offset in zip(inside, packing.offsets, strict=True):
            placements += _placements(chunk, offset, sizes)
    peak = int(live.argmax())
    return MemoryPlan(
        placements=tuple(sorted(placements, key=lambda placed: placed.buffer)),
        pools=uses,
        limits=_limits(hw, uses, budget),
        live_bytes=tuple(live.tolist()),
        peak_task=peak,
        components=_components(chunks, peak),
    )


def _buckets(
    graph: TaskGraph, lives: Collection[int], buckets: Sequence[Sequence[int]] | None
) -> list[tuple[int, ...]]:
    """Return the buffers of each all-reduce, in the order in which the gradients are computed."""
    positions = [range(len(graph.gradients))] if buckets is None else buckets
    owner = owners(graph)
    taken: set[int] = set()
    groups = []
    for bucket in positions:
        written = (owner[i] for at in bucket for i in _gradient_buffers(graph, at))
        group = [i for i in dict.fromkeys(written) if i in lives and i not in taken]
        taken.update(group)
        groups += [tuple(group)] if group else []
    return groups


def _gradient_buffers(graph: TaskGraph, position: int) -> Sequence[int]:
    """Return the gradient's own buffers among the outputs of the task that computes it."""
    task = graph.tasks[graph.gradients[position][2]]
    return [i for i in task.writes if graph.buffers[i].role == "gradient"] or task.writes


def _fused(
    groups: Iterable[tuple[int, ...]],
    lives: Mapping[int, Lifetime],
    sizes: Mapping[int, int],
    guard: int,
    room: int,
) -> Iterator[_Chunk]:
    for group in groups:
        nbytes = sum(sizes[index] for index in group) + 2 * guard
        birth = min(lives[index][0] for index in group)
        death = max(lives[index][1] for index in group)
        pool: Pool = "communication" if nbytes <= room else "feature maps"
        room -= nbytes if pool == "communication" else 0
        yield _Chunk(group, Block(nbytes, birth, death), guard, pool, "communication")


def _single(
    graph: TaskGraph,
    lives: Mapping[int, Lifetime],
    sizes: Mapping[int, int],
    fused: Collection[int],
) -> Iterator[_Chunk]:
    saved = _saved(graph)
    for index, (birth, death) in lives.items():
        if index in fused:
            continue
        component = _component(graph, index, saved)
        pool: Pool = "parameters" if component in ("parameters", "state") else "feature maps"
        yield _Chunk((index,), Block(sizes[index], birth, death), 0, pool, component)


def _saved(graph: TaskGraph) -> set[int]:
    """Return buffers that the forward pass writes and the backward pass reads."""
    owner = owners(graph)
    written = {owner[i] for task in graph.tasks if task.phase == "forward" for i in task.writes}
    used = {owner[i] for task in graph.tasks if task.phase == "backward" for i in task.reads}
    return written & used


def _component(graph: TaskGraph, index: int, saved: Collection[int]) -> Component:
    role = graph.buffers[index].role
    if role == "parameter" or index in graph.parameters:
        return "parameters"
    if role == "state" or index in graph.state:
        return "state"
    if role == "input" or index in graph.inputs:
        return "input"
    if role in ("gradient", "constant"):
        return "gradients" if role == "gradient" else "constants"
    return "saved activations" if index in saved else "workspace and casts"


def _placements(chunk: _Chunk, offset: int, sizes: Mapping[int, int]) -> Iterator[Placement]:
    offset += chunk.guard_bytes
    birth, death = chunk.block.birth, chunk.block.death
    for index in chunk.members:
        yield Placement(index, chunk.pool, chunk.component, offset, sizes[index], birth, death)
        offset += sizes[index]


def _components(chunks: Iterable[_Chunk], peak: int) -> dict[Component, int]:
    """Return the bytes live at the peak, by purpose."""
    total = dict.fromkeys(COMPONENTS, 0)
    for chunk in chunks:
        if chunk.block.birth <= peak < chunk.block.death:
            total[chunk.component] += chunk.block.nbytes
    return total


def _pool_limits(hw: Hardware) -> dict[Pool, int]:
    """Return the chip's split; scaled down where its memory is smaller than the three pools."""
    split = (hw.parameter_memory_gib, hw.feature_map_memory_gib, hw.communication_memory_gib)
    scale = GIB * min(1.0, hw.hbm_gib / sum(split))
    return {pool: int(size * scale) for pool, size in zip(POOLS, split, strict=True)}


def _limits(hw: Hardware, uses: Mapping[Pool, PoolUse], budget: Budget) -> tuple[Limit, ...]:
    if budget == "split":
        limits = _pool_limits(hw)
        return tuple(Limit(pool, uses[pool].used_bytes, limits[pool]) for pool in POOLS)
    kept_gib = hw.hbm_gib / 16 if budget == "pooled_30" else min(hw.hbm_gib / 16, 1.0)
    used = sum(use.used_bytes for use in uses.values())
    return (Limit("device memory", used, int((hw.hbm_gib - kept_gib) * GIB)),)
