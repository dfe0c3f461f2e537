"""Times of a step's parts on this machine: a rough count of each, and a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from pipeline.core.host.shortest_time import shortest_s
from pipeline.inspect.forecast.flat_program import bytes_of, is_key, values_of
from pipeline.inspect.forecast.step_parts import Kind, StepPart
from pipeline.models.lowerings.tune.timing import Timer, make_random_operand

ROUND_S = 0.01
ROUNDS = 3

FLOP_PER_NS: Mapping[Kind, float] = {"product": 150.0, "convolution": 15.0, "call": 200.0}
BYTE_NS = 0.05
VALUE_NS = 0.2
DRAW_NS = 3.0
"""Rough costs: of a byte that is read or written, of an exponential or a quotient, of a random
number; and operations a nanosecond by kind. Only the order of the parts comes from them and,
scaled by those that were measured, the time of the small ones; so they hold for any machine."""
KERNEL_NS = 1000.0
"""The least time of a part: a kernel's start."""
MOVED_SHARE = 0.6
"""Share of the bytes between the operations of a part that counts as moved."""

SLOW = frozenset(
    {"exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "erf_inv", "erfc", "pow"}
    | {"sin", "cos", "tan", "atan2", "sqrt", "rsqrt", "cbrt", "div", "rem"}
)
DRAWS = frozenset({"random_bits", "threefry2x32"})


def rough_us(part: StepPart) -> float:
    """Return about how long a part takes, in microseconds, from what it computes and moves."""
    jaxpr = part.program.jaxpr
    ns = KERNEL_NS + BYTE_NS * bytes_of(*jaxpr.invars, *jaxpr.outvars)
    if part.kind in FLOP_PER_NS:
        return 1e-3 * (ns + _flops(part.equations[0]) / FLOP_PER_NS[part.kind])
    for equation in part.equations:
        name = equation.primitive.name
        count = values_of(*equation.outvars)
        ns += MOVED_SHARE * BYTE_NS * bytes_of(*equation.outvars)
        ns += VALUE_NS * count * (name in SLOW) + DRAW_NS * count * (name in DRAWS)
        if name.startswith(("reduce", "arg")):
            ns += VALUE_NS / 2 * values_of(*equation.invars)
    return 1e-3 * ns


def _flops(equation: JaxprEqn) -> float:
    """Return the multiplications and additions of a product, or of a convolution with a kernel.

    Of a product it is exact. A convolution's result has features last in all lowerings here, and
    each value sums over the other axes of the kernel.
    """
    operands: Any = equation.invars[:2]
    left, right = (v.aval.shape for v in operands)
    count = values_of(*equation.outvars)
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2.0 * count * float(np.prod([left[axis] for axis in contracted]))
    if len(right) == 4:
        return 2.0 * count * float(np.prod(right[:-1]))
    # A product of (stacks of) matrices (m, k) and (k, n) to (m, n): k^2 = (m k) (k n) / (m n).
    stacked = float(np.prod(left[:-2]))
    squared = float(np.prod(left)) * float(np.prod(right)) / max(1, count) / stacked
    return 2.0 * count * squared**0.5


def measure_us(part: StepPart, device: jax.Device, *, looped: bool) -> float:
    """Time a part by itself, compiled, in microseconds: the shortest of several rounds counts.

    `looped`: steps run in a loop, in the body of which XLA:CPU computes some convolutions more
    slowly.
    """
    shapes = [v.aval for v in part.program.jaxpr.invars]
    operands = tuple(map(_operand, shapes)) or (jnp.zeros(1),)
    function = jaxpr_as_fun(part.program)

    def call(words: tuple[Array, ...]) -> list[Array]:
        arrays = [
            jax.random.wrap_key_data(array) if is_key(shape.dtype) else array
            for array, shape in zip(words, shapes, strict=False)
        ]
        return [jax.random.key_data(r) if is_key(r.dtype) else r for r in function(*arrays)]

    if looped:
        return Timer(operands, device, ROUNDS, ROUND_S).time_us(call)
    with jax.default_device(device):
        return 1e6 * shortest_s(jax.jit(call), operands, budget_s=ROUNDS * ROUND_S)


def _operand(shape: Any) -> Array:
    """Return numbers for an operand: fractions, small integers, both truths, words of keys."""
    if is_key(shape.dtype):
        keys = jax.ShapeDtypeStruct(shape.shape, shape.dtype)
        return jnp.ones(jax.eval_shape(jax.random.key_data, keys).shape, jnp.uint32)
    dtype = np.dtype(shape.dtype)
    if dtype.kind in "iub":
        return jnp.asarray(np.resize(np.arange(7), shape.shape).astype(dtype))
    return make_random_operand(shape.shape, dtype)
