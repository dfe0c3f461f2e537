"""Forecast of a step on this machine, from measurements of its parts, before it is compiled.

The step is traced as for a run, with the lowerings that the banks and the rules choose, and split
at its library calls (step_parts.py). The time of each part is estimated roughly. The parts with the
largest estimates are compiled and timed, and other estimates are scaled by these measurements.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from pipeline.backends.base import Backend, CompileInputs, CompileReport
from pipeline.backends.loading.window import Inputs, read_batch
from pipeline.backends.step_loops import LoopCarry, make_buffers
from pipeline.backends.xla import Programs, XlaExecutable, pad_to_block
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.files.value_text import count_noun, format_duration
from pipeline.core.host.measured_time import measure_shortest_s
from pipeline.core.host.platforms import get_platform
from pipeline.engine.schedule import RunSchedule
from pipeline.engine.step_checks import is_key
from pipeline.inspect.forecast.step_parts import Kind, StepPart, bytes_of, parts_of, values_of
from pipeline.models.lowerings.tune.search import Timer, make_random_operand
from pipeline.stages.autosink.dispatch_costs import OFF, TimedRuns
from pipeline.training.state import TrainState

ROUND_S = 0.01
ROUNDS = 3

# Rough costs only order the parts, and are scaled by measurements. So they serve for any machine.
FLOP_PER_NS: Mapping[Kind, float] = {"product": 150.0, "convolution": 15.0, "call": 200.0}
BYTE_NS = 0.05
"""Cost of a byte that is read or written."""
VALUE_NS = 0.2
"""Cost of an exponential or a quotient."""
DRAW_NS = 3.0
"""Cost of a random number."""
KERNEL_NS = 1000.0
"""Time to start a kernel, which every part takes at least."""
MOVED_SHARE = 0.6
"""Share of the results inside a part that counts as read or written."""

SLOW_PRIMITIVES = frozenset(
    {"exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "erf_inv", "erfc", "pow"}
    | {"sin", "cos", "tan", "atan2", "sqrt", "rsqrt", "cbrt", "div", "rem"}
)
RANDOM_PRIMITIVES = frozenset({"random_bits", "threefry2x32"})


def rough_us(part: StepPart) -> float:
    """Estimate a part's microseconds from its operations and bytes."""
    jaxpr = part.program.jaxpr
    ns = KERNEL_NS + BYTE_NS * bytes_of(*jaxpr.invars, *jaxpr.outvars)
    if part.kind in FLOP_PER_NS:
        return 1e-3 * (ns + _count_flops(part.equations[0]) / FLOP_PER_NS[part.kind])
    for equation in part.equations:
        name = equation.primitive.name
        count = values_of(*equation.outvars)
        ns += MOVED_SHARE * BYTE_NS * bytes_of(*equation.outvars)
        if name in SLOW_PRIMITIVES:
            ns += VALUE_NS * count
        elif name in RANDOM_PRIMITIVES:
            ns += DRAW_NS * count
        elif name.startswith(("reduce", "arg")):
            ns += VALUE_NS / 2 * values_of(*equation.invars)
    return 1e-3 * ns


