"""The message for a step that doesn't fit: the failing kernel, the largest tensors, what fits."""

from __future__ import annotations

from pipeline.backends.ascend.chip.tasks import TaskGraph
from pipeline.backends.ascend.memory.memory_plan import GIB, Limit, MemoryPlan, Placement
from pipeline.backends.ascend.memory.placement import Block, live_bytes, owners

MIB = 2**20
BATCHED = ("activation", "input", "output")


def out_of_memory_message(
    plan: MemoryPlan,
    graph: TaskGraph,
    *,
    batch: int | None = None,
    devices: int = 1,
    device_id: int = 0,
) -> str:
    """Return the message for a plan whose verdict is "out of memory", in MindSpore's manner.

    It names the first kernel that gets no memory and the size of its request, then the ten largest
    tensors that are live at the peak and, for a known batch size, the largest that should fit;
    `batch` is of each of the `devices`.
    """
    limit = plan.tightest
    victim = _first_beyond(plan, limit)
    lines = [
        f"Device(id:{device_id}) memory isn't enough: kernel name: {_maker(graph, victim)}, "
        f"alloc size: {victim.nbytes}B.",
        f"The step takes {_gib(limit.used_bytes)} of {_gib(limit.limit_bytes)} ({limit.what}). "
        f"Live at its peak, in task {plan.peak_task + 1} of {len(plan.live_bytes)}: "
        + ", ".join(f"{name} {_gib(size)}" for name, size in plan.components.items() if size)
        + ".",
        "The largest tensors there:",
    ]
    for placed in largest_tensors(plan):
        buffer = graph.buffers[placed.buffer]
        shape = "x".join(map(str, buffer.shape)) or "scalar"
        size = f"{placed.nbytes / MIB:.1f} MiB"
        lines.append(f"  {size:>12}  {buffer.name}  {shape}  {buffer.dtype}  {buffer.layout}")
    if batch is not None:
        lines.append(_advise(batch, largest_batch(plan, graph, batch), devices))
    return "\n".join(lines)


def largest_tensors(plan: MemoryPlan, count: int = 10) -> list[Placement]:
    """Return the largest buffers that are live at the peak, by size, then index."""
    live = [p for p in plan.placements if p.birth <= plan.peak_task < p.death]
    return sorted(live, key=lambda placed: (-placed.nbytes, placed.buffer))[:count]


def largest_batch(plan: MemoryPlan, graph: TaskGraph, batch: int) -> int:
    """Return the largest batch size that fits, estimated from a plan for `batch`; 0 for none.

    A part of the feature maps at the peak grows with the batch, the rest of the plan does not:
    floor(batch * (1 + (limit - used) / growing)), where `growing` has its share of the pool's
    fragmentation. The estimate is good if the peak stays in the same task.
    """
    limits = {limit.what: limit for limit in plan.limits}
    limit = limits.pop("feature maps")
    if any(fixed.used_bytes > fixed.limit_bytes for fixed in limits.values()):
        return 0
    growing = _growing_bytes(plan, graph, batch)
    if not growing:
        return batch if limit.used_bytes <= limit.limit_bytes else 0
    pool = plan.pools["feature maps"]
    growing = growing * pool.used_bytes // pool.lower_bound_bytes
    return max(batch + batch * (limit.limit_bytes - limit.used_bytes) // growing, 0)


def _growing_bytes(plan: MemoryPlan, graph: TaskGraph, batch: int) -> int:
    """Return the bytes live at the peak that depend on the inputs and have the batch as first axis.

    In a scan's stacked outputs the batch is the second axis.
    """
    batched = _reached_by_inputs(graph)
    stacked = {buffer.within for buffer in graph.buffers}
    nbytes = 0
    for placed in plan.placements:
        buffer = graph.buffers[placed.buffer]
        axes = buffer.shape[: 2 if placed.buffer in stacked else 1]
        leads = any(size % batch == 0 for size in axes)
        live = placed.birth <= plan.peak_task < placed.death
        if live and leads and buffer.role in BATCHED and placed.buffer in batched:
            nbytes += placed.nbytes
    return nbytes


def _reached_by_inputs(graph: TaskGraph) -> set[int]:
    """Return values of the forward and backward passes that depend on the batch.

    No cast of a weight and no update is among them.
    """
    owner = owners(graph)
    reached = {owner[index] for index in graph.inputs}
    for task in graph.tasks:
        of_network = task.phase in ("forward", "backward")
        if task.phase == "data" or (of_network and any(owner[i] in reached for i in task.reads)):
            reached.update(owner[index] for index in task.writes)
    return reached


def _first_beyond(plan: MemoryPlan, limit: Limit) -> Placement:
    """Return the largest buffer of the first task during which more is live than the limit allows.

    If only gaps are too much, the largest buffer that ends above the limit.
    """
    inside = [placed for placed in plan.placements if placed.pool == limit.what]
    blocks = [Block(placed.nbytes, placed.birth, placed.death) for placed in inside]
    over = (live_bytes(blocks, len(plan.live_bytes)) > limit.limit_bytes).nonzero()[0]
    asking = [placed for placed in inside if over.size and placed.birth == over[0]]
    beyond = [p for p in inside if p.offset_bytes + p.nbytes > limit.limit_bytes]
    return max(asking or beyond or inside, key=lambda placed: (placed.nbytes, -placed.buffer))


def _maker(graph: TaskGraph, placed: Placement) -> str:
    """Return the task that writes a buffer as `scope/Type-op3`; an input by its name."""
    owner = owners(graph)
    for position, task in enumerate(graph.tasks):
        if placed.buffer in (owner[index] for index in task.writes):
            return f"{task.scope or 'Default'}/{task.type}-op{position}"
    return graph.buffers[placed.buffer].name


def _advise(batch: int, fits: int, devices: int) -> str:
    per_device = f" on each of {devices} devices" if devices > 1 else ""
    request = f"(asked for: {batch}{per_device})"
    if fits < 1:
        return f"No batch size fits {request}: what doesn't grow with it is too large."
    override = f", train.batch_size={fits * devices}," if devices > 1 else ""
    return f"A batch of {fits}{per_device}{override} should fit {request}."


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
