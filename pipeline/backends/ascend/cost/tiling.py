"""A matrix product on the cube units: its split over cores and its tiles.

All sizes are in fractals, blocks of 16 x 16 float16 (512 bytes). The cube multiplies two fractals
in a cycle. Rates and sizes are from CANN's platform file (AICoreSpec, AICoreMemoryRates).
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.tasks import CHANNEL_BLOCK, CubeWork

EDGE = CHANNEL_BLOCK
FRACTAL_BYTES = EDGE * EDGE * 2
ACCUMULATOR_BYTES = EDGE * EDGE * 4
BUFFERS_COUNT = 2
"""Double buffering: one tile is loaded while another is used."""
MAD_HEAD_CYCLES = 6
"""Cycles to start a multiply-add instruction (pto-isa's public cost model of `mad`)."""
DEFAULT_BLOCK_COLUMNS = 16
"""By the rule of thumb, an output block has at most this many columns, in fractals."""
BUSY_CORES = 0.75
"""Share of busy cores below which the rule of thumb tries another split."""


@dataclass(frozen=True, slots=True)
class Product:
    """A cube task in fractals: `batch` times (m x k) by (k x n); m rows, k depth, n columns.

    `expansion` is the factor by which im2col makes the left operand larger than it is in memory.
    `out_bytes` is the size of an element of the output. `images` is the number of images that a
    weight gradient sums over; 0 for other products. The vendor may split its depth by images.
    A fractal of float32 has 16 x 8 numbers, half the depth.
    """

    batch: int
    m: int
    k: int
    n: int
    expansion: float
    out_bytes: int
    images: int = 0
    float32: bool = False


@dataclass(frozen=True, slots=True)
class Tiling:
    """Numbers of cores that share the batch, rows, depth and columns, and the output block.

    The block of rows x columns, in fractals, is in the L0C.
    """

    cores_batch: int
    cores_m: int
    cores_k: int
    cores_n: int
    block_m: int
    block_n: int


def pad_product(work: CubeWork, cost_class: str, out_bytes: int = 2, images: int = 1) -> Product:
    """Return a task in padded fractals. The channels of each tap are padded separately.

    A 1 x 1 input gradient skips the zeros that a stride puts between rows. Other input gradients
    multiply the zeros. `images` is the batch size, which a weight gradient sums over.
    """
    float32 = work.dtype == "float32"
    depth = EDGE // 2 if float32 else EDGE
    m, n = map(_count_blocks, (work.m, work.n))
    k = _count_blocks(work.k, depth)
    expansion = max(work.taps / work.stride, 1.0)
    if cost_class == "conv_kernel_grad":
        m = work.taps * _count_blocks(work.m // work.taps)
        return Product(work.batch, m, k, n, expansion, 4, max(images, 1), float32)
    if cost_class in ("conv", "conv_input_grad"):
        k = work.taps * _count_blocks(work.k // work.taps, depth)
    if cost_class == "conv_input_grad":
        # A strided 1 x 1 convolution reads only some of the rows.
        share = work.macs / (work.batch * work.m * work.k * work.n)
        is_strided = work.taps == 1 and share < 1
        rows = max(math.ceil(work.m * share), 1) if is_strided else work.m
        m = _count_blocks(rows)
        expansion = max(rows * work.taps * work.stride / work.m, 1.0)
    return Product(work.batch, m, k, n, expansion, out_bytes, float32=float32)


def _count_blocks(length: int, edge: int = EDGE) -> int:
    return max(-(-length // edge), 1)


@dataclass(frozen=True, eq=False)
class TileChoice:
    """Tilings to choose from.

    `rows` has shape (tilings, 6), with the fields of `Tiling`. `stages` are the cycles (tilings,)
    of the cube, of loads into L0, of reads and of writes.
    """

    rows: NDArray[np.float64]
    stages: tuple[NDArray[np.float64], ...]


def make_choice(rows: NDArray[np.float64], product: Product, hw: Hardware) -> TileChoice:
    """Return the tilings `rows` with their cycles for a product."""
    return TileChoice(rows, compute_stage_cycles(product, hw, rows))


@cache
def list_default_tilings(product: Product, hw: Hardware) -> TileChoice:
    """Return the tilings among which the vendor's rule of thumb chooses."""
    return make_choice(_list_default_rows(product, hw), product, hw)


@cache
def choose_default_tiling(product: Product, hw: Hardware, overlap: float) -> Tiling:
    """Return the tiling of the vendor's rule of thumb: the default tiling of the fewest cycles.

    `overlap` is the exponent of the sum of stages, as in `sum_cycles`.
    """
    choice = list_default_tilings(product, hw)
    return to_tiling(choice.rows[int(sum_cycles(choice.stages, overlap).argmin())])


@cache
def split_images(product: Product, hw: Hardware) -> tuple[tuple[int, TileChoice], ...]:
    """Return numbers of equal parts of a weight gradient's images, with the tilings of a part.

    The numbers are powers of two. The rule of thumb may suit a part better than all images, and the
    parts can run one after the other. Tilings are left out if a tiling of all images is as fast in
    every stage.
    """
    stages = _stack_stages(list_default_tilings(product, hw))
    parts = []
    count = 2
    while product.images and product.images % count == 0:
        images = product.images // count
        part = replace(product, k=math.ceil(product.k / count), images=images)
        choice = list_default_tilings(part, hw)
        part_stages = count * _stack_stages(choice)
        slower = np.all(stages[:, None, :] <= part_stages[:, :, None], axis=0)
        useful = np.logical_not(np.any(slower, axis=1))
        if useful.any():
            cycles = tuple(stage[useful] for stage in choice.stages)
            parts.append((count, TileChoice(choice.rows[useful], cycles)))
        count *= 2
    return tuple(parts)


def _stack_stages(choice: TileChoice) -> NDArray[np.float64]:
    """Return the stages that run in parallel: shape (3, tilings)."""
    cube, load, l2, out = choice.stages
    return np.stack([np.maximum(cube, load), l2, out])


def to_row(tiling: Tiling) -> NDArray[np.float64]:
    """Return a tiling as an array of one row, (1, 6)."""
    return np.array([astuple(tiling)], dtype=np.float64)


def to_tiling(row: NDArray[np.float64]) -> Tiling:
    """Return the tiling of a row, (6,)."""
    return Tiling(*(int(value) for value in row))


def sum_cycles(
    stages: tuple[NDArray[np.float64], ...],
    overlap: float,
    read_cycles: float = 0.0,
    write_cycles: float = 0.0,
    rate: float = 1.0,
) -> NDArray[np.float64]:
    """Return the cycles of each tiling: the p-norm of cube (or L0 loads), reads and writes.

    Reads and writes take at least the `read_cycles` and `write_cycles` of device memory. `rate` is
    the cube's rate relative to its peak.
    """
    cube, load, l2, out = stages
    parts = np.stack(
        [np.maximum(cube, load) / rate, np.maximum(l2, read_cycles), np.maximum(out, write_cycles)]
    )
    return np.asarray((parts**overlap).sum(axis=0) ** (1 / overlap))


def compute_stage_cycles(
    product: Product, hw: Hardware, rows: NDArray[np.float64]
) -> tuple[NDArray[np.float64], ...]:
    """Return the cycles (cube, load, l2, out) of the busiest core, for each row of tilings."""
    cores_batch, cores_m, cores_k, cores_n, block_m, block_n = rows.T
    batch = np.ceil(product.batch / cores_batch)
    m = np.ceil(product.m / cores_m)
    k = np.ceil(product.k / cores_k)
    n = np.ceil(product.n / cores_n)
    passes_m = np.ceil(m / block_m)
    passes_n = np.ceil(n / block_n)
    depth = _compute_tile_depth(hw, np.minimum(m, block_m), np.minimum(n, block_n))
    start_cycles = passes_m * passes_n * np.ceil(k / depth) * MAD_HEAD_CYCLES
    fractal_macs = EDGE**3 / (2 if product.float32 else 1)
    rate = hw.cube_fp32_macs_per_cycle if product.float32 else hw.cube_fp16_macs_per_cycle
    cube = m * k * n * fractal_macs / rate + start_cycles
    a_bytes = m * k * FRACTAL_BYTES
    b_bytes = k * n * FRACTAL_BYTES
    load = (
        a_bytes * passes_n / hw.l1_to_l0a_bytes_per_cycle
        + b_bytes * passes_m / hw.l1_to_l0b_bytes_per_cycle
    )
    l1_bytes = hw.l1_kib * 1024 / BUFFERS_COUNT
    panel_bytes = np.minimum(m, block_m) * k * FRACTAL_BYTES / product.expansion
    # An operand that half the L1 holds is read once, else in each pass over the other operand.
    reads_a = np.where(panel_bytes <= l1_bytes, 1, passes_n)
    reads_b = np.where(b_bytes <= l1_bytes, 1, passes_m)
    l2_bytes = a_bytes / product.expansion * reads_a + b_bytes * reads_b
    element_bytes = np.where(cores_k > 1, 4, product.out_bytes)
    out_cycles = EDGE * EDGE * element_bytes / hw.ub_to_l2_bytes_per_cycle
    out = m * n * np.maximum(out_cycles, ACCUMULATOR_BYTES / hw.l0c_to_ub_bytes_per_cycle)
    l2 = l2_bytes / hw.l2_read_bytes_per_cycle
    return cube * batch, load * batch, l2 * batch, out * batch


def _compute_tile_depth(
    hw: Hardware, m: NDArray[np.float64], n: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the depth in fractals of tiles that fit the L0A and L0B twice."""
    l0a_depth = hw.l0a_kib * 1024 / BUFFERS_COUNT / FRACTAL_BYTES // m
    l0b_depth = hw.l0b_kib * 1024 / BUFFERS_COUNT / FRACTAL_BYTES // n
    return np.maximum(np.minimum(l0a_depth, l0b_depth), 1)


@cache
def list_blocks(hw: Hardware) -> tuple[tuple[int, int], ...]:
    """Return output blocks (rows, columns) that fit: powers of two columns, as many rows as fit.

    The area is bounded by the L0C, rows by the L0A and columns by the L0B.
    """
    area = max(int(hw.l0c_kib * 1024 / BUFFERS_COUNT / ACCUMULATOR_BYTES), 1)
    max_m, max_n = (
        max(int(kib * 1024 / BUFFERS_COUNT / FRACTAL_BYTES), 1) for kib in (hw.l0a_kib, hw.l0b_kib)
    )
    columns = [2**power for power in range(int(np.log2(min(area, max_n))) + 1)]
    return tuple((min(area // n, max_m), n) for n in columns)


def _list_default_rows(product: Product, hw: Hardware) -> NDArray[np.float64]:
    """Return the default tilings: shape (tilings, 6), the fields of `Tiling`."""
    cores = int(hw.ai_cores_count)
    cores_batch = min(cores, product.batch)
    cores = cores // cores_batch
    blocks = (block for block in list_blocks(hw) if block[1] <= DEFAULT_BLOCK_COLUMNS)
    block = max(blocks, key=lambda block: block[1])
    rows = [
        (cores_batch, m, k, min(cores // k // m, product.n), *block)
        for k in _list_depth_parts(cores, min(cores, product.k, max(product.images, 1)))
        for m in range(1, min(cores // k, product.m) + 1)
    ]
    return np.array(rows, dtype=np.float64)


def _list_depth_parts(cores: int, images: int) -> list[int]:
    """Return numbers of parts of the depth: the number of images, then its halves.

    Halves are tried while too many cores are idle, such as 14 of 32 cores with 18 images. So more
    cores may be slower by this rule: halves of 4 images are tried with 11 cores, not with 12.
    """
    parts = [images]
    while parts[-1] > 1 and parts[-1] * (cores // parts[-1]) < BUSY_CORES * cores:
        parts.append(parts[-1] // 2)
    return parts


@cache
def _list_splits(cores: int, blocks: tuple[tuple[int, int], ...]) -> NDArray[np.float64]:
    """Return all splits of up to `cores` cores over m, k, n with all blocks: rows of `Tiling`."""
    splits = [
        (m, k, n)
        for m in range(1, cores + 1)
        for k in range(1, cores // m + 1)
        for n in range(1, cores // m // k + 1)
    ]
    rows = [(1, *split, *block) for split in splits for block in blocks]
    return np.array(rows, dtype=np.float64)


def list_tilings(product: Product, hw: Hardware) -> NDArray[np.float64]:
    """Return the tilings that a search may try: shape (tilings, 6), the fields of `Tiling`."""
    cores = int(hw.ai_cores_count)
    rows_by_split = [_list_default_rows(product, hw)]
    for cores_batch in sorted({1, min(cores, product.batch)}):
        rows = _list_splits(cores // cores_batch, list_blocks(hw)).copy()
        rows[:, 0] = cores_batch
        limits = np.array([product.batch, product.m, product.k, product.n], dtype=np.float64)
        rows[:, :4] = np.minimum(rows[:, :4], limits)
        rows_by_split.append(rows)
    return np.unique(np.concatenate(rows_by_split), axis=0)
