"""Equations of a jaxpr that the package's lowerings compute, and why they can't compute others.

The gradients of these equations are recognised in a function that computes gradients. JAX writes
the gradients of a convolution as convolutions with other dimension numbers, dilations and pads. It
writes gradients of a product as products, and the gradient of max pooling as a scatter. To find
them, each equation that a lowering computes is differentiated alone. An equation of the function
with the same primitive, parameters and shapes as that gradient computes it, for any operands. So
the recognition doesn't depend on how a version of JAX writes gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core

from pipeline.core.host.jaxpr import bind_equation, iterate_equations
from pipeline.models.lowerings.conv2d_chwn import conv2d_chwn
from pipeline.models.lowerings.lowered_layers import conv2d, multiply_dense, pool_max
from pipeline.models.lowerings.problem import (
    DEFAULT,
    Layout,
    Lowering,
    LoweringPolicy,
    Problem,
    Role,
    swap_layout,
)

CONVOLUTION = "conv_general_dilated"
PRODUCT = "dot_general"
MAXIMA = "reduce_window_max"
REPLACED = frozenset((CONVOLUTION, PRODUCT, MAXIMA))
"""Names of the primitives whose equations the lowerings can compute."""

FLOATS = frozenset(("float32", "bfloat16", "float16"))
"""Dtypes that the lowerings compute in."""

Params = Mapping[str, Any]
Shape = tuple[int, ...]
Key = tuple[Any, ...]
"""Primitive, parameters, and the shapes and types of operands and results."""


def explain_no_lowering(equation: Any) -> str:
    """Return why no lowering computes an equation of a primitive in `REPLACED`; "" if one does.

    The reason is a clause without its subject, such as "is 3-D".
    """
    operands = [atom.aval for atom in equation.invars]
    result = equation.outvars[0].aval
    dtypes = {str(aval.dtype) for aval in (*operands, result)}
    if len(dtypes) > 1:
        read = dict.fromkeys(str(aval.dtype) for aval in operands)
        return f"gives {result.dtype} for {' and '.join(read)}"
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
    unsupported = [each for each in precisions if each not in supported]
    if unsupported:
        return f"asks for precision {unsupported[0]}"
    return "" if params["out_sharding"] is None else "has a sharding"


@dataclass(frozen=True)
class RolePolicy:
    """A policy for one role. Problems of other roles have the default lowering."""

    policy: LoweringPolicy
    role: Role

    def choose(self, problem: Problem) -> Lowering:
        return self.policy.choose(problem) if problem.role == self.role else DEFAULT


@dataclass(frozen=True)
class Gradient:
    """An equation of JAX that computes the gradient of a forward equation by an operand."""

    forward: core.JaxprEqn
    operand: int
    """Index of that operand of `forward`: 0 for images or rows, 1 for the kernel."""
    cotangent: int
    """Index of the cotangent among the operands of the gradient equation."""
    permutation: tuple[int, ...] | None
    """Permutation that JAX applies to the axes of the result, or None."""

    def compute(self, operands: Sequence[Array], policy: LoweringPolicy, layout: Layout) -> Array:
        """Compute the gradient equation by the lowering that the policy chooses for the role."""
        cotangent = operands[self.cotangent]
        other = operands[1 - self.cotangent]
        if self.forward.primitive.name == CONVOLUTION and self.operand == 0:
            other = _restore_kernel(self.forward, other)
        struct = _read_struct(self.forward.invars[self.operand])
        # For a function that is linear in an operand, the gradient doesn't depend on its values.
        is_linear = self.forward.primitive.name != MAXIMA
        primal = jnp.zeros(struct.shape, struct.dtype) if is_linear else other
        role_policy = RolePolicy(policy, "weight_grad" if self.operand == 1 else "input_grad")

        def compute(value: Array) -> Array:
            values = [other, other] if is_linear else [other]
            values[self.operand] = value
            return compute_replaced(self.forward, values, role_policy, layout)

        (result,) = jax.vjp(compute, primal)[1](cotangent)
        if self.permutation is None:
            return result
        return result.transpose(np.argsort(self.permutation))


@dataclass(frozen=True)
class GradientTable:
    """Gradients of a function's replaced equations, by the keys of JAX's gradient equations."""

    derived: Mapping[Key, Gradient]

    def find(self, equation: core.JaxprEqn) -> Gradient | None:
        """Return the gradient that an equation computes, or None for another equation."""
        if equation.primitive.name not in self.primitives:
            return None
        return self.derived.get(_make_key(equation))

    @cached_property
    def primitives(self) -> frozenset[str]:
        """Names of the primitives of the gradient equations."""
        return frozenset(name for name, *_ in self.derived)


def find_gradients(jaxpr: core.Jaxpr) -> GradientTable:
    """Derive the gradients of all equations that lowerings compute, in calls and loops too.

    Equations with the same parameters and shapes are differentiated once, in some 3 ms.
    """
    derived: dict[Key, Gradient] = {}
    visited: set[Key] = set()
    for equation, _ in iterate_equations(jaxpr):
        if equation.primitive.name not in REPLACED:
            continue
        key = _make_key(equation)
        # The gradient of a gradient may look like the forward equation, which comes first.
        if key in visited or key in derived or explain_no_lowering(equation):
            continue
        visited.add(key)
        for operand in range(len(equation.invars)):
            entry = _derive_gradient(equation, operand)
            if entry is not None and entry[0] not in visited:
                derived.setdefault(entry[0], entry[1])
    return GradientTable(derived)


def _make_key(equation: core.JaxprEqn) -> Key:
    params = sorted(equation.params.items())
    atoms = (*equation.invars, *equation.outvars)
    structs = ((struct.shape, str(struct.dtype)) for struct in map(_read_struct, atoms))
    return (equation.primitive.name, _make_hashable(params), *structs)


def _read_struct(atom: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def _make_hashable(value: Any) -> Any:
    is_plain = isinstance(value, list) or type(value) is tuple
    return tuple(map(_make_hashable, value)) if is_plain else value


def _derive_gradient(forward: core.JaxprEqn, operand: int) -> tuple[Key, Gradient] | None:
    """Return the key of JAX's equation for a gradient, and the gradient.

    Return None if several equations read the cotangent, or if another equation than a transpose
    follows.
    """

    def pull(values: list[Array], cotangent: Array) -> Any:
        def compute(value: Array) -> Any:
            operands = [*values[:operand], value, *values[operand + 1 :]]
            (result,) = bind_equation(forward, operands)
            return result

        return jax.vjp(compute, values[operand])[1](cotangent)

    *shapes, result = map(_read_struct, (*forward.invars, *forward.outvars))
    jaxpr = jax.make_jaxpr(pull)(shapes, result).jaxpr
    *values, cotangent = jaxpr.invars
    readers = [
        equation for equation in jaxpr.eqns if any(atom is cotangent for atom in equation.invars)
    ]
    if len(readers) != 1 or len(readers[0].invars) != 2:
        return None
    (equation,) = readers
    position = 0 if equation.invars[0] is cotangent else 1
    other = equation.invars[1 - position]
    output = jaxpr.outvars[0]
    # A gradient by images reads the rotated kernel. All others read the other operand itself.
    is_rotated = forward.primitive.name == CONVOLUTION and operand == 0
    if is_rotated == any(other is value for value in values):
        return None
    permutation = None
    if output is not equation.outvars[0]:
        last = jaxpr.eqns[-1]
        if last.primitive is not lax.transpose_p or last.invars[0] is not equation.outvars[0]:
            return None
        permutation = tuple(map(int, last.params["permutation"]))
    return _make_key(equation), Gradient(forward, operand, position, permutation)


def _restore_kernel(forward: core.JaxprEqn, rotated: Array) -> Array:
    """Return the forward kernel for the kernel that JAX's gradient by the images reads.

    JAX rotates the kernel by 180 degrees, and moves groups from the features to the channels.
    """
    features, channels, *spatial = forward.params["dimension_numbers"].rhs_spec
    groups = forward.params["feature_group_count"]
    kernel = lax.rev(rotated, spatial)
    if groups == 1:
        return kernel
    shape = list(kernel.shape)
    shape[channels : channels + 1] = [groups, shape[channels] // groups]
    split = jnp.moveaxis(kernel.reshape(shape), channels, features)
    return split.reshape(_read_struct(forward.invars[1]).shape)
