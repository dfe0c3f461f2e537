"""Tilings: padded fractals, cycles by hand, capacities, and searches against brute force."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.tasks import CubeWork
from pipeline.backends.ascend.cost.tiling import (
    Product,
    Tiling,
    choose_default_tiling,
    compute_stage_cycles,
    list_blocks,
    list_default_tilings,
    list_tilings,
    pad_product,
    sum_cycles,
    to_row,
    to_tiling,
)
from tests.backends.ascend.made_up import HW

OVERLAP = 1.25
SMALL = replace(HW, ai_cores_count=6.0)
sizes = st.integers(1, 400)
shapes = st.builds(
    Product,
    batch=st.integers(1, 40),
    m=sizes,
    k=sizes,
    n=sizes,
    expansion=st.sampled_from((1.0, 2.25, 9.0)),
    out_bytes=st.sampled_from((2, 4)),
)
products = st.one_of(
    shapes,
    st.builds(lambda made, images: replace(made, out_bytes=4, images=images), shapes, sizes),
)
"""Kernel gradients, which have images, write float32."""


@cache
def best_tiling(product: Product, hw: Hardware, overlap: float) -> Tiling:
    """The best of all that a search may choose from."""
    rows = list_tilings(product, hw)
    return to_tiling(
        rows[int(np.argmin(sum_cycles(compute_stage_cycles(product, hw, rows), overlap)))]
    )


def cycles_of(tiling: Tiling, product: Product) -> tuple[float, ...]:
    """Cycles of the cube, of loads, of the L2 and of the output."""
    return tuple(float(stage[0]) for stage in compute_stage_cycles(product, HW, to_row(tiling)))


def time_us(tiling: Tiling, product: Product, hw: Hardware) -> float:
    """Microseconds of a tiling."""
    stages = compute_stage_cycles(product, hw, to_row(tiling))
    return float(sum_cycles(stages, OVERLAP)[0]) / hw.ai_core_clock_mhz


def test_matrix_product_is_padded_to_blocks_of_16() -> None:
    product = pad_product(CubeWork(1, 33, 16, 10, 33 * 16 * 10), "matmul", 4)
    assert product == Product(1, 3, 1, 1, 1.0, 4)


def test_channels_are_padded_separately_at_each_kernel_tap() -> None:
    stem = CubeWork(1, 32 * 112 * 112, 49 * 3, 64, 1, taps=49, stride=4)
    product = pad_product(stem, "conv")
    assert (product.m, product.k, product.n) == (32 * 112 * 112 // 16, 49, 4)
    assert product.expansion == 49 / 4


def test_kernel_gradient_pads_row_channels_and_sums_in_float32() -> None:
    work = CubeWork(1, 121 * 3, 32 * 57 * 57, 64, 1, taps=121, stride=16)
    product = pad_product(work, "conv_kernel_grad", 2, images=32)
    assert (product.m, product.k, product.n) == (121, 6498, 4)
    assert (product.out_bytes, product.images) == (4, 32)


def test_input_gradient_of_strided_1x1_convolution_skips_zeros() -> None:
    rows = 32 * 56 * 56
    work = CubeWork(1, rows, 512, 256, rows * 512 * 256 // 4, taps=1, stride=4)
    product = pad_product(work, "conv_input_grad")
    assert (product.m, product.k, product.n) == (rows // 4 // 16, 32, 16)
    assert product.expansion == 1


def test_tiling_cycles_match_hand_calculation() -> None:
    """4096^3 on 8 x 4 cores, blocks of 8 x 16: 32 x 64 blocks of output and 256 deep a core."""
    product = Product(1, 256, 256, 256, 1.0, 2)
    cube, load, l2, out = cycles_of(Tiling(1, 8, 1, 4, 8, 16), product)
    heads = 4 * 4 * (256 // 4) * 6
    assert cube == 32 * 256 * 64 + heads
    assert load == 32 * 256 * 4 * 512 / 512 + 256 * 64 * 4 * 512 / 256
    assert l2 == pytest.approx((32 * 256 * 512 * 4 + 256 * 64 * 512 * 4) / 110)
    assert out == 32 * 64 * 512 / 64


def test_panel_within_the_l1_is_loaded_once() -> None:
    """Operands of 4 blocks depth: both stay in the L1, whatever the passes."""
    product = Product(1, 256, 4, 256, 1.0, 2)
    _, _, l2, _ = cycles_of(Tiling(1, 8, 1, 4, 8, 16), product)
    assert l2 == pytest.approx((32 * 4 + 4 * 64) * 512 / 110)


def test_depth_split_over_cores_is_summed_in_float32() -> None:
    product = Product(1, 16, 64, 16, 1.0, 2)
    cube, _, _, out = cycles_of(Tiling(1, 1, 1, 1, 8, 16), product)
    split_cube, _, _, split_out = cycles_of(Tiling(1, 1, 4, 1, 8, 16), product)
    assert split_out == 2 * out
    assert split_cube == pytest.approx(cube / 4)


def test_kernel_gradient_is_split_by_images_first() -> None:
    product = Product(1, 144, 338, 16, 9.0, 4, images=32)
    assert choose_default_tiling(product, HW, OVERLAP).cores_k == 32
    two = choose_default_tiling(replace(product, images=2), HW, OVERLAP)
    assert (two.cores_k, two.cores_m * two.cores_k * two.cores_n) == (2, 32)


@pytest.mark.slow
@given(products)
def test_candidate_tilings_fit_cores_and_buffers(product: Product) -> None:
    rows = list_tilings(product, HW)
    assert (rows[:, :4].prod(axis=1) <= HW.ai_cores_count).all()
    assert (rows[:, 4] * rows[:, 5] * 1024 * 2 <= HW.l0c_kib * 1024).all()
    assert (rows[:, 4] * 512 * 2 <= HW.l0a_kib * 1024).all()
    assert (rows[:, 5] * 512 * 2 <= HW.l0b_kib * 1024).all()
    assert (rows >= 1).all()


@pytest.mark.slow
@given(products)
def test_best_tiling_is_no_slower_than_the_default(product: Product) -> None:
    best, default = (find(product, HW, OVERLAP) for find in (best_tiling, choose_default_tiling))
    assert time_us(best, product, HW) <= time_us(default, product, HW)


def _us(product: Product, hw: Hardware, split: tuple[int, ...], block: tuple[int, int]) -> float:
    """Microseconds of a tiling, written out again in plain Python."""
    b, m, k, n = (
        math.ceil(size / cores)
        for size, cores in zip((product.batch, product.m, product.k, product.n), split, strict=True)
    )
    rows, columns = min(m, block[0]), min(n, block[1])
    passes_m, passes_n = math.ceil(m / block[0]), math.ceil(n / block[1])
    depth = max(min(64 // rows, 64 // columns), 1)
    cube = m * k * n + 6 * passes_m * passes_n * math.ceil(k / depth)
    load = m * k * passes_n + 2 * k * n * passes_m
    half_l1 = 512 * 1024
    a = m * k * 512 / product.expansion
    a *= 1 if rows * k * 512 / product.expansion <= half_l1 else passes_n
    w = k * n * 512 * (1 if k * n * 512 <= half_l1 else passes_m)
    out = m * n * 256 * (4 if split[2] > 1 else product.out_bytes) / 64
    parts = (max(cube, load), (a + w) / 110, out)
    return b * sum(part**OVERLAP for part in parts) ** (1 / OVERLAP) / hw.ai_core_clock_mhz


@given(products)
@settings(max_examples=15, deadline=None)
def test_best_tiling_matches_brute_force(product: Product) -> None:
    product = replace(product, batch=1)
    cores = range(1, 7)
    splits = [(1, m, k, n) for m in cores for k in cores for n in cores if m * k * n <= 6]
    brute = min(_us(product, SMALL, s, block) for s in splits for block in list_blocks(SMALL))
    best = best_tiling(product, SMALL, OVERLAP)
    assert time_us(best, product, SMALL) == pytest.approx(brute)


@pytest.mark.medium
@given(products, st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_more_cores_are_never_slower(product: Product, few: int, more: int) -> None:
    few_us, more_us = (time_us(best_tiling(product, hw, OVERLAP), product, hw)
                       for hw in make_chips(few, few + more))  # fmt: skip
    assert more_us <= few_us * (1 + 1e-9)


@pytest.mark.medium
@given(products, st.integers(1, 40), st.integers(1, 40))
@example(Product(2, 4, 4, 1, 1.0, 4, images=4), 22, 2)
@settings(max_examples=40, deadline=None)
def test_more_cores_are_never_slower_by_the_rule_of_thumb(
    product: Product, few: int, more: int
) -> None:
    """With the same parts of the depth, which the rule chooses for kernel gradients alone."""
    less, greater = make_chips(few, few + more)
    parts = list_default_tilings(product, greater).rows[:, 2]
    choice = list_default_tilings(product, less)
    times_us = sum_cycles(choice.stages, OVERLAP)[np.isin(choice.rows[:, 2], parts)]
    least_us = times_us.min(initial=np.inf) / less.ai_core_clock_mhz
    assert product.images or len(times_us) == len(choice.rows)
    assert time_us(choose_default_tiling(product, greater, OVERLAP), product, greater) <= (
        least_us * (1 + 1e-9)
    )


def test_rule_of_thumb_may_be_slower_with_more_cores() -> None:
    """Halves of 4 images are tried with 11 cores, of which 8 would be busy, not with 12."""
    product = Product(2, 4, 4, 1, 1.0, 4, images=4)
    tilings = [choose_default_tiling(product, hw, OVERLAP) for hw in make_chips(22, 24)]
    assert [tiling.cores_k for tiling in tilings] == [2, 4]
    times = zip(tilings, make_chips(22, 24), strict=True)
    few_us, more_us = (time_us(tiling, product, hw) for tiling, hw in times)
    assert more_us > 1.2 * few_us


def make_chips(*counts: int) -> list[Hardware]:
    """Chips that differ in their numbers of cores."""
    return [replace(HW, ai_cores_count=float(count)) for count in counts]


@pytest.mark.slow
@given(products, st.sampled_from(("batch", "m", "k", "n")), sizes)
@settings(max_examples=60, deadline=None)
def test_larger_product_is_never_faster(product: Product, side: str, more: int) -> None:
    larger = replace(product, **{side: getattr(product, side) + more})
    for find in (best_tiling, choose_default_tiling):
        before, after = (time_us(find(p, HW, OVERLAP), p, HW) for p in (product, larger))
        assert after >= before * (1 - 1e-9)
