"""Arguments drawn by a seed for each core operator of ATen; no torch is necessary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.models.torch_graph.graph import TypeOf

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Arguments of an operator: arrays of numpy in place of tensors.

    float32 arrays are differentiated, unless `num_slopes` is 0.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    num_slopes: int | None = None
    """Number of results, from the first, whose gradients are compared; None for all."""
    num_values: int | None = None
    """Number of results, from the first, whose values are compared; None for all. Of the others,
    such as random numbers, the shapes and dtypes are."""
    dtype: str = "float64"
    """Dtype in which torch computes the operator."""


class Draws:
    """Arrays and numbers drawn by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def number(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`."""
        return int(self.random.integers(low, high + 1))

    def flag(self) -> bool:
        """True or false."""
        return bool(self.random.integers(2))

    def choice(self, *options: Any) -> Any:
        """One of several options."""
        return options[self.number(0, len(options) - 1)]

    def shape(self, low: int = 1, high: int = 4) -> Shape:
        """A shape of `low` to `high` axes of sizes 1 to 4."""
        return tuple(self.number(1, 4) for _ in range(self.number(low, high)))

    def floats(self, shape: Shape) -> np.ndarray:
        """Normal numbers; in one of three draws halves, many of which are equal."""
        x = self.random.normal(size=shape)
        return np.asarray(np.round(x * 2) / 2 if self.number(0, 2) == 0 else x, np.float32)

    def smooth(self, shape: Shape) -> np.ndarray:
        """Normal numbers, all different."""
        return np.asarray(self.random.normal(size=shape), np.float32)

    def between(self, low: float, high: float, shape: Shape) -> np.ndarray:
        """Uniform numbers."""
        return np.asarray(self.random.uniform(low, high, shape), np.float32)

    def whole(self, low: int, high: int, shape: Shape) -> np.ndarray:
        """Whole numbers from `low` to `high`."""
        return np.asarray(self.random.integers(low, high + 1, shape))

    def mask(self, shape: Shape) -> np.ndarray:
        """Booleans."""
        return np.asarray(self.random.integers(0, 2, shape), np.bool_)

    def part(self, shape: Shape) -> Shape:
        """A shape that broadcasts to a shape: some sizes are 1, leading axes may be missing."""
        sizes = [size if self.number(0, 2) else 1 for size in shape]
        return tuple(sizes[self.number(0, len(shape)) :])

    def axis(self, shape: Sequence[int]) -> int:
        """An axis, which may be counted from the end."""
        return self.number(-len(shape), len(shape) - 1)

    def axes(self, shape: Sequence[int], low: int = 0) -> tuple[int, ...]:
        """Several axes."""
        count = self.number(low, len(shape))
        axes = self.random.permutation(len(shape))[:count]
        return tuple(int(axis) - (len(shape) if self.flag() else 0) for axis in axes)

    def maybe(self, array: np.ndarray) -> np.ndarray | None:
        """The array or None."""
        return array if self.flag() else None


CASES: dict[str, Callable[[Draws], Case]] = {}
"""A function that draws a case, for each operator."""


def case_of(*names: str) -> Callable[[Callable[[Draws], Case]], Callable[[Draws], Case]]:
    """Return a decorator that registers a function for operators such as `relu.default`."""

    def register(function: Callable[[Draws], Case]) -> Callable[[Draws], Case]:
        for name in names:
            assert name not in CASES, name
            CASES[name] = function
        return function

    return register


def draw_case(name: str, seed: int) -> Case:
    """Return the case of an operator that a seed draws."""
    return CASES[name](Draws(seed))


# Functions of one array, with the range of their values.
for _names, _low, _high in (
    ("abs relu sigmoid sign ceil floor round trunc neg isnan isinf", None, None),
    ("alias clone", None, None),
    ("sin cos tan sinh cosh tanh atan asinh erf exp expm1", -2, 2),
    ("acos asin atanh", -0.9, 0.9),
    ("acosh", 1.1, 5),
    ("log log10 log2 rsqrt sqrt reciprocal", 0.1, 5),
    ("log1p", -0.8, 5),
):
    for _name in _names.split():

        @case_of(f"{_name}.default")
        def _(d: Draws, low: float | None = _low, high: float | None = _high) -> Case:
            shape = d.shape(0)
            x = d.floats(shape) if low is None or high is None else d.between(low, high, shape)
            return Case((x,))


case_of("logical_not.default", "bitwise_not.default")(lambda d: Case((d.mask(d.shape()),)))
case_of("gelu.default")(
    lambda d: Case((d.floats(d.shape()),), {"approximate": d.choice("none", "tanh")})
)
case_of("leaky_relu.default")(lambda d: Case((d.floats(d.shape()), d.choice(0.01, 0.2))))
case_of("hardtanh.default")(
    lambda d: Case((d.floats(d.shape()), d.choice(-1.0, -0.5), d.choice(1.0, 2.0)))
)
case_of("elu.default")(
    lambda d: Case((d.floats(d.shape()), d.choice(1.0, 1.7), d.choice(1.0, 0.8), 1.0))
)
# No value equals a bound: the gradient there is 1 in PyTorch 2.13 and 0 in 2.14.
case_of("clamp.default")(
    lambda d: Case((d.floats(d.shape()), *d.choice((-0.6, 0.6), (None, 0.6), (-1.1,))))
)
case_of("scalar_tensor.default")(lambda d: Case((d.choice(2.5, -1.0),)))


@case_of("clamp.Tensor")
def _(d: Draws) -> Case:
    shape = d.shape()
    low = d.floats(d.part(shape))
    high = np.asarray(low.max() + abs(d.floats(d.part(shape))))
    return Case((d.floats(shape), *d.choice((low, high), (low, None), (None, high))))


def _pair(d: Draws, *, whole: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays, of which either broadcasts to the other."""
    shape = d.shape()
    other = d.part(shape)
    make = (lambda s: d.whole(-8, 8, s)) if whole else d.floats
    arrays = (make(shape), make(other))
    return arrays if d.flag() else arrays[::-1]


case_of(
    "eq.Tensor", "ne.Tensor", "lt.Tensor", "le.Tensor", "gt.Tensor", "ge.Tensor", "mul.Tensor",
    "maximum.default", "minimum.default",
)(lambda d: Case(_pair(d, whole=d.number(0, 3) == 0)))  # fmt: skip
case_of("eq.Scalar", "ne.Scalar", "lt.Scalar", "le.Scalar", "gt.Scalar", "ge.Scalar", "mul.Scalar")(
    lambda d: Case((d.floats(d.shape(0)), d.choice(0.5, 0, -1.0, 2)))
)
case_of("atan2.default")(lambda d: Case((d.smooth((2, 3)), d.smooth(d.choice((3,), (2, 3), ())))))
case_of("logical_and.default", "logical_or.default", "logical_xor.default")(
    lambda d: Case((d.mask((2, 3)), d.choice(d.mask((3,)), d.whole(0, 2, (2, 1)))))
)
case_of("bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor")(
    lambda d: Case(d.choice(_pair(d, whole=True), (d.mask((2, 3)), d.mask((3,)))))
)
case_of("bitwise_and.Scalar", "bitwise_or.Scalar", "bitwise_xor.Scalar")(
    lambda d: Case((d.whole(-9, 9, d.shape()), d.number(-9, 9)))
)
case_of("add.Tensor", "sub.Tensor")(
    lambda d: Case(_pair(d, whole=d.flag()), {"alpha": d.choice(1, 3)})
)
case_of("add.Scalar", "sub.Scalar")(
    lambda d: Case((d.floats(d.shape(0)), d.choice(0.5, 2), d.choice(1, 3)))
)


@case_of("div.Tensor", "div.Tensor_mode", "fmod.Tensor", "remainder.Tensor")
def _(d: Draws) -> Case:
    shape = d.shape()
    divisor = d.between(0.4, 2.5, d.part(shape)) * d.choice(-1, 1)
    return Case((5 * d.smooth(shape), np.asarray(divisor, np.float32)))


@case_of("div.Scalar", "div.Scalar_mode", "fmod.Scalar", "remainder.Scalar")
def _(d: Draws) -> Case:
    return Case((d.smooth(d.shape()) * 5, d.choice(0.7, -1.3, 3)))


def _with_mode(name: str) -> Callable[[Draws], Case]:
    def draw(d: Draws) -> Case:
        mode = d.choice(None, "trunc", "floor")
        if d.flag():
            divisor = d.choice(-3, 2)
            x = d.whole(-9, 9, (2, 3))
            other = divisor if "Scalar" in name else np.full((3,), divisor)
            return Case((x, other), {"rounding_mode": mode})
        plain = CASES[name.replace("_mode", "")](d)
        return Case(plain.args, {"rounding_mode": mode})

    return draw


for _name in ("div.Tensor_mode", "div.Scalar_mode"):
    CASES[_name] = _with_mode(_name)

case_of("pow.Tensor_Scalar")(
    lambda d: Case((d.between(0.1, 3, d.shape()), d.choice(2, 3, -1, 0.5, 1.7, 0)))
)
case_of("pow.Tensor_Tensor")(
    lambda d: Case((d.between(0.1, 3, (2, 3)), d.smooth(d.choice((2, 3), (3,)))))
)
case_of("pow.Scalar")(lambda d: Case((d.choice(2, 0.5, 3.0), d.smooth(d.shape()))))


@case_of("where.self")
def _(d: Draws) -> Case:
    shape = d.shape()
    return Case((d.mask(d.part(shape)), d.floats(shape), d.floats(d.part(shape))))


# Reductions.
def draw_reduced(d: Draws, *, smooth: bool = False) -> tuple[np.ndarray, int]:
    """An array, whose values all differ if it is smooth, and an axis."""
    shape = d.shape()
    return d.smooth(shape) if smooth else d.floats(shape), d.axis(shape)


case_of("mean.default", "prod.default")(lambda d: Case((d.floats(d.shape(0)),)))
case_of("any.default")(lambda d: Case((d.choice(d.mask(d.shape()), d.floats(d.shape())),)))
case_of("any.dim")(lambda d: Case((*draw_reduced(d), d.flag())))
case_of("max.dim", "min.dim", "argmax.default", "argmin.default", "prod.dim_int")(
    lambda d: Case((*draw_reduced(d), d.flag()))
)
case_of("cumsum.default")(lambda d: Case(draw_reduced(d)))
case_of("_softmax.default", "_log_softmax.default")(lambda d: Case((*draw_reduced(d), False)))


@case_of("amax.default", "amin.default", "mean.dim", "sum.dim_IntList", "any.dims")
def _(d: Draws) -> Case:
    shape = d.shape()
    return Case((d.floats(shape), d.axes(shape, 1), d.flag()))


@case_of("var.dim")
def _(d: Draws) -> Case:
    shape = (d.number(2, 4), *(size + 1 for size in d.shape(0, 3)))
    return Case((d.floats(shape), d.axes(shape, 1), d.flag(), d.flag()))


@case_of("var.correction")
def _(d: Draws) -> Case:
    shape = (d.number(3, 4), *(size + 2 for size in d.shape(0, 2)))
    dims = d.choice(None, d.axes(shape, 1))
    return Case((d.floats(shape), dims), {"correction": d.choice(0, 1, 2), "keepdim": d.flag()})


# Sorting.
@case_of("sort.default")
def _(d: Draws) -> Case:
    shape = d.shape()
    return Case((d.smooth(shape), d.axis(shape), d.flag()))


@case_of("topk.default")
def _(d: Draws) -> Case:
    shape = d.shape()
    axis = d.axis(shape)
    return Case((d.smooth(shape), d.number(1, shape[axis]), axis, d.flag(), True))


# Shapes.
case_of("permute.default")(
    lambda d: (lambda s: Case((d.floats(s), tuple(map(int, d.random.permutation(len(s)))))))(
        d.shape()
    )
)


@case_of("view.default")
def _(d: Draws) -> Case:
    sizes = d.choice((24,), (4, 6), (2, 3, 4), (2, 2, 3, 2))
    return Case((d.floats((2, 3, 4)), d.choice(sizes, (-1, *sizes[1:]))))


@case_of("as_strided.default")
def _(d: Draws) -> Case:
    x = d.floats(d.choice((2, 3, 4), (24,)))
    layout = d.choice(((3, 4), (4, 1)), ((2, 2), (1, 3)), ((3, 3), (1, 1)), ((2, 3, 2), (0, 2, 5)))
    return Case((x, *layout, d.choice(None, 2)))


@case_of("expand.default")
def _(d: Draws) -> Case:
    target = d.shape(2)
    shape = tuple(1 if d.flag() else size for size in target[d.number(0, 1) :])
    sizes = tuple(
        -1 if n >= len(target) - len(shape) and d.flag() and shape[n - len(target)] == size
        else size
        for n, size in enumerate(target)
    )  # fmt: skip
    return Case((d.floats(shape), sizes))


case_of("repeat.default")(
    lambda d: Case((d.floats((2, 3)), d.choice((2, 1), (1, 3), (2, 1, 2), (3, 2, 2, 1))))
)
case_of("flip.default")(lambda d: (lambda s: Case((d.floats(s), d.axes(s))))(d.shape()))
case_of("unsqueeze.default")(
    lambda d: (lambda s: Case((d.floats(s), d.number(-len(s) - 1, len(s)))))(d.shape(0))
)
case_of("squeeze.dim")(lambda d: Case((d.floats((1, 3, 1)), d.number(-3, 2))))
case_of("squeeze.dims")(lambda d: Case((d.floats((1, 3, 1)), d.choice((0,), (0, 2), (-1, 1)))))
case_of("diagonal.default")(
    lambda d: Case((d.floats((2, 3, 4)), d.number(-1, 2), *d.choice((0, 1), (2, 1), (-1, 0))))
)


@case_of("cat.default")
def _(d: Draws) -> Case:
    shape = d.shape()
    axis = d.axis(shape)
    parts = []
    for _ in range(d.number(1, 3)):
        sizes = list(shape)
        sizes[axis] = d.number(1, 3)
        parts.append(d.floats(tuple(sizes)))
    return Case((tuple(parts), axis))


@case_of("select.int")
def _(d: Draws) -> Case:
    shape = d.shape()
    axis = d.axis(shape)
    return Case((d.floats(shape), axis, d.number(-shape[axis], shape[axis] - 1)))


_RANGES = ((None, None, 1), (1, 5, 2), (-3, -1, 1), (0, 9223372036854775807, 3), (2, 2, 1))


@case_of("slice.Tensor")
def _(d: Draws) -> Case:
    shape = (6, 5, 7)
    return Case((d.floats(shape), d.axis(shape), *d.choice(*_RANGES)))


@case_of("slice_scatter.default")
def _(d: Draws) -> Case:
    axis = d.number(-2, 1)
    start, end, step = d.choice(*_RANGES[:4])
    shape = [6, 7]
    shape[axis] = len(range(shape[axis])[slice(start, end, step)])
    return Case((d.floats((6, 7)), d.floats(tuple(shape)), axis, start, end, step))


@case_of("select_scatter.default")
def _(d: Draws) -> Case:
    axis = d.number(-3, 2)
    shape = [2, 3, 4]
    size = shape.pop(axis)
    return Case((d.floats((2, 3, 4)), d.floats(tuple(shape)), axis, d.number(-size, size - 1)))


case_of("split_with_sizes.default")(
    lambda d: Case((d.floats((6, 6)), d.choice((1, 2, 3), (6,), (2, 4), (0, 6)), d.number(-2, 1)))
)
case_of("constant_pad_nd.default")(
    lambda d: Case((
        d.floats((3, 4)),
        d.choice((1, 2), (0, 1, 2, 0), (-1, 2, 1, -1)),
        d.choice(0, 1.5),
    ))
)  # fmt: skip
for _axes in (1, 2, 3):

    @case_of(f"reflection_pad{_axes}d.default")
    def _(d: Draws, axes: int = _axes) -> Case:
        pads = tuple(d.number(0, 2) for _ in range(2 * axes))
        return Case((d.floats((*d.choice((2,), (2, 2)), *(d.number(3, 4),) * axes)), pads))

    if _axes > 1:

        @case_of(f"replication_pad{_axes}d.default")
        def _(d: Draws, axes: int = _axes) -> Case:
            pads = tuple(d.number(0, 3) for _ in range(2 * axes))
            return Case((d.floats((*d.choice((2,), (2, 2)), *(d.number(2, 4),) * axes)), pads))


# Arrays that are made.
case_of("arange.start_step")(
    lambda d: Case(d.choice((0, 5, 1), (1, 9, 2), (5, -3, -2), (0.5, 2.6, 0.25)))
)
case_of("full.default")(lambda d: Case((d.shape(0), d.choice(1.5, 2, True))))
case_of("full_like.default")(
    lambda d: Case((d.choice(d.floats((2, 3)), d.whole(0, 3, (2, 3))), d.choice(1.5, 2)))
)
case_of("fill.Scalar")(lambda d: Case((d.floats(d.shape(0)), d.choice(1.5, 2))))
case_of("copy.default")(
    lambda d: Case((d.floats((2, 3)), d.floats(d.choice((2, 3), (3,), (2, 1), ()))), num_slopes=0)
)
case_of("_to_copy.default")(
    lambda d: Case(
        (d.choice(d.floats((2, 3)) * 9, d.whole(-3, 3, (2, 3)), d.mask((3,))),),
        {"dtype": TypeOf(d.choice("float32", "int64", "int32", "bool", "uint8"))},
    )
)
case_of("empty.memory_format")(lambda d: Case((d.shape(0),), num_values=0))
case_of("empty_strided.default")(lambda d: Case(((2, 3), (3, 1)), num_values=0))
case_of("sym_size.int")(lambda d: Case((d.floats((2, 3, 4)), d.number(-3, 2))))
case_of("sym_numel.default")(lambda d: Case((d.floats(d.shape(0)),)))
case_of("sym_stride.int")(lambda d: Case((d.floats((2, 3, 4)), d.number(-3, 2))))
case_of("sym_storage_offset.default")(lambda d: Case((d.floats(d.shape(0)),)))
