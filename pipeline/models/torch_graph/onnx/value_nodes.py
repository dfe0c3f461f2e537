"""ONNX's elementwise operators and reductions, translated to PyTorch's operators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce

import numpy as np

from pipeline.models.torch_graph.graph import TypeOf
from pipeline.models.torch_graph.onnx.graph_builder import (
    OnnxNodeReader,
    OnnxValue,
    Results,
    onnx_operator,
    require_axis,
)
from pipeline.models.torch_graph.onnx.onnx_file import DTYPE_NAMES

# fmt: off
_SAME_NAMES = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp",
    "Floor", "HardSwish", "IsInf", "IsNaN", "Log", "Mish", "Neg", "Reciprocal", "Relu", "Round",
    "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Sqrt", "Tan", "Tanh",
)
# fmt: on
_PLAIN: Mapping[str, tuple[str, int]] = {
    **{name: (f"{name.lower()}.default", 1) for name in _SAME_NAMES},
    "Not": ("logical_not.default", 1),
    "BitwiseNot": ("bitwise_not.default", 1),
    # Graphs change nothing in place, so a copy isn't necessary.
    "Identity": ("alias.default", 1),
    "Add": ("add.Tensor", 2),
    "Sub": ("sub.Tensor", 2),
    "Mul": ("mul.Tensor", 2),
    "Pow": ("pow.Tensor_Tensor", 2),
    "And": ("logical_and.default", 2),
    "Or": ("logical_or.default", 2),
    "Xor": ("logical_xor.default", 2),
    "Equal": ("eq.Tensor", 2),
    "Less": ("lt.Tensor", 2),
    "LessOrEqual": ("le.Tensor", 2),
    "Greater": ("gt.Tensor", 2),
    "GreaterOrEqual": ("ge.Tensor", 2),
    "BitwiseAnd": ("bitwise_and.Tensor", 2),
    "BitwiseOr": ("bitwise_or.Tensor", 2),
    "Where": ("where.self", 3),
}
"""ATen's name and the number of tensors of operators without attributes."""
_WITH_NUMBERS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "LeakyRelu": ("leaky_relu", {"alpha": 0.01}),
    "Elu": ("elu", {"alpha": 1.0}),
    "Selu": ("elu", {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875}),
}
"""ATen's name of operators of one tensor, and their attributes with defaults in ATen's order."""
_VARIADIC: Mapping[str, str] = {
    "Max": "maximum.default",
    "Min": "minimum.default",
    "Sum": "add.Tensor",
    "Mean": "add.Tensor",
}
"""ATen's operator of two tensors that is repeated, for operators of several tensors."""
_REDUCTIONS: Mapping[str, str] = {
    "ReduceMean": "mean.dim",
    "ReduceSum": "sum.dim_IntList",
    "ReduceProd": "prod.default",
    "ReduceMax": "amax.default",
    "ReduceMin": "amin.default",
    "ReduceLogSumExp": "logsumexp.default",
}


@onnx_operator(*_PLAIN)
def read_plain(reader: OnnxNodeReader) -> Results:
    """Read an operator without attributes."""
    op, num_tensors = _PLAIN[reader.node.op]
    return reader.graph.call(op, *map(reader.value, range(num_tensors)))


@onnx_operator(*_WITH_NUMBERS)
def read_with_numbers(reader: OnnxNodeReader) -> Results:
    """Read a function of one tensor and some numbers."""
    name, defaults = _WITH_NUMBERS[reader.node.op]
    numbers = (reader.attribute(attribute, default) for attribute, default in defaults.items())
    return reader.graph.call(f"{name}.default", reader.value(), *numbers)


@onnx_operator("Gelu")
def read_gelu(reader: OnnxNodeReader) -> Results:
    """Read the GELU, exact or by tanh."""
    approximation = reader.attribute("approximate", "none")
    return reader.graph.call("gelu.default", reader.value(), approximate=approximation)


@onnx_operator(*_VARIADIC)
def read_variadic(reader: OnnxNodeReader) -> Results:
    """Read the elementwise maximum, minimum, sum or mean of tensors."""
    op = _VARIADIC[reader.node.op]
    values = reader.values()
    if not values:
        raise ValueError("input 0 is missing")
    result = reduce(lambda x, other: reader.graph.call(op, x, other), values)
    if reader.node.op == "Mean":
        count = reader.graph.constant(np.float32(len(values)))
        result = reader.graph.call("div.Tensor", result, count)
    return result


