"""Time of the vector unit's kernels at the hardware's rates, by the bound of their class."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.tasks import (
    CHANNEL_BLOCK,
    Buffer,
    CubeWork,
    Permutation,
    Task,
    permutation_of,
)
from pipeline.backends.ascend.cost.efficiency import Constants
from pipeline.backends.ascend.cost.l2_cache import Traffic
from pipeline.backends.ascend.cost.tiling import Tiling
from pipeline.core.host.item_sizes import item_bytes

Bound = Literal["cube", "vector", "memory", "l2", "floor", "ai_cpu", "link"]
BLOCK_BYTES = 32
"""The unit of a transfer between memory and a core's buffers (INI-A: ubblock_size)."""

UNIFIED_BUFFER_BYTES = 256 * 1024
"""The vector unit's buffer of a core (INI-A)."""

BIAS_CHANNELS_PER_CORE = 8
"""Sums of float32 in a block of 32 bytes."""

FLOAT16_BYTES = 2
CONVERSIONS = 2
"""To float32 and back."""

NORMALISATION_PASSES = 3.0
"""Operations for each element of a batch normalisation kernel. Scale and shift are one multiply-add
with numbers of the channel, as are the sums; the backward pass has two and a mask."""


@dataclass(frozen=True, slots=True)
class Work:
    """Time of a task beyond its floor at the hardware's rates, and its bound."""

    us: float
    bound: Bound
    cores: float


@dataclass(frozen=True, slots=True)
class CostContext:
    """Inputs of one task's price besides the task itself. `tiles` are by index of the task."""

    hw: Hardware
    constants: Constants
    buffers: tuple[Buffer, ...]
    tiles: Mapping[int, Tiling]


def join(*parts_us: float, power: float) -> float:
    """Return the p-norm of parallel parts: their sum at power 1, the largest at infinity."""
    largest = max(parts_us)
    if largest <= 0:
        return 0.0
    return float(largest * sum((part / largest) ** power for part in parts_us) ** (1 / power))


def vector_work(task: Task, traffic: Traffic, context: CostContext) -> Work:
    """Return the work of any task of the vector unit but products."""
    return WORK_BY_CLASS.get(task.cost_class, _streaming_work)(task, traffic, context)


def vector_product(work: CubeWork, hw: Hardware) -> Work:
    """Return the work of float32 products: 16 rows a core at the rate of one core's vector unit.

    The trace of 2020 has them on one core where there are 2 rows, on all for 4096.
    """
    parts = work.batch * math.ceil(work.m / CHANNEL_BLOCK)
    cores = min(hw.ai_cores_count, parts)
    macs = math.ceil(parts / cores) * min(work.m, CHANNEL_BLOCK) * work.k * work.n
    return Work(macs / (hw.fp32_matmul_gmacs_per_s * 1e3), "vector", cores)


def depthwise_work(work: CubeWork, traffic: Traffic, context: CostContext) -> Work:
    """Return the work of depthwise convolutions: a lane of the vector unit for each multiply-add.

    The lanes in use are those of any vector kernel (`vector_rate`): the taps of a row are as many
    passes over it.
    """
    lane_bytes = work.macs * item_bytes(work.dtype)
    lanes_us = lane_bytes / (context.hw.vector_bytes_per_us * context.constants.vector_rate)
    return _joined(lanes_us, traffic, context, context.hw.ai_cores_count)


def _streaming_work(task: Task, traffic: Traffic, context: CostContext) -> Work:
    """Return the work of a stream: lanes of the vector unit beside the traffic."""
    return _joined(_lanes_us(task, context), traffic, context, _cores(traffic, context))


def _joined(lanes_us: float, traffic: Traffic, context: CostContext, cores: float) -> Work:
    """Return the joined time: reads and writes alternate at the cores' ports, lanes run beside
    them.
    """
    hw, constants = context.hw, context.constants
    hbm_us = traffic.hbm_bytes / (hw.hbm_bytes_per_us * constants.hbm_read)
    hbm_us += traffic.write_bytes / (hw.hbm_bytes_per_us * constants.hbm_write)
    l2_bytes_per_us = hw.ai_cores_count * hw.ai_core_clock_mhz * hw.l2_read_bytes_per_cycle
    l2_us = traffic.l2_bytes / l2_bytes_per_us
    us = join(lanes_us, hbm_us + l2_us, power=constants.vector_overlap)
    # A kernel on few cores is held up at their own ports.
    port_bytes_per_us = cores * hw.core_bytes_per_cycle * hw.ai_core_clock_mhz
    us = max(us, max(traffic.read_bytes, traffic.write_bytes) / port_bytes_per_us)
    stages: tuple[tuple[float, Bound], ...] = (
        (lanes_us, "vector"),
        (hbm_us, "memory"),
        (l2_us, "l2"),
    )
    return Work(us, max(stages)[1], cores)


