"""Gradients of replaced equations, recognised in a function that computes gradients.

JAX writes the gradients of a convolution as convolutions with other dimension numbers, dilations
and pads. It writes gradients of a product as products, and the gradient of max pooling as a
scatter. To find them, each equation that a lowering computes is differentiated alone. An equation
of the function with the same primitive, parameters and shapes as that gradient computes it, for any
operands. So the recognition doesn't depend on how a version of JAX writes gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core

from pipeline.core.host.jaxpr import bind_equation, iterate_equations
from pipeline.models.imported.replaced_equations import (
    CONVOLUTION,
    MAXIMA,
    REPLACED,
    compute_replaced,
    explain_no_lowering,
)
from pipeline.models.lowerings.problem.image_layout import Layout
from pipeline.models.lowerings.problem.lowering import DEFAULT, Lowering, LoweringPolicy, Role
from pipeline.models.lowerings.problem.problems import Problem

Key = tuple[Any, ...]
"""Primitive, parameters, and the shapes and types of operands and results."""


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
        shape = _read_shape(self.forward.invars[self.operand])
        # For a function that is linear in an operand, the gradient doesn't depend on its values.
        is_linear = self.forward.primitive.name != MAXIMA
        primal = jnp.zeros(shape.shape, shape.dtype) if is_linear else other
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
    shapes = ((shape.shape, str(shape.dtype)) for shape in map(_read_shape, atoms))
    return (equation.primitive.name, _make_hashable(params), *shapes)


def _read_shape(atom: Any) -> jax.ShapeDtypeStruct:
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

    *shapes, result = map(_read_shape, (*forward.invars, *forward.outvars))
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
    return split.reshape(_read_shape(forward.invars[1]).shape)
