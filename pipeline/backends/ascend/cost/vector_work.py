"""Time of the vector unit's kernels at the hardware's rates, by a rule for each class."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.tasks import (
    CHANNEL_BLOCK,
    Buffer,
    CubeWork,
    Permutation,
    Task,
    TaskBound,
    simplify_permutation,
)
from pipeline.backends.ascend.cost.efficiency import ClassEfficiency, Constants
from pipeline.backends.ascend.cost.l2_cache import Traffic
from pipeline.backends.ascend.cost.tiling import Tiling
from pipeline.core.host.array_values import get_item_bytes

BLOCK_BYTES = 32
"""The unit of a transfer between memory and a core's buffers (CANN's platform file)."""

BIAS_CHANNELS_PER_CORE = 8
"""Float32 sums in a block of 32 bytes."""

FLOAT16_BYTES = 2
CONVERSIONS = 2
"""Operations that convert to float32 and back."""

NORMALISATION_PASSES = 3.0
"""A kernel of batch normalisation has at most this many operations per element. Scale and shift are
one multiply-add, and so are the sums. The backward pass has two multiply-adds and a mask."""


@dataclass(frozen=True, slots=True)
class Work:
    """Time of a task in addition to an empty kernel's, its limit, and the cores in use."""

    us: float
    bound: TaskBound
    cores: float


@dataclass(frozen=True, slots=True)
class CostContext:
    """Inputs of a task's price besides the task. `tiles` are by index of the task."""

    hw: Hardware
    constants: Constants
    classes: Mapping[str, ClassEfficiency]
    buffers: tuple[Buffer, ...]
    tiles: Mapping[int, Tiling]


VectorTime = tuple[float, float]
"""Microseconds of the vector unit without traffic, and the cores in use."""


def sum_by_norm(*parts_us: float, power: float) -> float:
    """Return the p-norm of parallel parts: their sum at power 1, the largest at infinity."""
    largest = max(parts_us)
    if largest <= 0:
        return 0.0
    return float(largest * sum((part / largest) ** power for part in parts_us) ** (1 / power))


def price_vector_work(task: Task, traffic: Traffic, context: CostContext) -> Work:
    """Return the work of a task of the vector unit that isn't a product."""
    vector_us, cores = RULES.get(task.cost_class, _price_stream)(task, traffic, context)
    return price_transfer(vector_us, traffic, context, cores)


def price_vector_product(work: CubeWork, hw: Hardware) -> Work:
    """Return the work of a float32 product: 16 rows a core at the rate of its vector unit.

    The trace of 2020 has products of 2 rows on one core and products of 4096 rows on all cores.
    """
    parts = work.batch * math.ceil(work.m / CHANNEL_BLOCK)
    cores = min(hw.vector_cores_count, parts)
    macs = math.ceil(parts / cores) * min(work.m, CHANNEL_BLOCK) * work.k * work.n
    return Work(macs / (hw.fp32_matmul_gmacs_per_s * 1e3), "vector", cores)


def price_depthwise(work: CubeWork, traffic: Traffic, context: CostContext) -> Work:
    """Return the work of a depthwise convolution: one operation of a lane for each multiply-add.

    As many lanes are in use as in other vector kernels (`vector_rate`).
    """
    lane_bytes = work.macs * get_item_bytes(work.dtype)
    lanes_us = lane_bytes / (context.hw.vector_bytes_per_us * context.constants.vector_rate)
    return price_transfer(lanes_us, traffic, context, context.hw.vector_cores_count)


def price_transfer(vector_us: float, traffic: Traffic, context: CostContext, cores: float) -> Work:
    """Return the work of traffic and of `vector_us` of the vector unit, which overlap."""
    hw = context.hw
    constants = context.constants
    hbm_us = traffic.hbm_bytes / (hw.hbm_bytes_per_us * constants.hbm_read)
    hbm_us += traffic.write_bytes / (hw.hbm_bytes_per_us * constants.hbm_write)
    l2_bytes_per_us = hw.ai_cores_count * hw.ai_core_clock_mhz * hw.l2_read_bytes_per_cycle
    l2_us = traffic.l2_bytes / l2_bytes_per_us
    us = sum_by_norm(vector_us, hbm_us + l2_us, power=constants.vector_overlap)
    # A kernel on few cores is limited by their ports.
    port_bytes_per_us = cores * hw.core_bytes_per_cycle * hw.ai_core_clock_mhz
    us = max(us, max(traffic.read_bytes, traffic.write_bytes) / port_bytes_per_us)
    stages: tuple[tuple[float, TaskBound], ...] = (
        (vector_us, "vector"),
        (hbm_us, "memory"),
        (l2_us, "l2"),
    )
    return Work(us, max(stages)[1], cores)