def _count_flops(equation: JaxprEqn) -> float:
    """Return the FLOP of a product, a convolution with a kernel, or a call of oneDNN.

    All lowerings of a convolution have features last in the result and the kernel, so each value
    sums over the other axes of the kernel. A call multiplies matrices.
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
    stack_size = float(np.prod(left[:-2]))
    k_squared = float(np.prod(left)) * float(np.prod(right)) / max(1, count) / stack_size
    return 2.0 * count * k_squared**0.5


def measure_us(part: StepPart, device: jax.Device, *, looped: bool) -> float:
    """Compile a part, and return the shortest of its times in microseconds.

    `looped` is whether a loop runs the steps: XLA:CPU computes some convolutions more slowly there.
    """
    shapes = [v.aval for v in part.program.jaxpr.invars]
    operands = tuple(map(_make_operand, shapes)) or (jnp.zeros(1),)
    function = jaxpr_as_fun(part.program)

    def call(data: tuple[Array, ...]) -> list[Array]:
        # Not strict: a part without operands has a dummy.
        arrays = [
            jax.random.wrap_key_data(array) if is_key(shape.dtype) else array
            for array, shape in zip(data, shapes, strict=False)
        ]
        return [jax.random.key_data(r) if is_key(r.dtype) else r for r in function(*arrays)]

    if looped:
        return Timer(operands, device, ROUNDS, ROUND_S).time_us(call)
    with jax.default_device(device):
        return 1e6 * measure_shortest_s(jax.jit(call), operands, budget_s=ROUNDS * ROUND_S)


def _make_operand(shape: Any) -> Array:
    """Return an operand of a shape and type; integers are from 0 to 6."""
    if is_key(shape.dtype):
        keys = jax.ShapeDtypeStruct(shape.shape, shape.dtype)
        return jnp.ones(jax.eval_shape(jax.random.key_data, keys).shape, jnp.uint32)
    dtype = np.dtype(shape.dtype)
    if dtype.kind in "iub":
        return jnp.asarray(np.resize(np.arange(7), shape.shape).astype(dtype))
    return make_random_operand(shape.shape, dtype)


MEASURED_SHARE = 0.9
"""Parts are measured, the longest first, until they have this share of a step's estimated time."""
BUDGET_S = 30.0
"""Seconds after which no further part is measured."""
HOST_STEPS = 200
"""Number of empty steps that measure the host's time."""


@dataclass(frozen=True)
class HostForecast:
    """The time of a step in ms, dispatched alone, and its parts.

    `host_ms` is the host's time for each step: the dispatch, logs, and the next batch. Of `parts`
    different parts, `measured` were timed; these take `measured_share` of the device's time.
    """

    recipe: str
    device: str
    precision: str
    products_ms: float
    rest_ms: float
    host_ms: float
    parts: int
    measured: int
    measured_share: float

    @property
    def step_ms(self) -> float:
        return self.products_ms + self.rest_ms + self.host_ms

    def __str__(self) -> str:
        return (
            f"FORECAST, not measured: {self.recipe} on {self.device}, {self.precision}\n"
            f"  step      {self.step_ms:10.2f} ms, each dispatched alone\n"
            f"  products  {self.products_ms:10.2f} ms: convolutions and products of matrices\n"
            f"  the rest  {self.rest_ms:10.2f} ms: the batch, other layers, the update\n"
            f"  host      {self.host_ms:10.2f} ms: a step that does nothing, its logs, its batch\n"
            f"  timed alone: {self.measured} of {self.parts} different parts, "
            f"{self.measured_share:.0%} of the device's time; others scaled like their kind"
        )


def forecast_run(
    recipe: Recipe, work: CompileInputs, run_schedule: RunSchedule, backend: Backend
) -> HostForecast:
    """Forecast the time of a step on a device of this machine, without compiling the step.

    Raises RunError for eager mode, for a device that this machine lacks, and for several devices.
    """
    if work.eager:
        raise RunError("train.mode = eager: must be graph, since a forecast is of a compiled step")
    if backend.device not in backend.placement.devices:
        raise RunError(f"{backend.describe()['device']}: can't be timed on this machine")
    count = len(backend.placement.devices)
    if count > 1 or work.sharding_rules is not None:
        raise RunError(f"{count} devices share a step; a forecast must be of one device")
    state = jax.eval_shape(work.step.init, work.seed)
    program = _trace_step(work, state)
    device_times = time_parts(program, backend.device, looped=not work.single_steps)
    return HostForecast(
        recipe=recipe.name,
        device=backend.describe()["device"],
        precision=recipe.train.precision,
        host_ms=_measure_host_ms(recipe, work, run_schedule, backend, state),
        **device_times,
    )


