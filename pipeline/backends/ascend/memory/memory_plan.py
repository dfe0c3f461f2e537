"""Device memory of a step: the place and purpose of every buffer, and whether all buffers fit.

If they don't, a message names the failing kernel, the largest tensors, and a batch that fits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.tasks import TaskGraph
from pipeline.backends.ascend.memory.placement import (
    Block,
    find_lifetimes,
    find_owners,
    pack_blocks,
    sum_live_bytes,
)
from pipeline.training.parallel.state_sharing import SHARDED_FIELDS, find_sharded_dimension

GIB = 2**30
TIGHT = 0.1
"""A plan that leaves less than this share of a budget free is tight."""

Pool = Literal["parameters", "feature maps", "communication"]
POOLS: tuple[Pool, ...] = get_args(Pool)
"""Pools of CANN's graph engine (GE). A chip of 32 GiB has 5, 26 and 1 GiB, in this order
(`variable_memory_max_size` and `graph_memory_max_size`)."""
Verdict = Literal["fits", "tight", "out of memory"]
Component = Literal[
    "parameters", "state", "gradients", "saved activations", "workspace and casts",
    "communication", "input", "constants",
]  # fmt: skip
"""Purposes of a buffer."""
COMPONENTS: tuple[Component, ...] = get_args(Component)
MIB = 2**20
BATCHED = ("activation", "input", "output")
"""Roles of buffers that may grow with the batch."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Place of a buffer in its pool, and the tasks that it lives through: `birth` .. `death - 1`.

    `nbytes` are aligned. On several devices all gradients have one common lifetime.
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
    """Bytes of a pool that a plan uses, and the pool's limit.

    `lower_bound_bytes` is the maximum over tasks of the bytes that are live.
    """

    pool: Pool
    used_bytes: int
    lower_bound_bytes: int
    limit_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Device memory of one step on one device.

    `live_bytes` has the bytes that are live during each task, in all pools. `peak_task` is the task
    with the most. `components` are the live bytes of that task by purpose. `has_one_pool` is
    whether parameters and feature maps share one (`join_pools`).
    """

    placements: tuple[Placement, ...]
    pools: Mapping[Pool, PoolUse]
    live_bytes: tuple[int, ...]
    peak_task: int
    components: Mapping[Component, int]
    has_one_pool: bool = False

    @property
    def used_bytes(self) -> int:
        """Bytes used in all pools."""
        return sum(pool.used_bytes for pool in self.pools.values())

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes that every placement of these lifetimes needs at least."""
        return sum(pool.lower_bound_bytes for pool in self.pools.values())

    @property
    def tightest(self) -> PoolUse:
        """The pool with the largest ratio of use to limit."""
        return max(self.pools.values(), key=lambda pool: pool.used_bytes / pool.limit_bytes)

    @property
    def verdict(self) -> Verdict:
        """Whether the plan fits; tight if less than a tenth of a pool is free."""
        share = self.tightest.used_bytes / self.tightest.limit_bytes
        if share > 1:
            return "out of memory"
        return "tight" if share > 1 - TIGHT else "fits"

    @property
    def fits_one_pool(self) -> bool:
        """Whether the plan fits a chip whose parameters and feature maps share one pool."""
        return self.join_pools().verdict != "out of memory"

    def join_pools(self) -> MemoryPlan:
        """Return the plan with parameters and feature maps in one pool, as large as both.

        Parameters may take all of it, and feature maps what these leave.
        """
        if self.has_one_pool:
            return self
        parameters, maps = self.pools["parameters"], self.pools["feature maps"]
        limit = parameters.limit_bytes + maps.limit_bytes
        left = limit - parameters.used_bytes
        changed: dict[Pool, PoolUse] = {
            "parameters": replace(parameters, limit_bytes=limit),
            "feature maps": replace(maps, limit_bytes=left) if left > 0 else maps,
        }
        return replace(self, pools={**self.pools, **changed}, has_one_pool=True)


@dataclass(frozen=True)
class _Chunk:
    """Adjacent buffers, with `guard_bytes` free at both ends."""

    buffers: Mapping[int, int]
    """Bytes of each buffer."""
    block: Block
    guard_bytes: int
    pool: Pool
    component: Component