def _compute_lanes_us(task: Task, context: CostContext) -> float:
    """Return the microseconds of the vector unit's lanes.

    Divisions, roots and exponentials are computed in float32, with conversions of float16: in the
    trace of 2023 dividing 4.9 million float16 takes 48 us, subtracting them takes 21 us. The vector
    unit has no arithmetic in bfloat16, and computes it in float32 (Ascend C's API, Add and Mul).
    """
    work = task.vector
    constants = context.constants
    if work is None:
        return 0.0
    passes = work.simple + constants.heavy_operations * work.heavy
    nbytes = max(get_item_bytes(work.dtype), FLOAT16_BYTES)
    if task.cost_class in ("bn_reduce", "bn_update"):
        passes = min(passes, NORMALISATION_PASSES)
    elif nbytes == FLOAT16_BYTES and (work.heavy or work.dtype == "bfloat16"):
        passes += CONVERSIONS
        nbytes = 2 * FLOAT16_BYTES
    lane_bytes = work.elements * nbytes * passes
    return lane_bytes / (context.hw.vector_bytes_per_us * constants.vector_rate)


def _count_cores(traffic: Traffic, context: CostContext) -> float:
    """Return the cores that a stream uses, by its bytes (`Constants.core_bytes`)."""
    cores = math.ceil(max(traffic.read_bytes, traffic.write_bytes) / context.constants.core_bytes)
    return min(context.hw.vector_cores_count, max(cores, 1))


def _price_chunks(chunks: float, cores: float, chunk_cycles: float, hw: Hardware) -> VectorTime:
    """Return the time of equal chunks of work, one after another on each core."""
    return math.ceil(chunks / cores) * chunk_cycles / hw.ai_core_clock_mhz, cores


def _price_stream(task: Task, traffic: Traffic, context: CostContext) -> VectorTime:
    """Return the time of the lanes of element-wise work, which overlaps its traffic."""
    return _compute_lanes_us(task, context), _count_cores(traffic, context)


def _price_segments(
    segments: int, cores: float, traffic: Traffic, context: CostContext
) -> VectorTime:
    """Price sums over equal segments of the input, such as planes of an image's channels."""
    constants = context.constants
    cycles = constants.bias_segment_cycles
    cycles += traffic.read_bytes / segments / constants.bias_bytes_per_cycle
    return _price_chunks(segments, cores, cycles, context.hw)


def _price_bias_grad(task: Task, traffic: Traffic, context: CostContext) -> VectorTime:
    """Price a bias gradient: a stream of a matrix, or segments by image and channel of a map."""
    source = context.buffers[task.reads[0]]
    if len(source.shape) <= 2:
        return _price_stream(task, traffic, context)
    channels = max(math.prod(context.buffers[task.writes[0]].shape), 1)
    segments = source.shape[0] * channels
    segment_bytes = traffic.read_bytes / segments
    cores = count_bias_cores(channels, source.shape[0], segment_bytes, context.hw)
    return _price_segments(segments, cores, traffic, context)


def count_bias_cores(channels: int, images: int, segment_bytes: float, hw: Hardware) -> float:
    """Return the cores of a bias gradient: by channel, and by image if planes can be split.

    Each core has a block of 32 bytes, 8 float32 sums: in the trace of 2023, 64, 192 and 256
    channels of 57 x 57 and 13 x 13 ran on 8, 24 and 32 cores. 128 channels of 28 x 28, planes of
    whole blocks, ran on 32: the cores share the images, and add to sums in memory that MemSet
    clears. Planes that don't fit a core's buffer twice are split too.
    """
    by_channel = math.ceil(channels / BIAS_CHANNELS_PER_CORE)
    splits_planes = segment_bytes % BLOCK_BYTES == 0 or segment_bytes > hw.ub_kib * 1024 / 2
    return min(hw.vector_cores_count, by_channel * images if splits_planes else by_channel)


def _price_reduce(task: Task, traffic: Traffic, context: CostContext) -> VectorTime:
    """Price a sum: a stream, except means over the planes of plain feature maps.

    Such means, of squeeze-and-excitation in eager frameworks, are priced as a bias gradient: by
    segments of image and channel.
    """
    maps = [context.buffers[index] for index in task.reads]
    source = max(maps, key=lambda buffer: math.prod(buffer.shape), default=None)
    if source is None or source.layout != "ND" or len(source.shape) != 4:
        return _price_stream(task, traffic, context)
    planes = math.prod(source.shape[:2])
    sums = math.prod(context.buffers[task.writes[0]].shape)
    if sums != planes or math.prod(source.shape) == sums:
        return _price_stream(task, traffic, context)
    return _price_segments(planes, min(context.hw.vector_cores_count, planes), traffic, context)