def _lanes_us(task: Task, context: CostContext) -> float:
    """Return the time of the vector unit's lanes.

    Kernels that divide, or take roots or exponentials, do so in float32, with a conversion on the
    way in and out: dividing 4.9 million float16 takes 48 us in the trace of 2023, subtracting 21.
    """
    work, constants = task.vector, context.constants
    if work is None:
        return 0.0
    passes = work.simple + constants.heavy_operations * work.heavy
    nbytes = max(item_bytes(work.dtype), FLOAT16_BYTES)
    if task.cost_class in ("bn_reduce", "bn_update"):
        passes = min(passes, NORMALISATION_PASSES)
    elif work.heavy and nbytes == FLOAT16_BYTES:
        passes, nbytes = passes + CONVERSIONS, 2 * FLOAT16_BYTES
    lane_bytes = work.elements * nbytes * passes
    return lane_bytes / (context.hw.vector_bytes_per_us * constants.vector_rate)


def _cores(traffic: Traffic, context: CostContext) -> float:
    wanted = math.ceil(max(traffic.read_bytes, traffic.write_bytes) / context.constants.core_bytes)
    return min(context.hw.ai_cores_count, max(wanted, 1))


def _cycles_us(chunks: float, cores: float, cycles_each: float, hw: Hardware) -> float:
    """Return the time of equal chunks of work on the cores, one after another on each."""
    return math.ceil(chunks / cores) * cycles_each / hw.ai_core_clock_mhz


def _bias_grad_work(task: Task, traffic: Traffic, context: CostContext) -> Work:
    """Return the work of a bias gradient: a matrix is streamed, a feature map walked by channel.

    The walk is by image and channel.
    """
    source = context.buffers[task.reads[0]]
    if len(source.shape) <= 2:
        return _streaming_work(task, traffic, context)
    channels = max(math.prod(context.buffers[task.writes[0]].shape), 1)
    segments = source.shape[0] * channels
    segment_bytes = traffic.read_bytes / segments
    cores = _bias_cores(channels, source.shape[0], segment_bytes, context.hw)
    constants = context.constants
    each = constants.bias_segment_cycles + segment_bytes / constants.bias_bytes_per_cycle
    return _joined(_cycles_us(segments, cores, each, context.hw), traffic, context, cores)


def _reduce_work(task: Task, traffic: Traffic, context: CostContext) -> Work:
    """Return the work of a sum: a stream, but for means over the planes of plain feature maps.

    Those, of squeeze-and-excitation in eager frameworks, walk one image and channel after another
    as a bias gradient does, whose kernels the trace of 2023 has; blocks of channels stream.
    """
    maps = [context.buffers[index] for index in task.reads]
    source = max(maps, key=lambda buffer: math.prod(buffer.shape), default=None)
    if source is None or source.layout != "ND" or len(source.shape) != 4:
        return _streaming_work(task, traffic, context)
    planes = math.prod(source.shape[:2])
    sums = math.prod(context.buffers[task.writes[0]].shape)
    if sums != planes or math.prod(source.shape) == sums:
        return _streaming_work(task, traffic, context)
    constants = context.constants
    each = constants.bias_segment_cycles
    each += traffic.read_bytes / planes / constants.bias_bytes_per_cycle
    cores = min(context.hw.ai_cores_count, planes)
    return _joined(_cycles_us(planes, cores, each, context.hw), traffic, context, cores)


def _bias_cores(channels: int, images: int, segment_bytes: float, hw: Hardware) -> float:
    """Return the cores of a bias gradient: by channel, and by image where planes can be cut.

    8 sums of float32 are a block of 32 bytes, which one core owns: 64, 192 and 256 channels of
    57 x 57 and 13 x 13 ran on 8, 24 and 32 cores in the trace of 2023. 128 channels of 28 x 28,
    planes of whole blocks, ran on 32: cores share the images and add up in memory, which is why
    MemSet clears the sums. So do planes that no core's buffer holds twice: they are cut anyway.
    """
    by_channel = math.ceil(channels / BIAS_CHANNELS_PER_CORE)
    cut = segment_bytes % BLOCK_BYTES == 0 or segment_bytes > UNIFIED_BUFFER_BYTES / 2
    return min(hw.ai_cores_count, by_channel * images if cut else by_channel)