def plan_memory(
    graph: TaskGraph, hw: Hardware, devices: int = 1, num_shards: int = 1
) -> MemoryPlan:
    """Place every buffer of a step: parameters and state permanently, the others by lifetime.

    On several devices all gradients are adjacent, with a guard of one alignment at both ends, as in
    MindSpore's communication memory. They are in the communication pool, or in the pool of feature
    maps if they don't fit.

    With several shards a device stores one part of each array that `parallel.mode=fsdp` shards.
    Whole parameters are among the feature maps, from the start to the last pass that reads them.
    """
    alignment = int(hw.memory_alignment_bytes)
    limits = _compute_pool_limits(hw)

    def align(nbytes: int) -> int:
        return -(-nbytes // alignment) * alignment

    lifetimes = find_lifetimes(graph).items()
    spans = {index: span for index, span in lifetimes if graph.buffers[index].nbytes}
    sizes = {index: align(graph.buffers[index].nbytes) for index in spans}
    chunks: list[_Chunk] = []
    owner = find_owners(graph)
    reduced = _find_gradients(graph, owner) if devices > 1 else []
    reduced = [index for index in reduced if index in spans]
    if reduced:
        nbytes = sum(sizes[index] for index in reduced) + 2 * alignment
        birth = min(spans[index][0] for index in reduced)
        death = max(spans[index][1] for index in reduced)
        fits = nbytes <= limits["communication"]
        pool: Pool = "communication" if fits else "feature maps"
        block = Block(nbytes, birth, death)
        gradients = {index: sizes[index] for index in reduced}
        chunks.append(_Chunk(gradients, block, alignment, pool, "communication"))
    # The forward pass writes these buffers and the backward pass reads them.
    forward = (task.writes for task in graph.tasks if task.phase == "forward")
    backward = (task.reads for task in graph.tasks if task.phase == "backward")
    saved = {owner[index] for indices in forward for index in indices}
    saved &= {owner[index] for indices in backward for index in indices}
    last_reads = {
        owner[index]: number
        for number, task in enumerate(graph.tasks)
        if task.phase in ("forward", "backward")
        for index in task.reads
    }
    for index, (birth, death) in spans.items():
        if index not in reduced:
            component = _classify_buffer(graph, index, saved)
            pool = "parameters" if component in ("parameters", "state") else "feature maps"
            nbytes = align(_count_part_bytes(graph, index, num_shards))
            if nbytes < sizes[index] and index in last_reads:
                whole = Block(sizes[index], 0, last_reads[index] + 1)
                chunks.append(_Chunk({index: sizes[index]}, whole, 0, "feature maps", component))
            block = Block(nbytes, birth, death)
            chunks.append(_Chunk({index: nbytes}, block, 0, pool, component))
    return _lay_out(chunks, max(len(graph.tasks), 1), limits)


def _lay_out(chunks: Sequence[_Chunk], num_tasks: int, limits: Mapping[Pool, int]) -> MemoryPlan:
    """Place the chunks of each pool, and return the plan."""
    placements: list[Placement] = []
    uses: dict[Pool, PoolUse] = {}
    live = np.zeros(num_tasks, np.int64)
    for pool in POOLS:
        in_pool = [chunk for chunk in chunks if chunk.pool == pool]
        blocks = tuple(chunk.block for chunk in in_pool)
        pool_bytes = sum_live_bytes(blocks, num_tasks)
        lower_bound = int(pool_bytes.max())
        packing = pack_blocks(blocks, lower_bound)
        uses[pool] = PoolUse(pool, packing.extent_bytes, lower_bound, limits[pool])
        live += pool_bytes
        for chunk, offset in zip(in_pool, packing.offsets, strict=True):
            start = offset + chunk.guard_bytes
            block = chunk.block
            for index, nbytes in chunk.buffers.items():
                placements.append(
                    Placement(index, pool, chunk.component, start, nbytes, block.birth, block.death)
                )
                start += nbytes
    peak = int(live.argmax())
    components = dict.fromkeys(COMPONENTS, 0)
    for chunk in chunks:
        if chunk.block.birth <= peak < chunk.block.death:
            components[chunk.component] += chunk.block.nbytes
    return MemoryPlan(
        placements=tuple(sorted(placements, key=lambda placed: placed.buffer)),
        pools=uses,
        live_bytes=tuple(live.tolist()),
        peak_task=peak,
        components=components,
    )


def _find_gradients(graph: TaskGraph, owner: Sequence[int]) -> list[int]:
    """Return the buffers of the gradients, each once, in the order of their tasks.

    Of a task that writes a gradient, the outputs with this role count, or all if none has it.
    """
    buffers: dict[int, None] = {}
    for _, _, writer in graph.gradients:
        writes = graph.tasks[writer].writes
        gradients = [index for index in writes if graph.buffers[index].role == "gradient"]
        buffers |= dict.fromkeys(owner[index] for index in gradients or writes)
    return list(buffers)


def _count_part_bytes(graph: TaskGraph, index: int, num_shards: int) -> int:
    """Return the bytes of an array of the state that each device stores."""
    buffer = graph.buffers[index]
    field, *path = buffer.name.split("/")
    # A feature's state is sharded if it has arrays like the parameters, under their paths, also as
    # a part of its state: features/average/conv_0/kernel, features/swa/evaluated/conv_0/kernel.
    parameters = {"/".join(["params", *path[start:]]) for start in (1, 2, 3)}
    is_like_params = field == "features" and any(
        other.name in parameters for other in graph.buffers
    )
    is_sharded = field in SHARDED_FIELDS or is_like_params
    if is_sharded and find_sharded_dimension(buffer.shape, num_shards) is not None:
        return buffer.nbytes // num_shards
    return buffer.nbytes


def _classify_buffer(graph: TaskGraph, index: int, saved: Collection[int]) -> Component:
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


def _compute_pool_limits(hw: Hardware) -> dict[Pool, int]:
    """Return the bytes of each pool, scaled down if they exceed the chip's memory."""
    split = (hw.parameter_memory_gib, hw.feature_map_memory_gib, hw.communication_memory_gib)
    scale = GIB * min(1.0, hw.hbm_gib / sum(split))
    return {pool: int(size * scale) for pool, size in zip(POOLS, split, strict=True)}


def explain_out_of_memory(plan: MemoryPlan, graph: TaskGraph, batch: int, devices: int) -> str:
    """Return the message for a plan whose verdict is "out of memory", in MindSpore's form.

    The message names the first kernel without memory and the size of its request, then the ten
    largest tensors that are live at the peak, and the largest batch size of a device that fits;
    `batch` is the size that doesn't.
    """
    pool = plan.tightest
    failing = _find_first_excess(plan, pool)
    lines = [
        f"Device(id:0) memory isn't enough: kernel name: {_name_writer(graph, failing)}, "
        f"alloc size: {failing.nbytes}B.",
        f"The step takes {_format_gib(pool.used_bytes)} of {_format_gib(pool.limit_bytes)} "
        f"({pool.pool}). "
        f"Live at its peak, in task {plan.peak_task + 1} of {len(plan.live_bytes)}: "
        + ", ".join(f"{name} {_format_gib(size)}" for name, size in plan.components.items() if size)
        + ".",
        "The largest tensors:",
    ]
    for placed in find_largest_tensors(plan):
        buffer = graph.buffers[placed.buffer]
        shape = "x".join(map(str, buffer.shape)) or "scalar"
        size = f"{placed.nbytes / MIB:.1f} MiB"
        lines.append(f"  {size:>12}  {buffer.name}  {shape}  {buffer.dtype}  {buffer.layout}")
    if plan.fits_one_pool:
        lines.append(
            "It fits into one pool for parameters and feature maps, as MindSpore has since 1.5 "
            "(device.software=mindspore_graph@2.0). With CANN's two pools:"
        )
    lines.append(_format_advice(batch, estimate_largest_batch(plan, graph, batch), devices))
    return "\n".join(lines)


def find_largest_tensors(plan: MemoryPlan) -> list[Placement]:
    """Return the ten largest buffers that are live at the peak, by size, then index."""
    peak = plan.peak_task
    live = [placed for placed in plan.placements if placed.birth <= peak < placed.death]
    return sorted(live, key=lambda placed: (-placed.nbytes, placed.buffer))[:10]


def estimate_largest_batch(plan: MemoryPlan, graph: TaskGraph, batch: int) -> int:
    """Return the largest batch size that fits, estimated from a plan for `batch`; 0 if none fits.

    Some feature maps at the peak grow with the batch, all other memory is fixed:
    floor(batch * (1 + (limit - used) / growing)). `growing` is the bytes of these maps, scaled by
    used / lower bound to include gaps. The estimate is good if the peak stays in the same task.
    """
    pool = plan.pools["feature maps"]
    if any(use.used_bytes > use.limit_bytes for use in plan.pools.values() if use is not pool):
        return 0
    growing = _sum_growing_bytes(plan, graph, batch)
    if not growing:
        return batch if pool.used_bytes <= pool.limit_bytes else 0
    growing = growing * pool.used_bytes // pool.lower_bound_bytes
    return max(batch + batch * (pool.limit_bytes - pool.used_bytes) // growing, 0)


def _sum_growing_bytes(plan: MemoryPlan, graph: TaskGraph, batch: int) -> int:
    """Return the bytes of live buffers at the peak whose first axis is a multiple of the batch."""
    batched = _find_batched(graph)
    # Buffers of which a scan reads or writes slices; their batch may be the first or second axis.
    stacked = {buffer.within for buffer in graph.buffers}
    nbytes = 0
    for placed in plan.placements:
        buffer = graph.buffers[placed.buffer]
        axes = buffer.shape[: 2 if placed.buffer in stacked else 1]
        has_batch = any(size % batch == 0 for size in axes)
        is_live = placed.birth <= plan.peak_task < placed.death
        if is_live and has_batch and buffer.role in BATCHED and placed.buffer in batched:
            nbytes += placed.nbytes
    return nbytes


def _find_batched(graph: TaskGraph) -> set[int]:
    """Return the buffers of the forward and backward passes that depend on the batch.

    Neither casts of weights nor buffers of updates are among them.
    """
    owner = find_owners(graph)
    batched = {owner[index] for index in graph.inputs}
    for task in graph.tasks:
        in_network = task.phase in ("forward", "backward")
        depends = in_network and any(owner[index] in batched for index in task.reads)
        if task.phase == "data" or depends:
            batched.update(owner[index] for index in task.writes)
    return batched


def _find_first_excess(plan: MemoryPlan, pool: PoolUse) -> Placement:
    """Return the largest buffer that is born in the first task whose live bytes exceed the limit.

    If the pool exceeds its limit only by gaps, return the largest buffer that ends above the limit.
    """
    in_pool = [placed for placed in plan.placements if placed.pool == pool.pool]
    blocks = [Block(placed.nbytes, placed.birth, placed.death) for placed in in_pool]
    over = (sum_live_bytes(blocks, len(plan.live_bytes)) > pool.limit_bytes).nonzero()[0]
    born = [placed for placed in in_pool if over.size and placed.birth == over[0]]
    limit = pool.limit_bytes
    above_limit = [placed for placed in in_pool if placed.offset_bytes + placed.nbytes > limit]
    return max(born or above_limit or in_pool, key=lambda placed: (placed.nbytes, -placed.buffer))


def _name_writer(graph: TaskGraph, placed: Placement) -> str:
    """Return the name `scope/Type-op3` of the task that writes a buffer, or an input's name."""
    owner = find_owners(graph)
    for position, task in enumerate(graph.tasks):
        if placed.buffer in (owner[index] for index in task.writes):
            return f"{task.scope or 'Default'}/{task.type}-op{position}"
    return graph.buffers[placed.buffer].name


def _format_advice(batch: int, fits: int, devices: int) -> str:
    per_device = f" on each of {devices} devices" if devices > 1 else ""
    request = f"(requested: {batch}{per_device})"
    if fits < 1:
        return f"No batch size fits {request}: memory that doesn't depend on it is too large."
    override = f", train.batch_size={fits * devices}," if devices > 1 else ""
    return f"A batch of {fits}{per_device}{override} should fit {request}."


def _format_gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
