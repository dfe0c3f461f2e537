"""Units and work of JAX's primitives on the device."""

from __future__ import annotations

from typing import Literal

Kind = Literal[
    "view", "elementwise", "reduce", "conv", "matmul", "window", "move", "gather", "scatter",
    "sort", "random", "cumulative", "loop_view", "collective", "unsupported",
]  # fmt: skip

VIEWS = frozenset(
    {
        "reshape", "squeeze", "expand_dims", "stop_gradient", "copy", "copy_p", "name",
        "sharding_constraint", "pvary", "pbroadcast", "layout_constraint",
        "bitcast_convert_type", "real", "reduce_precision", "reshard", "reduced_vary_cast_p",
        "vary_unreduced_cast_p", "with_memory_space_constraint", "from_edtype", "to_edtype",
        "random_wrap", "random_unwrap",
    }
)  # fmt: skip
"""No data moves: another shape for the same memory."""

SIMPLE = frozenset(
    {
        "add", "add_any", "sub", "mul", "neg", "max", "min", "abs", "sign", "square", "eq", "ne",
        "lt", "le", "gt", "ge", "and", "or", "xor", "not", "select_n", "clamp", "floor", "ceil",
        "round", "convert_element_type", "is_finite", "shift_left", "shift_right_logical",
        "shift_right_arithmetic", "population_count", "clz", "nextafter", "conj", "imag",
    }
)  # fmt: skip
"""One pass of the vector unit over its operands."""

HEAVY = frozenset(
    {
        "div", "rem", "exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "tanh",
        "logistic", "pow", "integer_pow", "sin", "cos", "tan", "asin", "acos", "atan", "atan2",
        "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "erf_inv", "lgamma", "digamma",
        "bessel_i0e", "bessel_i1e", "igamma", "igammac", "igamma_grad_a", "polygamma", "zeta",
        "regularized_incomplete_beta",
    }
)  # fmt: skip
"""Several passes: the vector unit iterates or interpolates."""

VIRTUAL = frozenset({"broadcast_in_dim", "iota", "tile", "axis_index", "empty", "zeros_like"})
"""Computed by every kernel that reads them."""

REDUCTIONS = frozenset(
    {
        "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
        "reduce_xor", "argmax", "argmin", "reduce",
    }
)  # fmt: skip

WINDOWS = frozenset(
    {
        "reduce_window_max", "reduce_window_min", "reduce_window_sum", "reduce_window",
        "select_and_scatter_add", "select_and_scatter", "select_and_gather_add", "max_pool",
    }
)  # fmt: skip

CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})

MOVES = frozenset(
    {
        "transpose", "concatenate", "slice", "pad", "rev", "dynamic_slice",
        "dynamic_update_slice", "split",
    }
)  # fmt: skip

SCATTERS = frozenset(
    {
        "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter-min",
        "scatter_min", "scatter-max", "scatter_max", "scatter-sub", "scatter_sub",
    }
)  # fmt: skip

GENERATORS = ("threefry", "philox", "rng_")

LOOP_VIEWS = frozenset({"scan_slice", "scan_stack", "scan_carry"})

COLLECTIVES = frozenset(
    {
        "psum", "psum2", "psum_invariant", "unreduced_psum", "all_gather", "all_gather_invariant",
        "all_gather_reduced", "reduce_scatter", "unreduced_reduce_scatter", "pmax", "pmin",
        "all_to_all", "ppermute",
    }
)  # fmt: skip

_SETS: tuple[tuple[frozenset[str], Kind], ...] = (
    (VIEWS, "view"),
    (SIMPLE | HEAVY | VIRTUAL, "elementwise"),
    (REDUCTIONS, "reduce"),
    (WINDOWS, "window"),
    (CUMULATIVE, "cumulative"),
    (MOVES, "move"),
    (SCATTERS, "scatter"),
    (LOOP_VIEWS, "loop_view"),
    (COLLECTIVES, "collective"),
    (frozenset({"conv_general_dilated"}), "conv"),
    (frozenset({"dot_general"}), "matmul"),
    (frozenset({"gather"}), "gather"),
    (frozenset({"sort", "top_k", "approx_top_k"}), "sort"),
)
_KINDS: dict[str, Kind] = {name: kind for names, kind in _SETS for name in names}

OPS: dict[str, str] = {
    "add": "Add", "add_any": "AddN", "sub": "Sub", "mul": "Mul", "div": "RealDiv", "neg": "Neg",
    "max": "Maximum", "min": "Minimum", "exp": "Exp", "log": "Log", "log1p": "Log1p",
    "tanh": "Tanh", "logistic": "Sigmoid", "sqrt": "Sqrt", "rsqrt": "Rsqrt", "pow": "Pow",
    "integer_pow": "Pow", "square": "Square", "abs": "Abs", "select_n": "SelectV2",
    "convert_element_type": "Cast", "eq": "Equal", "ne": "NotEqual", "gt": "Greater",
    "ge": "GreaterEqual", "lt": "Less", "le": "LessEqual", "broadcast_in_dim": "Tile",
    "erf": "Erf", "sign": "Sign", "clamp": "ClipByValue", "is_finite": "IsFinite",
    "transpose": "TransposeD", "concatenate": "ConcatD", "slice": "StridedSliceD", "pad": "PadD",
    "rev": "ReverseV2", "dynamic_slice": "Slice", "dynamic_update_slice": "StridedSliceAssign",
    "split": "SplitD", "gather": "GatherV2", "sort": "Sort", "top_k": "TopKD",
    "reduce_sum": "ReduceSumD", "reduce_max": "ReduceMaxD", "reduce_min": "ReduceMinD",
    "reduce_prod": "ReduceProdD", "argmax": "ArgMaxD", "argmin": "ArgMinD", "cumsum": "CumsumD",
    "cumprod": "CumprodD",
}  # fmt: skip
"""The vendor's names, for the ones that have one; others keep JAX's."""


def kind_of(primitive: str) -> Kind:
    """Return the kind of a primitive on the device."""
    if primitive in _KINDS:
        return _KINDS[primitive]
    return "random" if primitive.startswith(("random_", *GENERATORS)) else "unsupported"


def passes_of(primitive: str) -> tuple[float, float]:
    """Return simple and heavy operations per output element of a primitive."""
    if primitive in HEAVY:
        return 0.0, 1.0
    return (1.0, 0.0) if primitive in SIMPLE else (0.0, 0.0)