@onnx_operator("Div")
def read_divide(reader: OnnxNodeReader) -> Results:
    """Read a division. Quotients of integers are rounded towards zero."""
    x = reader.value(0)
    other = reader.value(1)
    if x.is_float or other.is_float:
        return reader.graph.call("div.Tensor", x, other)
    return reader.graph.call("div.Tensor_mode", x, other, rounding_mode="trunc")


@onnx_operator("Mod")
def read_remainder(reader: OnnxNodeReader) -> Results:
    """Read a remainder, with the sign of the divisor, or of x with `fmod`."""
    op = "fmod.Tensor" if reader.attribute("fmod", 0) else "remainder.Tensor"
    return reader.graph.call(op, reader.value(0), reader.value(1))


@onnx_operator("Cast")
def read_cast(reader: OnnxNodeReader) -> Results:
    """Read a cast. Casts between floats are ignored: activations have the recipe's dtype."""
    name = DTYPE_NAMES.get(reader.attribute("to", 0))
    if name is None:
        raise ValueError(f"a cast to type {reader.attribute('to', 0)} of ONNX")
    x = reader.value()
    is_float = name.startswith(("float", "bfloat"))
    if x.is_float and is_float:
        return x
    dtype = TypeOf("float32" if is_float else name)
    return reader.graph.call("_to_copy.default", x, dtype=dtype)


@onnx_operator("PRelu")
def read_prelu(reader: OnnxNodeReader) -> Results:
    """Read x, or slope * x below 0, with slopes that broadcast."""
    graph = reader.graph
    x = reader.value(0)
    is_positive = graph.call("gt.Scalar", x, 0.0)
    return graph.call("where.self", is_positive, x, graph.call("mul.Tensor", x, reader.value(1)))


@onnx_operator("HardSigmoid")
def read_hard_sigmoid(reader: OnnxNodeReader) -> Results:
    """Read alpha * x + beta between 0 and 1."""
    graph = reader.graph
    alpha = reader.attribute("alpha", 0.2)
    beta = reader.attribute("beta", 0.5)
    if math.isclose(alpha, 1 / 6, rel_tol=1e-5) and beta == 0.5:
        return graph.call("hardsigmoid.default", reader.value())
    scaled = graph.call("mul.Tensor", reader.value(), graph.constant(np.float32(alpha)))
    shifted = graph.call("add.Tensor", scaled, graph.constant(np.float32(beta)))
    return graph.call("clamp.default", shifted, 0.0, 1.0)


@onnx_operator("Clip")
def read_clip(reader: OnnxNodeReader) -> Results:
    """Read the limitation of values to bounds, each of which may be missing."""
    low = reader.number("min", 1, None)
    high = reader.number("max", 2, None)
    if (low, high) == (0, 6):
        return reader.graph.call("relu6.default", reader.value())
    return reader.graph.call("clamp.default", reader.value(), low, high)


@onnx_operator("Softmax", "LogSoftmax")
def read_softmax(reader: OnnxNodeReader) -> Results:
    """Read softmax over an axis; before opset 13 over all axes from `axis` on."""
    graph = reader.graph
    op = "softmax.int" if reader.node.op == "Softmax" else "log_softmax.int"
    x = reader.value()
    axis = reader.axis(-1 if reader.opset >= 13 else 1)
    if reader.opset >= 13 or axis == x.ndim - 1:
        return graph.call(op, x, axis)
    flat = graph.call("flatten.using_ints", x, axis, -1)
    return graph.call("view.default", graph.call(op, flat, axis), graph.shape(x))


def _read_reduced_axes(reader: OnnxNodeReader) -> tuple[int, ...]:
    """Return the axes of a reduction; by default all, or none with `noop_with_empty_axes`."""
    axes = reader.integers("axes", 1)
    ndim = reader.value().ndim
    if not axes:
        return () if reader.attribute("noop_with_empty_axes", 0) else tuple(range(ndim))
    return tuple(require_axis(axis, ndim) for axis in axes)


def _keeps_axes(reader: OnnxNodeReader) -> bool:
    return bool(reader.attribute("keepdims", 1))


def _reduce(reader: OnnxNodeReader, op: str, x: OnnxValue) -> OnnxValue:
    axes = _read_reduced_axes(reader)
    return reader.graph.call(op, x, axes, _keeps_axes(reader)) if axes else x


@onnx_operator(*_REDUCTIONS)
def read_reduction(reader: OnnxNodeReader) -> Results:
    """Read a mean, sum, product, maximum, minimum or log of summed exponentials over axes."""
    return _reduce(reader, _REDUCTIONS[reader.node.op], reader.value())


