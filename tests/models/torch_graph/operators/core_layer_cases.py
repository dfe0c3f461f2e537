"""Arguments drawn by a seed for core operators that are layers: products, norms, pools, images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.models.torch_graph.operators.core_cases import Case, Draws, Shape, case_of

# Products and distances.
case_of("mm.default")(lambda d: Case((d.floats((3, 4)), d.floats((4, 2)))))
case_of("bmm.default")(lambda d: Case((d.floats((2, 3, 4)), d.floats((2, 4, 2)))))
case_of("addmm.default")(
    lambda d: Case(
        (d.floats(d.choice((3, 2), (2,), (3, 1))), d.floats((3, 4)), d.floats((4, 2))),
        {"beta": d.choice(1, 0.5), "alpha": d.choice(1, 2.5)},
    )
)
case_of("_cdist_forward.default")(
    lambda d: Case(
        (
            d.smooth((*d.choice((), (2,)), 3, 4)),
            d.smooth((5, 4)),
            d.choice(2.0, 1.0, 3.0, float("inf"), 0.5),
            None,
        )
    )
)
case_of("_pdist_forward.default")(
    lambda d: Case((d.smooth((d.number(2, 5), 3)), d.choice(2.0, 1.0, 3.0, float("inf"))))
)
case_of("_fft_r2c.default")(
    lambda d: Case((d.floats((2, 5, 6)), d.choice((2,), (1, 2), (0, 1)), d.number(0, 2), d.flag()))
)


@case_of("_fft_c2r.default")
def _(d: Draws) -> Case:
    x = (d.smooth((2, 3, 4)) + 1j * d.smooth((2, 3, 4))).astype(np.complex64)
    return Case((x, d.choice((2,), (1, 2)), d.number(0, 2), d.choice(6, 7)))


# Convolutions.
def draw_convolution(d: Draws) -> tuple[tuple[Any, ...], int]:
    """Arguments of a convolution, and the number of its outputs."""
    axes = d.number(1, 3)
    groups = d.choice(1, 1, 2)
    inputs, outputs = 2 * groups, groups * d.number(1, 2)
    transposed = d.flag()
    kernel = tuple(d.number(1, 3) for _ in range(axes))
    stride = tuple(d.number(1, 2) for _ in range(axes))
    dilation = tuple(d.number(1, 2) for _ in range(axes))
    padding = tuple(d.number(0, (k - 1) * s) for k, s in zip(kernel, dilation, strict=True))
    extra = tuple(
        d.number(0, max(s, g) - 1) if transposed else 0
        for s, g in zip(stride, dilation, strict=True)
    )
    shape = (2, inputs, *(d.number(5, 6) for _ in range(axes)))
    weight = (inputs, outputs // groups) if transposed else (outputs, inputs // groups)
    options = (stride, padding, dilation, transposed, extra, groups)
    return (d.floats(shape), d.floats((*weight, *kernel)), *options), outputs


@case_of("convolution.default")
def _(d: Draws) -> Case:
    (x, weight, *options), outputs = draw_convolution(d)
    return Case((x, weight, d.maybe(d.floats((outputs,))), *options))


@case_of("convolution_backward.default")
def _(d: Draws) -> Case:
    (x, weight, *options), outputs = draw_convolution(d)
    stride, padding, dilation, transposed, extra, _ = options
    sizes = []
    for size, taps, step, pad, gap, more in zip(
        x.shape[2:], weight.shape[2:], stride, padding, dilation, extra, strict=True
    ):
        reach = (taps - 1) * gap
        forward = (size + 2 * pad - reach - 1) // step + 1
        sizes.append((size - 1) * step - 2 * pad + reach + 1 + more if transposed else forward)
    cotangent = d.smooth((x.shape[0], outputs, *sizes))
    mask = d.choice((True, True, True), (True, False, True), (False, True, False))
    return Case((cotangent, x, weight, (outputs,), *options, mask))


def _columns(d: Draws) -> tuple[Shape, ...]:
    kernel = (d.number(1, 3), d.number(1, 3))
    dilation = (d.number(1, 2), d.number(1, 2))
    return kernel, dilation, (d.number(0, 1), d.number(0, 1)), (d.number(1, 2), d.number(1, 2))


@case_of("col2im.default")
def _(d: Draws) -> Case:
    kernel, dilation, padding, stride = _columns(d)
    size = (6, 7)
    windows = 1
    for n, k, g, p, s in zip(size, kernel, dilation, padding, stride, strict=True):
        windows *= (n + 2 * p - g * (k - 1) - 1) // s + 1
    x = d.floats((2, 2 * kernel[0] * kernel[1], windows))
    return Case((x, size, kernel, dilation, padding, stride))


# Pools.
def draw_pool(d: Draws, axes: int, *, dilated: bool) -> tuple[Any, ...]:
    kernel = tuple(d.number(1, 3) for _ in range(axes))
    stride = d.choice((), tuple(d.number(1, 3) for _ in range(axes)))
    padding = tuple(d.number(0, k // 2) for k in kernel)
    dilation = (tuple(d.number(1, 2) for _ in range(axes)),) if dilated else ()
    return (kernel, stride, padding, *dilation, d.flag())


def draw_image(d: Draws, axes: int, *, smooth: bool = False) -> np.ndarray:
    shape = (*d.choice((2, 3), (1, 2)), *(d.number(5, 7) for _ in range(axes)))
    return d.smooth(shape) if smooth else d.floats(shape)


for _axes in (1, 2, 3):

    @case_of(f"avg_pool{_axes}d.default")
    def _(d: Draws, axes: int = _axes) -> Case:
        divisor = (d.choice(None, 3),) if axes > 1 else ()
        return Case((draw_image(d, axes), *draw_pool(d, axes, dilated=False), d.flag(), *divisor))

    if _axes > 1:

        @case_of(f"max_pool{_axes}d_with_indices.default")
        def _(d: Draws, axes: int = _axes) -> Case:
            return Case((draw_image(d, axes), *draw_pool(d, axes, dilated=True)), num_slopes=1)

    _name = "adaptive_avg_pool1d" if _axes == 1 else f"_adaptive_avg_pool{_axes}d"

    @case_of(f"{_name}.default")
    def _(d: Draws, axes: int = _axes) -> Case:
        return Case((draw_image(d, axes), tuple(d.number(1, 8) for _ in range(axes))))


case_of("_adaptive_avg_pool2d_backward.default")(
    lambda d: Case((d.smooth((2, 3, d.number(1, 5), d.number(1, 5))), d.smooth((2, 3, 5, 6))))
)


def _pooled_size(size: int, k: int, s: int, p: int, g: int, ceil: bool) -> int:
    reach = size + 2 * p - g * (k - 1) - 1
    count = (-(-reach // s) if ceil else reach // s) + 1
    return count - 1 if ceil and (count - 1) * s >= size + p else count


def _pooled(x: np.ndarray, window: Sequence[Any], gaps: Sequence[int]) -> Shape:
    kernel, stride, padding, *_, ceil = window
    axes = zip(x.shape[2:], kernel, stride or kernel, padding, gaps, strict=True)
    return (*x.shape[:2], *(_pooled_size(*axis, ceil) for axis in axes))


@case_of("avg_pool2d_backward.default")
def _(d: Draws) -> Case:
    x, window = draw_image(d, 2), draw_pool(d, 2, dilated=False)
    return Case((d.smooth(_pooled(x, window, (1, 1))), x, *window, d.flag(), d.choice(None, 3)))


@case_of("max_pool2d_with_indices_backward.default")
def _(d: Draws) -> Case:
    """Windows that don't overlap or dilate, whose maxima numpy finds."""
    x = d.smooth((2, 3, 4, 6))
    windows = x.reshape(2, 3, 2, 2, 3, 2).transpose(0, 1, 2, 4, 3, 5).reshape(2, 3, 2, 3, 4)
    places = windows.argmax(-1)
    rows = 2 * np.arange(2)[:, None] + places // 2
    columns = 2 * np.arange(3) + places % 2
    options = ((2, 2), (2, 2), (0, 0), (1, 1), d.flag())
    return Case((d.smooth((2, 3, 2, 3)), x, *options, rows * 6 + columns))