def time_parts(program: ClosedJaxpr, device: jax.Device, *, looped: bool) -> dict[str, Any]:
    """Return the fields of `HostForecast` about the parts of a traced step on a device; `looped` is
    whether a loop runs it."""
    # XLA's name of the platform: "cuda" for the platform that jax calls "gpu".
    parts = parts_of(program, get_platform(device.platform).lowering_name or device.platform)
    estimates_us = {part: count * rough_us(part) for part, count in parts.items()}
    times_us = _measure_times_us(parts, estimates_us, device, looped=looped)
    us_by_kind = _sum_by_kind(estimates_us, times_us)
    products_us = sum(us for kind, us in us_by_kind.items() if kind != "rest")
    rest_us = us_by_kind.get("rest", 0.0)
    return {
        "products_ms": products_us / 1e3,
        "rest_ms": rest_us / 1e3,
        "parts": len(parts),
        "measured": len(times_us),
        "measured_share": sum(times_us.values()) / (products_us + rest_us),
    }


def _trace_step(work: CompileInputs, state: TrainState) -> ClosedJaxpr:
    """Trace a step as in the body of the loop, which also reads its batch from the window."""

    def step(state: TrainState, inputs: Inputs, rates: Any, position: Any) -> Any:
        return work.step.step(state, read_batch(inputs, position), rates)

    rates = pad_to_block(work.learning_rates)
    return jax.make_jaxpr(step)(state, work.train.get_window(0).inputs, rates, np.int32(0))


def _measure_times_us(
    parts: Counter[StepPart],
    estimates_us: Mapping[StepPart, float],
    device: jax.Device,
    *,
    looped: bool,
) -> Mapping[StepPart, float]:
    """Return the measured microseconds of the longest parts, each in all its places in a step."""
    total_us = sum(estimates_us.values())
    measured_us = 0.0
    times_us: dict[StepPart, float] = {}
    deadline = time.monotonic() + BUDGET_S
    for part in sorted(estimates_us, key=estimates_us.__getitem__, reverse=True):
        if times_us and (measured_us >= MEASURED_SHARE * total_us or time.monotonic() > deadline):
            break
        times_us[part] = parts[part] * measure_us(part, device, looped=looped)
        measured_us += estimates_us[part]
    return times_us


def _sum_by_kind(
    estimates_us: Mapping[StepPart, float], times_us: Mapping[StepPart, float]
) -> dict[Kind, float]:
    """Return microseconds by kind. Estimates are scaled by the ratio of measured to estimated time
    of the kind's timed parts, or of all timed parts if none is of the kind."""
    us_by_kind: dict[Kind, float] = {}
    for kind in {part.kind for part in estimates_us}:
        timed = [part for part in times_us if part.kind == kind] or list(times_us)
        ratio = sum(times_us[part] for part in timed) / sum(estimates_us[part] for part in timed)
        us_by_kind[kind] = sum(
            times_us.get(part, ratio * us) for part, us in estimates_us.items() if part.kind == kind
        )
    return us_by_kind


def _measure_host_ms(
    recipe: Recipe,
    work: CompileInputs,
    run_schedule: RunSchedule,
    backend: Backend,
    state: TrainState,
) -> float:
    """Return the milliseconds of an empty step: the host's time for each step."""
    placement = backend.placement
    rates = placement.put(pad_to_block(work.learning_rates))
    inputs = work.train.get_window(0).inputs
    buffers = placement.put(make_buffers(inputs, len(work.step.columns)))

    def return_carry(carry: LoopCarry, *_: Any) -> LoopCarry:
        return carry

    def make_zero_state(seed: Any) -> TrainState:
        return placement.put(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state))

    idle: Any = jax.jit(return_carry, donate_argnums=0)
    programs = Programs(make_zero_state, idle, idle)
    executable = XlaExecutable(work, placement, CompileReport(()), programs, rates, buffers)
    with TimedRuns(recipe, run_schedule, executable, is_terminal=False) as trials:
        return float(trials.time(OFF, HOST_STEPS).dispatch_ms.min())


def total_line(forecast: HostForecast, num_steps: int) -> str:
    """Return the time of a run's steps, without evaluations, as a line below a forecast."""
    duration = format_duration(num_steps * forecast.step_ms / 1e3)
    return f"  in all    {duration} ({count_noun(num_steps, 'step')}), besides evaluations"


def measured_line(forecast: HostForecast, measured_ms: float) -> str:
    error = forecast.step_ms / measured_ms - 1
    return (
        f"  measured  {measured_ms:10.2f} ms, so the forecast is {abs(error):.0%} too "
        f"{'long' if error > 0 else 'short'}"
    )