def _price_pool(task: Task, traffic: Traffic, context: CostContext) -> VectorTime:
    """Price a pooling: blocks of one image and 16 channels, tap by tap.

    The times of the three max poolings of the AlexNet trace (msprof, 2023) and of their gradients
    are linear in the pooled positions, not in the positions of the larger map.
    """
    constants = context.constants
    shapes = [context.buffers[index].shape for index in (*task.reads, *task.writes)]
    shape = max((shape for shape in shapes if len(shape) >= 3), key=math.prod, default=(1, 1))
    blocks = max(shape[0] * math.ceil(shape[-1] / CHANNEL_BLOCK), 1)
    work = task.vector
    taps = work.elements * work.simple / CHANNEL_BLOCK / blocks if work else 1.0
    if task.cost_class == "max_pool_grad":
        cycles = constants.pool_grad_block_cycles + taps * constants.pool_grad_tap_cycles
    else:
        cycles = constants.pool_block_cycles + taps * constants.pool_tap_cycles
    return _price_chunks(blocks, min(context.hw.vector_cores_count, blocks), cycles, context.hw)


def _price_picked_rows(task: Task, traffic: Traffic, context: CostContext) -> VectorTime:
    """Price a gather or scatter: a latency for each index, or for each row of the output."""
    buffers = context.buffers
    indices = [buffers[index] for index in task.reads if "int" in buffers[index].dtype]
    shape = buffers[task.writes[0]].shape[:-1]
    if indices:
        shape = min(indices, key=lambda buffer: buffer.nbytes).shape
    rows = max(math.prod(shape), 1)
    constants = context.constants
    is_gather = task.cost_class == "gather"
    cycles = constants.gather_row_cycles if is_gather else constants.scatter_row_cycles
    return _price_chunks(rows, min(context.hw.vector_cores_count, rows), cycles, context.hw)


def _price_resize(task: Task, traffic: Traffic, context: CostContext) -> VectorTime:
    """Price a resize: a latency for each block of 16 channels of a position, as a gather's row."""
    rows = task.vector.rows if task.vector is not None and task.vector.rows is not None else 1
    cores = min(context.hw.vector_cores_count, rows)
    return _price_chunks(rows, cores, context.constants.resize_row_cycles, context.hw)


def _price_copy(task: Task, traffic: Traffic, context: CostContext) -> VectorTime:
    """Price a copy: a stream, except slices of a plain matrix's columns.

    Slice copies each of these rows with a transfer: 184,696 rows of 32 bytes take 1 ms in the trace
    of 2020, 25 times the time of their bytes. A slice of a third axis is one transfer with a
    stride: 4,992,000 rows of 32 bytes are as fast as the memory.
    """
    if len(task.reads) == len(task.writes) == 1:
        source = context.buffers[task.reads[0]]
        part = context.buffers[task.writes[0]]
        are_matrices = len(source.shape) == len(part.shape) == 2 and source.layout == "ND"
        if are_matrices and part.shape[1] < source.shape[1] and part.shape[0]:
            rows = part.shape[0]
            cores = min(context.hw.vector_cores_count, rows)
            return _price_chunks(rows, cores, context.constants.slice_row_cycles, context.hw)
    return _price_stream(task, traffic, context)


def _price_minor_rows(task: Task, traffic: Traffic, context: CostContext) -> VectorTime:
    """Price softmax and layer norm: a fixed cost a row in addition to lanes.

    An instruction that reduces a row, or broadcasts a number over it, runs for one row at a time,
    other instructions for all rows in a core's buffer. The traces have two such kernels: a sum of
    rows of 39 (2020), one instruction and 22 cycles a row; and softmax with cross entropy of rows
    of 10 (2023), with maximum, difference, sum, division and loss, 470 cycles a row.
    """
    work = task.vector
    cycles = context.constants.minor_row_cycles * (work.along_rows if work else 1)
    rows = work.rows if work else None
    if rows is None:
        shapes = (context.buffers[index].shape for index in task.reads)
        lengths = [length for length in max(shapes, key=math.prod, default=()) if length > 1]
        rows = max(math.prod(lengths[:-1]), 1)
    fixed_us, cores = _price_chunks(rows, _count_cores(traffic, context), cycles, context.hw)
    return fixed_us + _compute_lanes_us(task, context), cores