@onnx_operator("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum")
def read_norm(reader: OnnxNodeReader) -> Results:
    """Read a norm, the sum of squares, or the logarithm of a sum, over axes."""
    graph = reader.graph
    op = reader.node.op
    x = reader.value()
    if op != "ReduceLogSum":
        x = graph.call("abs.default" if op == "ReduceL1" else "square.default", x)
    x = _reduce(reader, "sum.dim_IntList", x)
    final_ops = {"ReduceL2": "sqrt.default", "ReduceLogSum": "log.default"}
    return graph.call(final_ops[op], x) if op in final_ops else x


@onnx_operator("ArgMax", "ArgMin")
def read_arg_extreme(reader: OnnxNodeReader) -> Results:
    """Read the index of the largest or the smallest value of an axis."""
    op = f"{reader.node.op.lower()}.default"
    return reader.graph.call(op, reader.value(), reader.axis(0), _keeps_axes(reader))


@onnx_operator("CumSum")
def read_running_sum(reader: OnnxNodeReader) -> Results:
    """Read running sums along an axis, from its end with `reverse`."""
    graph = reader.graph
    x = reader.value(0)
    (axis,) = graph.fixed_integers(reader.value(1))
    axis = require_axis(axis, x.ndim)
    is_reversed = bool(reader.attribute("reverse", 0))

    def reverse(value: OnnxValue) -> OnnxValue:
        return graph.call("flip.default", value, (axis,)) if is_reversed else value

    y = reverse(graph.call("cumsum.default", reverse(x), axis))
    return graph.call("sub.Tensor", y, x) if reader.attribute("exclusive", 0) else y


@onnx_operator("Einsum")
def read_einsum(reader: OnnxNodeReader) -> Results:
    """Read a sum of products by Einstein's convention."""
    equation = reader.attribute("equation", "")
    return reader.graph.call("einsum.default", equation, reader.values())


@onnx_operator("ai.onnx.ml.Scaler")
def read_scaler(reader: OnnxNodeReader) -> Results:
    """Read (x - offset) * scale, which is scikit-learn's StandardScaler."""
    graph = reader.graph
    offset = graph.constant(np.array(reader.attribute("offset", ()), np.float32))
    scale = graph.constant(np.array(reader.attribute("scale", ()), np.float32))
    return graph.call("mul.Tensor", graph.call("sub.Tensor", reader.value(), offset), scale)


@onnx_operator("ai.onnx.ml.ArrayFeatureExtractor")
def read_array_feature_extractor(reader: OnnxNodeReader) -> Results:
    """Read columns of samples, which scikit-learn's ColumnTransformer chooses."""
    x = reader.value(0)
    indices = reader.graph.fixed_integers(reader.value(1))
    width = reader.fixed_sizes(x.ndim - 1)[-1]
    if not indices or min(indices) < 0 or max(indices) >= width:
        raise ValueError(f"reads columns that aren't among the {width:,} of a sample")
    index = reader.graph.constant(np.array(indices))
    return reader.graph.call("index_select.default", x, x.ndim - 1, index)


@onnx_operator("ai.onnx.ml.Normalizer", "LpNormalization")
def read_normalizer(reader: OnnxNodeReader) -> Results:
    """Read x divided by its norm along an axis. Zeros stay zeros."""
    graph = reader.graph
    x = reader.value()
    is_of_rows = reader.node.op.endswith("Normalizer")
    axis = 1 if is_of_rows else reader.axis(-1)
    norm = reader.attribute("norm", "MAX") if is_of_rows else f"L{reader.attribute('p', 2)}"
    size = graph.call("abs.default", x)
    if norm == "MAX":
        total = graph.call("amax.default", size, (axis,), True)
    elif norm == "L1":
        total = graph.call("sum.dim_IntList", size, (axis,), True)
    elif norm == "L2":
        squares = graph.call("mul.Tensor", x, x)
        total = graph.call("sum.dim_IntList", squares, (axis,), True)
    else:
        raise ValueError(f"norm {norm} isn't computed here; must be MAX, L1 or L2")
    is_zero = graph.call("eq.Scalar", total, 0)
    total = graph.call("add.Tensor", total, is_zero)
    # The root of a number that isn't zero has a finite gradient.
    return graph.call("div.Tensor", x, graph.call("sqrt.default", total) if norm == "L2" else total)