# Norms.
def draw_norm(d: Draws) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    x = d.smooth((4, 3, *d.choice((), (5,), (2, 3))))
    return x, d.maybe(d.smooth((3,))), d.maybe(d.smooth((3,)))


def draw_statistics(d: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Running statistics, in float64, which have no gradients."""
    return d.random.normal(size=3), d.random.uniform(0.5, 2, 3)


case_of("_native_batch_norm_legit_no_training.default")(
    lambda d: Case((*draw_norm(d), *draw_statistics(d), 0.1, 1e-3), num_slopes=1)
)
case_of("_native_batch_norm_legit.default")(
    lambda d: Case((*draw_norm(d), *draw_statistics(d), d.flag(), 0.1, 1e-3), num_slopes=1)
)
case_of("_native_batch_norm_legit.no_stats")(
    lambda d: Case((*draw_norm(d), True, 0.1, 1e-3), num_slopes=1)
)


@case_of("native_layer_norm.default")
def _(d: Draws) -> Case:
    shape = d.choice((4,), (3, 4))
    weight, bias = d.maybe(d.smooth(shape)), d.maybe(d.smooth(shape))
    return Case((d.smooth((2, 3, 4)), shape, weight, bias, 1e-3), num_slopes=1)


@case_of("native_layer_norm_backward.default")
def _(d: Draws) -> Case:
    shape = d.choice((4,), (3, 4))
    x = d.smooth((2, 3, 4))
    axes = tuple(range(3 - len(shape), 3))
    mean = x.mean(axes, keepdims=True)
    deviation = 1 / np.sqrt(x.var(axes, keepdims=True) + 1e-3)
    weights = d.maybe(d.smooth(shape)), d.smooth(shape)
    mask = (True, weights[0] is not None, True)
    return Case((d.smooth((2, 3, 4)), x, shape, mean, deviation, *weights, mask), num_slopes=0)


def _grouped(d: Draws) -> tuple[np.ndarray, Shape]:
    positions = d.choice((5,), (2, 3))
    x = d.smooth((2, 4, *positions))
    return x, (2, 4, int(np.prod(positions)), d.choice(1, 2, 4))


@case_of("native_group_norm.default")
def _(d: Draws) -> Case:
    x, sizes = _grouped(d)
    # PyTorch 2.13 has no gradient with a scale alone.
    affine = (d.smooth((4,)), d.smooth((4,))) if d.flag() else (None, None)
    return Case((x, *affine, *sizes, 1e-3), num_slopes=1)


@case_of("native_group_norm_backward.default")
def _(d: Draws) -> Case:
    x, sizes = _grouped(d)
    grouped = x.reshape(2, sizes[3], -1)
    mean, deviation = grouped.mean(-1), 1 / np.sqrt(grouped.var(-1) + 1e-3)
    weight = d.maybe(d.smooth((4,)))
    mask = (True, weight is not None, weight is not None)
    return Case((d.smooth(x.shape), x, mean, deviation, weight, *sizes, mask), num_slopes=0)


# PyTorch's gradient of this gradient ignores its last argument.
case_of("embedding_dense_backward.default")(
    lambda d: Case(
        (d.smooth((2, 4, 3)), d.whole(0, 4, (2, 4)), 5, d.choice(-1, 2), d.flag()), num_slopes=0
    )
)

# Images.
case_of("grid_sampler_2d.default")(
    lambda d: Case(
        (
            d.smooth((2, 3, 4, 5)),
            d.between(-1.4, 1.4, (2, 3, 4, 2)),
            d.number(0, 2),
            d.number(0, 2),
            d.flag(),
        )
    )
)
case_of("upsample_nearest2d.vec")(
    lambda d: Case((d.floats((2, 3, 4, 5)), *d.choice(((7, 3), None), (None, (1.7, 2.0)))))
)
case_of("upsample_bilinear2d.vec")(
    lambda d: Case(
        (
            d.floats((2, 3, 4, 5)),
            *d.choice(((7, 3), d.flag(), None), (None, d.flag(), (1.7, 2.0))),
        )
    )
)

# What draws, with rates at which the result is known, and of the others the shape.
case_of("native_dropout.default")(
    lambda d: Case((d.floats(d.shape()), *d.choice((0.5, False), (0.0, True), (1.0, True))))
)
case_of("rand.default", "randn.default")(lambda d: Case((d.shape(0),), num_values=0))
case_of("randperm.default")(lambda d: Case((d.number(1, 9),), num_values=0))