def _pool_work(task: Task, traffic: Traffic, context: CostContext) -> Work:
    """Return the work of a pooling, which walks blocks of one image and 16 channels, tap by tap.

    The three maxima of the AlexNet trace and their gradients (msprof, 2023) are linear in the
    pooled positions, not in the larger map's: windows that overlap more cost more.
    """
    constants, vector = context.constants, task.vector
    shapes = [context.buffers[index].shape for index in (*task.reads, *task.writes)]
    shape = max((shape for shape in shapes if len(shape) >= 3), key=math.prod, default=(1, 1))
    blocks = max(shape[0] * math.ceil(shape[-1] / CHANNEL_BLOCK), 1)
    taps = vector.elements * vector.simple / CHANNEL_BLOCK / blocks if vector else 1.0
    if task.cost_class == "max_pool_grad":
        each = constants.pool_grad_block_cycles + taps * constants.pool_grad_tap_cycles
    else:
        each = constants.pool_block_cycles + taps * constants.pool_tap_cycles
    cores = min(context.hw.ai_cores_count, blocks)
    return _joined(_cycles_us(blocks, cores, each, context.hw), traffic, context, cores)


def _row_work(task: Task, traffic: Traffic, context: CostContext) -> Work:
    """Return the work of a gather or scatter: a latency a row besides the bytes."""
    hw, constants = context.hw, context.constants
    rows = _picked_rows(task, context.buffers)
    gather = task.cost_class == "gather"
    each = constants.gather_row_cycles if gather else constants.scatter_row_cycles
    cores = min(hw.ai_cores_count, rows)
    return _joined(_cycles_us(rows, cores, each, hw), traffic, context, cores)


def _picked_rows(task: Task, buffers: tuple[Buffer, ...]) -> int:
    """Return the rows of a gather or scatter: its indices, or its output's rows if it has none."""
    indices = [buffers[i] for i in task.reads if "int" in buffers[i].dtype]
    if indices:
        return max(math.prod(min(indices, key=lambda buffer: buffer.nbytes).shape), 1)
    return max(math.prod(buffers[task.writes[0]].shape[:-1]), 1)


def _copy_work(task: Task, traffic: Traffic, context: CostContext) -> Work:
    """Return the work of a copy: a stream, but for slices of a matrix's columns.

    Slice takes those row by row, each by a transfer of its own: 184,696 rows of 32 bytes take 1 ms
    in the trace of 2020, 25 times a core's share of the bytes. Of a third axis it takes all rows by
    one transfer with a stride: 4,992,000 rows of 32 bytes are as fast as the memory that they lie
    in. Blocks of channels and whole rows are long runs either way.
    """
    rows = _sliced_rows(task, context.buffers)
    if not rows:
        return _streaming_work(task, traffic, context)
    cores = min(context.hw.ai_cores_count, rows)
    each = context.constants.slice_row_cycles
    return _joined(_cycles_us(rows, cores, each, context.hw), traffic, context, cores)


def _sliced_rows(task: Task, buffers: tuple[Buffer, ...]) -> int:
    """Return the rows that a slice of a plain matrix's columns takes, 0 for another copy."""
    if len(task.reads) != 1 or len(task.writes) != 1:
        return 0
    whole, part = buffers[task.reads[0]], buffers[task.writes[0]]
    if len(whole.shape) != 2 or len(part.shape) != 2 or whole.layout != "ND":
        return 0
    return part.shape[0] if part.shape[1] < whole.shape[1] else 0


def _minor_work(task: Task, traffic: Traffic, context: CostContext) -> Work:
    """Return the work of softmax and layer norm: a fixed cost a row besides lanes and traffic.

    An instruction of the vector unit reduces one row, or spreads a number over it, while others
    work on all rows in a core's buffer. The traces have two such kernels: a sum of rows of 39
    (2020), one instruction a row, 22 cycles; and softmax with cross entropy of rows of 10 (2023),
    which finds a maximum, subtracts it, sums, divides, and adds up the loss, 470 cycles.
    """
    shape = max((context.buffers[index].shape for index in task.reads), key=math.prod, default=())
    long = [length for length in shape if length > 1]
    cores = _cores(traffic, context)
    steps = task.vector.along_rows if task.vector else 1
    each = context.constants.minor_row_cycles * steps
    fixed_us = _cycles_us(max(math.prod(long[:-1]), 1), cores, each, context.hw)
    return _joined(fixed_us + _lanes_us(task, context), traffic, context, cores)


