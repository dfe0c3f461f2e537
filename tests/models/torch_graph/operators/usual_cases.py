"""Arguments drawn by a seed for operators beyond the core: elementwise, reductions, shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.models.torch_graph.graph import TypeOf
from tests.models.torch_graph.operators.core_cases import (
    CASES,
    Case,
    Draws,
    Shape,
    case_of,
    draw_reduced,
)

# Functions of one array, with the range of their values.
for _names, _low, _high in (
    ("hardsigmoid hardswish relu6 selu silu mish log_sigmoid square sgn isfinite", None, None),
    ("contiguous conj conj_physical detach lift_fresh_copy positive real", None, None),
    ("resolve_conj resolve_neg", None, None),
    ("erfc exp2", -2, 2),
    ("erfinv", -0.9, 0.9),
    ("digamma lgamma", 0.3, 5),
):
    for _name in _names.split():

        @case_of(f"{_name}.default")
        def _(d: Draws, low: float | None = _low, high: float | None = _high) -> Case:
            # No value is a corner, where the gradients of PyTorch's versions differ.
            shape = d.shape()
            return Case(
                (d.smooth(shape) if low is None or high is None else d.between(low, high, shape),)
            )


def _complex(d: Draws, shape: Shape) -> np.ndarray:
    return (d.smooth(shape) + 1j * d.smooth(shape)).astype(np.complex64)


case_of("_conj.default", "_conj_physical.default", "imag.default", "view_as_real.default")(
    lambda d: Case((_complex(d, d.shape()),))
)
case_of("angle.default")(lambda d: Case((d.choice(_complex(d, (2, 3)), d.smooth((3,))),)))
case_of("complex.default", "polar.default")(
    lambda d: Case((abs(d.smooth((2, 3))), d.smooth((2, 3))))
)
case_of("view_as_complex.default")(lambda d: Case((d.smooth((*d.shape(), 2)),)))
case_of("nan_to_num.default")(
    lambda d: Case(
        (
            np.asarray([1.5, np.nan, np.inf, -np.inf], np.float32),
            *d.choice((0.0, 2.0, -3.0), (1.0, 5.0, -5.0)),
        )
    )
)
case_of("softplus.default")(
    lambda d: Case((d.smooth(d.shape()), d.choice(1, 2.5), d.choice(20, 1)))
)
case_of("clip.default")(lambda d: CASES["clamp.default"](d))
case_of("clamp_min.default", "clamp_max.default")(
    lambda d: Case((d.smooth(d.shape()), d.choice(-0.3, 0.6)))
)
case_of("tril.default", "triu.default")(
    lambda d: Case((d.floats((*d.choice((), (2,)), 3, 4)), d.number(-2, 3)))
)
case_of("prelu.default")(
    lambda d: Case((d.smooth((2, 3, *d.choice((), (4,)))), d.smooth((d.choice(1, 3),))))
)


@case_of("glu.default")
def _(d: Draws) -> Case:
    shape = list(d.shape())
    axis = d.axis(shape)
    shape[axis] *= 2
    return Case((d.floats(tuple(shape)), axis))


# Functions of several arrays.
def _smooth_pair(d: Draws) -> tuple[np.ndarray, np.ndarray]:
    shape = d.shape()
    arrays = (d.smooth(shape), d.smooth(d.part(shape)))
    return arrays if d.flag() else arrays[::-1]


case_of("max.other", "min.other", "logaddexp.default", "hypot.default")(
    lambda d: Case(_smooth_pair(d))
)
case_of("rsub.Tensor")(lambda d: Case(_smooth_pair(d), {"alpha": d.choice(1, 3)}))
case_of("rsub.Scalar")(lambda d: Case((d.smooth(d.shape()), d.choice(0.5, 2), d.choice(1, 3))))
case_of("floor_divide.default")(lambda d: replace(CASES["div.Tensor"](d), num_slopes=0))
case_of("floor_divide.Scalar")(lambda d: replace(CASES["div.Scalar"](d), num_slopes=0))
case_of("addcmul.default")(
    lambda d: Case(
        (d.smooth((2, 3)), d.smooth((3,)), d.smooth((2, 1))), {"value": d.choice(1, 2.5)}
    )
)
case_of("lerp.Scalar")(
    lambda d: Case((d.smooth((2, 3)), d.smooth(d.choice((3,), (2, 3))), d.choice(0.2, 0.8)))
)
case_of("lerp.Tensor")(
    lambda d: Case((d.smooth((2, 3)), d.smooth((2, 3)), d.between(0, 1, d.choice((3,), (2, 3)))))
)
case_of("masked_fill.Scalar")(
    lambda d: Case((d.floats((2, 3)), d.mask(d.choice((3,), (2, 1), (2, 3))), d.choice(1.5, -2)))
)
case_of("masked_fill.Tensor")(
    lambda d: Case((d.floats((2, 3)), d.mask(d.choice((3,), (2, 1), (2, 3))), d.floats(())))
)
case_of("where.Scalar")(lambda d: Case((d.mask((2, 3)), d.choice(1.5, -1.0), d.choice(2.0, 0.5))))
case_of("where.ScalarOther")(lambda d: Case((d.mask((2, 3)), d.floats((3,)), d.choice(2.0, 0.5))))
case_of("where.ScalarSelf")(lambda d: Case((d.mask((2, 3)), d.choice(2.0, 0.5), d.floats((3,)))))

# Reductions.
case_of("sum.default", "all.default", "std.default", "var.default")(
    lambda d: Case((d.smooth((2, 3, *d.choice((), (2,)))),))
)
case_of("max.default", "min.default", "median.default")(lambda d: Case((d.smooth(d.shape()),)))
case_of("all.dim")(lambda d: CASES["any.dim"](d))
case_of("all.dims")(lambda d: CASES["any.dims"](d))
case_of("std.dim", "var_mean.dim")(lambda d: CASES["var.dim"](d))
case_of("std.correction", "var_mean.correction")(lambda d: CASES["var.correction"](d))
case_of("var_mean.default")(lambda d: Case((d.smooth((3, 4)), d.flag())))
case_of("cumprod.default", "logcumsumexp.default", "softmax.int", "log_softmax.int")(
    lambda d: Case(draw_reduced(d))
)
case_of("cummax.default", "cummin.default", "median.dim")(
    lambda d: Case(draw_reduced(d, smooth=True))
)
case_of("logsumexp.default")(
    lambda d: (lambda s: Case((d.floats(s), d.axes(s, 1), d.flag())))(d.shape())
)
case_of("norm.Scalar")(lambda d: Case((d.smooth((2, 3)), d.choice(2, 1, 3))))
case_of("norm.ScalarOpt_dim")(
    lambda d: (lambda s: Case((d.smooth(s), d.choice(2, 1, 3, None), d.axes(s, 1), d.flag())))(
        d.shape()
    )
)
case_of("linalg_vector_norm.default")(
    lambda d: (
        lambda s: Case((d.smooth(s), d.choice(2, 1, 3, float("inf"), 0), d.axes(s, 1), d.flag()))
    )(d.shape())
)
case_of("diff.default")(
    lambda d: Case(
        (d.floats((4, 5)), d.number(0, 3), d.choice(-1, 0, 1),
         *d.choice((), (d.floats((4, 5)),), (None, d.floats((4, 5)))))
    )
)  # fmt: skip

# Sorting and searching.
case_of("argsort.default", "msort.default")(lambda d: Case((d.smooth((3, 4)),)))
case_of("argsort.stable", "sort.stable")(
    lambda d: Case(
        (d.floats((3, 4)),),
        {"stable": True, "dim": d.number(-2, 1), "descending": d.flag()},
    )
)
CASES["argsort.default"] = lambda d: Case((d.smooth((3, 4)), d.number(-2, 1), d.flag()))
case_of("kthvalue.default")(
    lambda d: Case((d.smooth((3, 4)), d.number(1, 3), d.number(-2, 1), d.flag()))
)


def _edges(d: Draws, shape: Shape) -> np.ndarray:
    return np.sort(np.round(d.random.normal(size=shape), 1), -1)


case_of("searchsorted.Tensor")(
    lambda d: Case(
        d.choice((_edges(d, (5,)), _edges(d, (2, 3))), (_edges(d, (2, 5)), _edges(d, (2, 3)))),
        d.choice({"right": d.flag()}, {"side": d.choice("left", "right")}),
    )
)
case_of("searchsorted.Scalar")(lambda d: Case((_edges(d, (5,)), 0.2), {"right": d.flag()}))
case_of("bucketize.Tensor")(
    lambda d: Case((_edges(d, (2, 3)), _edges(d, (5,))), {"right": d.flag()})
)
case_of("bucketize.Scalar")(lambda d: Case((0.2, _edges(d, (5,))), {"right": d.flag()}))
case_of("bincount.default")(
    lambda d: Case((d.whole(0, 5, (9,)), d.maybe(d.random.normal(size=9)), 6), num_slopes=0)
)
case_of("histc.default")(
    lambda d: Case((d.smooth((9,)), d.number(1, 5), *d.choice((), (-1, 1))), num_slopes=0)
)
case_of("one_hot.default")(lambda d: Case((d.whole(0, 3, d.shape()), 4)))

# Indices.
case_of("repeat_interleave.Tensor")(
    lambda d: (lambda counts: Case((counts,), {"output_size": int(counts.sum())}))(
        d.whole(0, 3, (4,))
    )
)


@case_of("repeat_interleave.self_Tensor")
def _(d: Draws) -> Case:
    axis = d.choice(0, 1, -1, None)
    counts = d.whole(0, 3, (12 if axis is None else (3, 4)[axis],))
    return Case((d.smooth((3, 4)), counts, axis), {"output_size": int(counts.sum())})


@case_of("repeat_interleave.self_int")
def _(d: Draws) -> Case:
    axis, count = d.choice(0, 1, -1, None), d.number(1, 3)
    size = 12 if axis is None else (3, 4)[axis]
    return Case((d.smooth((3, 4)), count, axis), {"output_size": d.choice(None, size * count)})


def _slices(d: Draws, *, distinct: bool) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
    """An array, an axis, indices of it, and as many slices."""
    shape = [3, 4, 2]
    axis = d.number(-3, 2)
    count = min(d.number(1, 4), shape[axis]) if distinct else d.number(1, 4)
    indices = (
        d.random.permutation(shape[axis])[:count]
        if distinct
        else d.whole(0, shape[axis] - 1, (count,))
    )
    x = d.smooth(tuple(shape))
    shape[axis] = count
    return x, axis, indices, d.smooth(tuple(shape))


case_of("index_add.default")(
    lambda d: Case(_slices(d, distinct=False), {"alpha": d.choice(1, 2.5)})
)
case_of("index_copy.default")(lambda d: Case(_slices(d, distinct=True)))
case_of("index_fill.int_Scalar")(
    lambda d: Case((*_slices(d, distinct=False)[:3], d.choice(1.5, 2)))
)
case_of("index_fill.int_Tensor")(lambda d: Case((*_slices(d, distinct=False)[:3], d.smooth(()))))
case_of("index_reduce.default")(
    lambda d: Case(
        (*_slices(d, distinct=False), d.choice("prod", "mean", "amax", "amin")),
        {"include_self": d.flag()},
    )
)


@case_of("_unsafe_index_put.default")
def _(d: Draws) -> Case:
    indices = np.array([0, 2, 0]), np.array([1, -1, 1])
    return Case((d.floats((3, 4, 5)), indices, d.floats(d.choice((3, 5), (5,), ())), True))


case_of("scatter.reduce")(
    lambda d: Case(CASES["scatter_add.default"](d).args, {"reduce": d.choice("add", "multiply")}, 0)
)
case_of("scatter.value_reduce")(
    lambda d: Case(
        (*CASES["scatter_add.default"](d).args[:3], 1.5), {"reduce": d.choice("add", "multiply")}, 0
    )
)

# Shapes.
case_of("reshape.default", "_unsafe_view.default")(lambda d: CASES["view.default"](d))
case_of("_reshape_alias.default")(lambda d: Case((d.floats((2, 6)), (3, 4), (4, 1))))
case_of("reshape_as.default", "view_as.default")(
    lambda d: Case((d.floats((2, 6)), d.floats(d.choice((3, 4), (12,)))))
)
case_of("broadcast_to.default")(lambda d: Case((d.floats((3, 1)), d.choice((3, 2), (2, 3, 4)))))
case_of("expand_as.default")(
    lambda d: Case((d.floats((3, 1)), d.floats(d.choice((3, 2), (2, 3, 4)))))
)
case_of("flatten.using_ints")(lambda d: Case((d.floats((2, 3, 4)), *d.choice((), (1,), (0, 1)))))
case_of("unflatten.int")(
    lambda d: Case((d.floats((2, 6)), d.choice(1, -1), d.choice((2, 3), (-1, 2))))
)
case_of("transpose.int", "swapaxes.default", "swapdims.default")(
    lambda d: Case((d.floats((2, 3, 4)), d.number(-3, 2), d.number(-3, 2)))
)
case_of("movedim.int")(lambda d: Case((d.floats((2, 3, 4)), d.number(-3, 2), d.number(-3, 2))))
case_of("movedim.intlist")(
    lambda d: Case((d.floats((2, 3, 4)), d.choice((0, 1), (2, 0)), d.choice((1, 2), (-1, 0))))
)
case_of("t.default")(lambda d: Case((d.floats(d.choice((2, 3), (3,))),)))
case_of("mT.default", "numpy_T.default")(lambda d: Case((d.floats((2, 3)),)))
case_of("squeeze.default")(lambda d: Case((d.floats(d.choice((1, 3, 1), (2, 1), (1,))),)))
case_of("stack.default")(
    lambda d: Case((tuple(d.floats((2, 3)) for _ in range(d.number(1, 3))), d.number(-3, 2)))
)
case_of("concat.default")(lambda d: CASES["cat.default"](d))
case_of("unbind.int")(lambda d: Case((d.floats((2, 3)), d.number(-2, 1))))
case_of("chunk.default")(lambda d: Case((d.floats((5, 6)), d.number(1, 4), d.number(-2, 1))))
case_of("split.Tensor")(lambda d: Case((d.floats((5, 6)), d.number(1, 4), d.number(-2, 1))))
case_of("split.default", "split.sizes")(lambda d: CASES["split_with_sizes.default"](d))
case_of("narrow.default")(
    lambda d: Case((d.floats((4, 5)), d.number(-2, 1), d.choice(0, 1, -3), d.number(0, 3)))
)
case_of("roll.default")(
    lambda d: Case((d.floats((3, 4)), *d.choice(((2,),), ((1, -2), (0, 1)), ((-1,), (-1,)))))
)
case_of("unfold.default")(
    lambda d: Case((d.floats((5, 6)), d.number(-2, 1), d.number(1, 3), d.number(1, 3)))
)
case_of("pad.default")(
    lambda d: Case(
        (d.floats((2, 4, 5)), d.choice((1, 2), (0, 1, 2, 0)), "constant", d.choice(None, 1.5))
        if d.flag()
        else (d.floats((2, 3, 4, 5)), (1, 2, 0, 1), d.choice("reflect", "replicate", "circular"))
    )
)
case_of("replication_pad1d.default")(
    lambda d: Case((d.floats((2, 3, 4)), (d.number(0, 3), d.number(0, 3))))
)
case_of("channel_shuffle.default")(lambda d: Case((d.floats((2, 6, 2, 3)), d.choice(1, 2, 3))))
case_of("pixel_shuffle.default")(lambda d: Case((d.floats((2, 8, 2, 3)), d.choice(1, 2))))
case_of("pixel_unshuffle.default")(lambda d: Case((d.floats((2, 3, 4, 6)), d.choice(1, 2))))

# Arrays that are made.
case_of("arange.default")(lambda d: Case((d.choice(5, 2.5),)))
case_of("arange.start")(lambda d: Case(d.choice((1, 5), (-2, 3), (0.5, 3.0))))
case_of("ones.default", "zeros.default")(lambda d: Case((d.shape(0),)))
case_of("ones_like.default", "zeros_like.default", "zero.default")(
    lambda d: Case((d.floats((2, 3)),))
)
case_of("empty_like.default")(lambda d: Case((d.floats((2, 3)),), num_values=0))
case_of("new_empty.default")(lambda d: Case((d.floats((2, 3)), d.shape(0)), num_values=0))
case_of("new_ones.default", "new_zeros.default")(lambda d: Case((d.floats((2, 3)), d.shape(0))))
case_of("new_full.default")(
    lambda d: Case((d.choice(d.floats((2,)), d.whole(0, 3, (2,))), d.shape(0), d.choice(1.5, 2)))
)
case_of("fill.Tensor")(lambda d: Case((d.floats((2, 3)), d.floats(()))))
case_of("type_as.default")(lambda d: Case((d.whole(0, 3, (2,)), d.floats((3,)))))
case_of("to.dtype")(
    lambda d: Case((d.floats((2, 3)) * 9, TypeOf(d.choice("float32", "int64", "bool", "uint8"))))
)
case_of("to.dtype_layout")(
    lambda d: Case((d.floats((2, 3)) * 9,), {"dtype": TypeOf(d.choice("float32", "int64", "bool"))})
)

# What draws.
for _name, _args in {
    "bernoulli.default": (),
    "bernoulli.Tensor": (0.5,),
    "bernoulli.p": (0.3,),
    "exponential.default": (2.0,),
    "normal_functional.default": (1.0, 2.0),
    "uniform.default": (-1.0, 2.0),
    "rand_like.default": (),
    "randn_like.default": (),
    "randint_like.default": (5,),
    "randint_like.low_dtype": (2, 5),
}.items():

    @case_of(_name)
    def _(d: Draws, name: str = _name, args: tuple[Any, ...] = _args) -> Case:
        x = d.between(0, 1, (2, 3))
        more = (x,) if name == "bernoulli.Tensor" else args
        return Case((x, *more), num_slopes=0, num_values=0)


case_of("randint.default")(lambda d: Case((5, d.shape()), num_values=0))
case_of("randint.low")(lambda d: Case((2, 5, d.shape()), num_values=0))
case_of("dropout.default", "feature_dropout.default")(
    lambda d: Case((d.floats((2, 3, 4)), *d.choice((0.5, False), (0.0, True), (1.0, True))))
)
