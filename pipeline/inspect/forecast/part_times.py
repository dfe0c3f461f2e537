"""Times of a step's parts on this machine: rough counts and measurements."""

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

# Rough costs order the parts, and measurements scale the costs of small parts. So the same costs
# serve for any machine.
FLOP_PER_NS: Mapping[Kind, float] = {"product": 150.0, "convolution": 15.0, "call": 200.0}
BYTE_NS = 0.05
"""Cost of a byte that is read or written."""
VALUE_NS = 0.2
"""Cost of an exponential or a quotient."""
DRAW_NS = 3.0
"""Cost of a random number."""
KERNEL_NS = 1000.0
"""Least time of a part: the start of a kernel."""
MOVED_SHARE = 0.6
"""Share of the results inside a part that counts as read or written."""

SLOW_PRIMITIVES = frozenset(
    {"exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "erf_inv", "erfc", "pow"}
    | {"sin", "cos", "tan", "atan2", "sqrt", "rsqrt", "cbrt", "div", "rem"}
)
RANDOM_PRIMITIVES = frozenset({"random_bits", "threefry2x32"})


def rough_us(part: StepPart) -> float:
    """Return a rough count of a part's time in microseconds, from its operations and bytes."""
    jaxpr = part.program.jaxpr
    ns = KERNEL_NS + BYTE_NS * bytes_of(*jaxpr.invars, *jaxpr.outvars)
    if part.kind in FLOP_PER_NS:
        return 1e-3 * (ns + _count_flops(part.equations[0]) / FLOP_PER_NS[part.kind])
    for equation in part.equations:
        name = equation.primitive.name
        count = values_of(*equation.outvars)
        ns += MOVED_SHARE * BYTE_NS * bytes_of(*equation.outvars)
        ns += VALUE_NS * count * (name in SLOW_PRIMITIVES) + DRAW_NS * count * (
            name in RANDOM_PRIMITIVES
        )
        if name.startswith(("reduce", "arg")):
            ns += VALUE_NS / 2 * values_of(*equation.invars)
    return 1e-3 * ns


def _count_flops(equation: JaxprEqn) -> float:
    """Return the FLOP of a product or of a convolution with a kernel.

    It is exact for a product. A convolution's result has features last in all lowerings, and each
    value sums over the other axes of the kernel.
    """
    operands: Any = equation.invars[:2]
    left, right = (v.aval.shape for v in operands)
    count = values_of(*equation.outvars)
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2.0 * count * float(np.prod([left[axis] for axis in contracted]))
    if len(right) == 4:
        return 2.0 * count * float(np.prod(right[:-1]))
    # For a product of matrices (m, k) and (k, n), or stacks of them: k^2 = (m k) (k n) / (m n).
    stacked = float(np.prod(left[:-2]))
    squared = float(np.prod(left)) * float(np.prod(right)) / max(1, count) / stacked
    return 2.0 * count * squared**0.5


def measure_us(part: StepPart, device: jax.Device, *, looped: bool) -> float:
    """Compile and time a part, in microseconds; the shortest of several rounds counts.

    `looped` is whether a loop runs the steps: XLA:CPU computes some convolutions more slowly there.
    """
    shapes = [v.aval for v in part.program.jaxpr.invars]
    operands = tuple(map(_make_operand, shapes)) or (jnp.zeros(1),)
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


def _make_operand(shape: Any) -> Array:
    """Return an operand of a shape and type; integers are from 0 to 6."""
    if is_key(shape.dtype):
        keys = jax.ShapeDtypeStruct(shape.shape, shape.dtype)
        return jnp.ones(jax.eval_shape(jax.random.key_data, keys).shape, jnp.uint32)
    dtype = np.dtype(shape.dtype)
    if dtype.kind in "iub":
        return jnp.asarray(np.resize(np.arange(7), shape.shape).astype(dtype))
    return make_random_operand(shape.shape, dtype)