def _trans_data_work(task: Task, traffic: Traffic, context: CostContext) -> Work:
    """Return the work of TransData: a stream where rows are whole blocks of 32 bytes.

    Other rows are copied one by one, short ones of feature maps by element. To and from FRACTAL_NZ
    so are those of a matrix whose rows are no whole sixteens. On the way there each is padded with
    zeros as well: 16,000 rows of 1 take 66 us to FRACTAL_NZ and 16 us back in the trace of 2020.
    """
    constants, cores = context.constants, _cores(traffic, context)
    source, output = context.buffers[task.reads[0]], context.buffers[task.writes[0]]
    plain, blocked = (source, output) if source.layout == "ND" else (output, source)
    row, rows = _plain_rows(plain, blocked)
    matrix = blocked.layout == "FRACTAL_NZ"
    # A product with a vector has one axis: a matrix with a single row or column.
    num_rows = blocked.shape[-2] if len(blocked.shape) > 1 else 1
    whole = not matrix or num_rows % CHANNEL_BLOCK == 0
    if row % CHANNEL_BLOCK == 0 and whole:
        return _joined(0.0, traffic, context, cores)
    if matrix and output is blocked:
        each = constants.pad_row_cycles
    elif matrix:
        each = constants.minor_row_cycles
    else:
        each = min(constants.minor_row_cycles, row * constants.transpose_element_cycles)
    return _joined(_cycles_us(rows, cores, each, context.hw), traffic, context, cores)


def _plain_rows(plain: Buffer, blocked: Buffer) -> tuple[int, int]:
    """Return the length and number of adjacent elements in the plain layout.

    They are the rows of a matrix, or the planes of channels.
    """
    elements = math.prod(plain.shape)
    planes = blocked.layout == "NC1HWC0" and plain.shape[-1:] != blocked.shape[-1:]
    row = math.prod(plain.shape[2:] if planes else plain.shape[-1:])
    if blocked.layout == "FRACTAL_NZ" and math.prod(blocked.shape) == elements:
        row = blocked.shape[-1]
    return max(row, 1), elements // max(row, 1)


def _transpose_work(task: Task, traffic: Traffic, context: CostContext) -> Work:
    """Return the work of a transpose by the permutation of its bytes, however it was written.

    Where the minor axis stays, rows move: whole blocks of 32 bytes as a stream (Concat of such rows
    reaches 1.9 TB/s in the trace of 2020), others as TransData moves them. Where it doesn't, the
    vector unit turns squares of 16 x 16 numbers of 16 bits (`vnchwconv`), padded on both edges.
    """
    constants, cores = context.constants, _cores(traffic, context)
    source = context.buffers[task.reads[0]]
    moved = task.permutation or _permutation_between(source, context.buffers[task.writes[0]])
    elements = math.prod(moved.lengths)
    nbytes = max(item_bytes(source.dtype), 1)
    if moved.keeps_rows:
        row = moved.lengths[-1] if moved.lengths else 1
        if moved.keeps_bytes or row * nbytes % BLOCK_BYTES == 0:
            return _joined(0.0, traffic, context, cores)
        each = min(constants.minor_row_cycles, row * constants.transpose_element_cycles)
        walk_us = _cycles_us(elements // row, cores, each, context.hw)
        return _joined(walk_us, traffic, context, cores)
    before, after = moved.lengths[-1], moved.lengths[moved.order[-1]]
    squares = math.ceil(before / CHANNEL_BLOCK) * math.ceil(after / CHANNEL_BLOCK)
    squares *= elements // (before * after) * math.ceil(nbytes / 2)
    by_square = squares * constants.transpose_square_cycles
    by_element = elements * constants.transpose_element_cycles
    walk_us = _cycles_us(min(by_square, by_element), cores, 1.0, context.hw)
    return _joined(walk_us, traffic, context, cores)


def _permutation_between(source: Buffer, output: Buffer) -> Permutation:
    """Return the permutation that leads from one shape to the other, where a task has none.

    Kernels of a trace tell their shapes alone: the first order that fits and moves something.
    """
    orders = permutations(range(len(source.shape)))
    fitting = [order for order in orders if tuple(source.shape[a] for a in order) == output.shape]
    if not fitting:
        return permutation_of(source.shape, range(len(source.shape)))
    moving = (permutation_of(source.shape, order) for order in fitting[:2])
    return max(moving, key=lambda moved: len(moved.order))


def _sort_work(task: Task, traffic: Traffic, context: CostContext) -> Work:
    """Return the work of a merge sort: every element once per bit of the length."""
    elements = max(task.vector.elements if task.vector else 1, 2)
    lanes_us = _lanes_us(task, context) * math.log2(elements)
    return _joined(lanes_us, traffic, context, _cores(traffic, context))


WORK_BY_CLASS: Mapping[str, Callable[[Task, Traffic, CostContext], Work]] = {
    "bias_grad": _bias_grad_work,
    "reduce": _reduce_work,
    "max_pool": _pool_work,
    "max_pool_grad": _pool_work,
    "avg_pool": _pool_work,
    "gather": _row_work,
    "scatter": _row_work,
    "rows": _minor_work,
    "copy": _copy_work,
    "trans_data": _trans_data_work,
    "transpose": _transpose_work,
    "sort": _sort_work,
}
"""Classes with a rule of their own; the others are streams."""
