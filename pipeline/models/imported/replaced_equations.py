"""Equations of a jaxpr that the package's lowerings compute, and why they can't compute others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pipeline.models.lowerings.conv2d import conv2d
from pipeline.models.lowerings.conv2d_chwn import conv2d_chwn
from pipeline.models.lowerings.dense import multiply_dense
from pipeline.models.lowerings.max_pool import pool_max
from pipeline.models.lowerings.problem.image_layout import Layout, swap_layout
from pipeline.models.lowerings.problem.lowering import LoweringPolicy

CONVOLUTION = "conv_general_dilated"
PRODUCT = "dot_general"
MAXIMA = "reduce_window_max"
REPLACED = frozenset((CONVOLUTION, PRODUCT, MAXIMA))
"""Names of the primitives whose equations the lowerings can compute."""

FLOATS = frozenset(("float32", "bfloat16", "float16"))
"""Dtypes that the lowerings compute in."""

Params = Mapping[str, Any]
Shape = tuple[int, ...]


def explain_no_lowering(equation: Any) -> str:
    """Return why no lowering computes an equation of a primitive in `REPLACED`; "" if one does.

    The reason is a clause without its subject, such as "is 3-D".
    """
    operands = [atom.aval for atom in equation.invars]
    result = equation.outvars[0].aval
    dtypes = {str(aval.dtype) for aval in (*operands, result)}
    if len(dtypes) > 1:
        return f"gives {result.dtype} for {operands[0].dtype}"
    if not dtypes <= FLOATS:
        return f"is of {dtypes.pop()}"
    if any(0 in aval.shape for aval in (*operands, result)):
        return "has an empty array"
    shapes = [aval.shape for aval in operands]
    reasons = {
        CONVOLUTION: _explain_no_conv2d,
        PRODUCT: _explain_no_dense,
        MAXIMA: _explain_no_pool,
    }
    return reasons[equation.primitive.name](equation.params, shapes)


def compute_replaced(
    equation: Any, operands: Sequence[Array], policy: LoweringPolicy, layout: Layout
) -> Array:
    """Compute an equation of a primitive in `REPLACED` by the lowering that the policy chooses.

    Images are transposed to the layout and back. XLA fuses the transposes into the operations
    before and after, so that two layers in a row exchange images in the layout.
    """
    name = equation.primitive.name
    if name == PRODUCT:
        return _multiply(equation.params, operands, policy)
    computation = _convolve if name == CONVOLUTION else _pool
    return computation(equation.params, operands, policy, layout)


def _explain_no_conv2d(params: Params, shapes: Sequence[Shape]) -> str:
    dimensions = len(params["window_strides"])
    if dimensions not in (1, 2):
        return f"is {dimensions}-D"
    if params["batch_group_count"] != 1:
        return f"has {params['batch_group_count']} groups of samples"
    return _name_unsupported_setting(params)


def _convolve(
    params: Params, operands: Sequence[Array], policy: LoweringPolicy, layout: Layout
) -> Array:
    """Convolve images, or sequences as images of one row. Groups are computed in NHWC.

    Lowerings have neither negative pads nor `lhs_dilation` (zeros between the inputs of a
    transposed convolution). So `lax.pad` pads and dilates the images before.
    """
    numbers = params["dimension_numbers"]
    images = operands[0].transpose(numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1])
    kernel = operands[1].transpose(*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0])
    pads = tuple(params["padding"])
    strides = tuple(params["window_strides"])
    dilation = tuple(params["rhs_dilation"])
    input_dilation = tuple(params["lhs_dilation"])
    if any(step > 1 for step in input_dilation) or any(edge < 0 for pad in pads for edge in pad):
        spatial_pads = [(*pad, step - 1) for pad, step in zip(pads, input_dilation, strict=True)]
        zero = jnp.zeros((), images.dtype)
        images = lax.pad(images, zero, [(0, 0, 0), *spatial_pads, (0, 0, 0)])
        pads = tuple((0, 0) for _ in pads)
    is_sequence = len(strides) == 1
    if is_sequence:
        images = images[:, None]
        kernel = kernel[None]
        pads = ((0, 0), *pads)
        strides = (1, *strides)
        dilation = (1, *dilation)
    groups = params["feature_group_count"]
    window: Mapping[str, Any] = {"strides": strides, "padding": pads, "dilation": dilation}
    if layout == "chwn" and groups == 1:
        result = swap_layout(conv2d_chwn(swap_layout(images), kernel, **window))
    else:
        result = conv2d(images, kernel, **window, groups=groups, policy=policy)
    result = result[:, 0] if is_sequence else result
    out = numbers.out_spec
    return result.transpose(np.argsort((out[0], *out[2:], out[1])))


def _explain_no_dense(params: Params, shapes: Sequence[Shape]) -> str:
    (left, right), batches = params["dimension_numbers"]
    rows, kernel = shapes
    last_axes = tuple(range(len(rows) - len(left), len(rows)))
    first_axes = tuple(range(len(right)))
    if batches != ((), ()) or tuple(left) != last_axes or tuple(right) != first_axes:
        return "isn't a product of rows with a matrix"
    if len(rows) == len(left) or len(kernel) == len(right):
        return "isn't a product of matrices"
    return _name_unsupported_setting(params)


def _multiply(params: Params, operands: Sequence[Array], policy: LoweringPolicy) -> Array:
    """Multiply (*batch, *inputs) with a kernel (*inputs, *features), each of any number of axes."""
    inputs, kernel = operands
    (_, contracted_axes), _ = params["dimension_numbers"]
    num_contracted = len(contracted_axes)
    batch = inputs.shape[: inputs.ndim - num_contracted]
    rows = inputs.reshape((*batch, prod(kernel.shape[:num_contracted])))
    matrix = kernel.reshape(rows.shape[-1], -1)
    result = multiply_dense(rows, matrix, policy)
    return result.reshape(batch + kernel.shape[num_contracted:])


def _explain_no_pool(params: Params, shapes: Sequence[Shape]) -> str:
    if any(step != 1 for key in ("base_dilation", "window_dilation") for step in params[key]):
        return "is dilated"
    if any(edge < 0 for pad in params["padding"] for edge in pad):
        return "has negative pads"
    return "" if _find_pooled_axes(params) is not None else "is not over height and width"


def _find_pooled_axes(params: Params) -> tuple[int, int] | None:
    """Return the axes of height and width in NHWC or NCHW, or None if windows span other axes."""
    window = params["window_dimensions"]
    axes = zip(window, params["window_strides"], params["padding"], strict=True)
    unpooled = [size == step == 1 and tuple(pad) == (0, 0) for size, step, pad in axes]
    if len(window) != 4 or not unpooled[0]:
        return None
    for channels, pooled in ((3, (1, 2)), (1, (2, 3))):
        if unpooled[channels]:
            return pooled
    return None


def _pool(
    params: Params, operands: Sequence[Array], policy: LoweringPolicy, layout: Layout
) -> Array:
    """Return the maxima of windows over height and width, of NHWC or NCHW images."""
    axes = _find_pooled_axes(params)
    assert axes is not None, "explain_no_lowering returns a reason for other windows"
    channels_first = axes == (2, 3)
    images = operands[0].transpose(0, 2, 3, 1) if channels_first else operands[0]
    window, strides, pads = (
        (params[key][axes[0]], params[key][axes[1]])
        for key in ("window_dimensions", "window_strides", "padding")
    )
    if layout == "chwn":
        result = swap_layout(pool_max(swap_layout(images), window, strides, pads, policy))
    else:
        result = pool_max(images, window, strides, pads, policy)
    return result.transpose(0, 3, 1, 2) if channels_first else result


def _name_unsupported_setting(params: Params) -> str:
    """Return a clause about a setting of an equation that lowerings don't have; "" without one."""
    precision = params["precision"]
    precisions = precision if isinstance(precision, tuple) else (precision,)
    supported = (None, lax.Precision.DEFAULT)
    unsupported = [precision for precision in precisions if precision not in supported]
    if unsupported:
        return f"asks for precision {unsupported[0]}"
    return "" if params["out_sharding"] is None else "has a sharding"