def _price_trans_data(task: Task, traffic: Traffic, context: CostContext) -> VectorTime:
    """Price TransData: a stream if rows are whole blocks of 32 bytes.

    Other rows are copied one by one, short rows of feature maps by element: in the trace of 2023
    planes of 36 and 169 numbers take 26 cycles each, in both directions. Rows shorter than a block
    are padded with zeros by number: in the trace of 2020, 16,000 rows of 1 take 66 us to FRACTAL_NZ
    and 16 us back. If the rows of each matrix of a batch don't fill its blocks, a column of blocks
    is one transfer with a stride, as in a slice of columns.
    """
    constants = context.constants
    cores = _count_cores(traffic, context)
    source = context.buffers[task.reads[0]]
    output = context.buffers[task.writes[0]]
    plain, blocked = (source, output) if source.layout == "ND" else (output, source)
    row, rows = _find_plain_rows(plain, blocked)
    is_matrix = blocked.layout == "FRACTAL_NZ"
    if row % CHANNEL_BLOCK == 0:
        # A product with a vector has one axis: a matrix with a single row or column.
        matrix_rows = blocked.shape[-2] if is_matrix and len(blocked.shape) > 1 else CHANNEL_BLOCK
        if matrix_rows % CHANNEL_BLOCK == 0:
            return 0.0, cores
        transfers = rows // matrix_rows * (row // CHANNEL_BLOCK)
        return _price_chunks(transfers, cores, constants.slice_row_cycles, context.hw)
    cycles = constants.minor_row_cycles
    if is_matrix and output is blocked and row < CHANNEL_BLOCK:
        cycles = constants.pad_row_cycles
    elif not is_matrix:
        cycles = min(cycles, row * constants.transpose_element_cycles)
    return _price_chunks(rows, cores, cycles, context.hw)


def _find_plain_rows(plain: Buffer, blocked: Buffer) -> tuple[int, int]:
    """Return the length and number of rows in the plain layout; planes of channels are rows."""
    elements = math.prod(plain.shape)
    are_planes = blocked.layout == "NC1HWC0" and plain.shape[-1:] != blocked.shape[-1:]
    row = math.prod(plain.shape[2:] if are_planes else plain.shape[-1:])
    if blocked.layout == "FRACTAL_NZ" and math.prod(blocked.shape) == elements:
        row = blocked.shape[-1]
    return max(row, 1), elements // max(row, 1)


def _price_transpose(task: Task, traffic: Traffic, context: CostContext) -> VectorTime:
    """Price a transpose by the permutation of its bytes.

    If the minor axis stays last, rows move: whole blocks of 32 bytes as a stream (Concat of such
    rows reaches 1.9 TB/s in the trace of 2020), others as in TransData. If not, the vector unit
    transposes squares of 16 x 16 numbers of 16 bits (`vnchwconv`), padded on both edges.
    """
    constants = context.constants
    cores = _count_cores(traffic, context)
    source = context.buffers[task.reads[0]]
    moved = task.permutation or _guess_permutation(source, context.buffers[task.writes[0]])
    elements = math.prod(moved.lengths)
    nbytes = max(get_item_bytes(source.dtype), 1)
    if moved.keeps_rows:
        row = moved.lengths[-1] if moved.lengths else 1
        if moved.keeps_bytes or row * nbytes % BLOCK_BYTES == 0:
            return 0.0, cores
        cycles = min(constants.minor_row_cycles, row * constants.transpose_element_cycles)
        return _price_chunks(elements // row, cores, cycles, context.hw)
    before = moved.lengths[-1]
    after = moved.lengths[moved.order[-1]]
    squares = math.ceil(before / CHANNEL_BLOCK) * math.ceil(after / CHANNEL_BLOCK)
    squares *= elements // (before * after) * math.ceil(nbytes / 2)
    by_square = squares * constants.transpose_square_cycles
    by_element = elements * constants.transpose_element_cycles
    return _price_chunks(min(by_square, by_element), cores, 1.0, context.hw)


def _guess_permutation(source: Buffer, output: Buffer) -> Permutation:
    """Return a permutation that leads from one shape to the other, for a kernel of a trace.

    The permutation is the first that fits the shapes and moves elements.
    """
    shape = source.shape
    orders = permutations(range(len(shape)))
    fitting = [order for order in orders if tuple(shape[axis] for axis in order) == output.shape]
    # The first order may be the identity, which moves nothing.
    moves = [
        simplify_permutation(shape, order) for order in fitting[:2] or [tuple(range(len(shape)))]
    ]
    return max(moves, key=lambda moved: len(moved.order))


def _price_sort(task: Task, traffic: Traffic, context: CostContext) -> VectorTime:
    """Price a merge sort: every element once per bit of the length."""
    elements = max(task.vector.elements if task.vector else 1, 2)
    return _compute_lanes_us(task, context) * math.log2(elements), _count_cores(traffic, context)


RULES: Mapping[str, Callable[[Task, Traffic, CostContext], VectorTime]] = {
    "bias_grad": _price_bias_grad,
    "reduce": _price_reduce,
    "max_pool": _price_pool,
    "max_pool_grad": _price_pool,
    "avg_pool": _price_pool,
    "gather": _price_picked_rows,
    "scatter": _price_picked_rows,
    "resize": _price_resize,
    "rows": _price_minor_rows,
    "copy": _price_copy,
    "trans_data": _price_trans_data,
    "transpose": _price_transpose,
    "sort": _price_sort,
}
"""Pricing rules by cost class; `_price_stream` for other classes."""
