"""Forecast of the time of a custom step on this machine, before it is compiled."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from pipeline.backends.loading.window import Inputs, batch_at
from pipeline.engine.run_sink import prepare_sink
from pipeline.engine.sink import SinkSettings
from pipeline.engine.user_step import (
    NO_RATES,
    CustomState,
    SinkProgram,
    Step,
    UserStep,
    copy_state,
    has_slow_loop,
    lower_step,
)
from pipeline.inspect.custom_step.open_step import OpenStep, open_step, time_sinks
from pipeline.inspect.forecast.host_forecast import HOST_STEPS, HostForecast, time_parts


def forecast_step(step: Step, state: Any, batch: Any) -> HostForecast:
    """Forecast the time of `step(state, batch) -> (state, metrics)` here, without compiling it.

    It is the sum of the times of the step's parts, as in the command `forecast`. `state` and
    `batch` are arrays or trees of arrays, and aren't changed.

    Raises ValueError for a step or a state that `pipeline.sink` refuses, and DataError for a batch
    that it refuses.
    """
    prepared = prepare_sink(step, state, repeat(batch), SinkSettings(HOST_STEPS, 1))
    with open_step(prepared, HOST_STEPS) as opened:
        device = opened.placement.device
        lowered, _ = lower_step(prepared.step, prepared.spec, device, None)
        program = _trace_step(lowered, prepared.state, opened.loader.window(0).inputs)
        looped = not has_slow_loop(prepared.step, prepared.spec, device)
        device_time = time_parts(program, device, looped=looped)
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(prepared.spec)}
        float_types = sorted(d.name for d in dtypes if jnp.issubdtype(d, jnp.floating))
        return HostForecast(
            recipe=opened.name,
            device=opened.device_text,
            precision=", ".join(float_types) or "no floating point",
            host_ms=_measure_host_ms(opened),
            **vars(device_time),
        )


def _trace_step(step: UserStep, state: CustomState, inputs: Inputs) -> ClosedJaxpr:
    """Trace a step as in the body of the loop, with the choice of its batch."""

    def compute(
        state: CustomState, inputs: Inputs, position: Any
    ) -> tuple[CustomState, tuple[Any, ...]]:
        after, row = step(state, batch_at(inputs, position), jnp.asarray(NO_RATES))
        return after, tuple(row)

    return jax.make_jaxpr(compute)(state, inputs, np.int32(0))


def _measure_host_ms(opened: OpenStep) -> float:
    """Return the milliseconds of an empty step: the host's time for each step."""
    user_step = opened.prepared.step
    metrics = dict.fromkeys(user_step.traced.metrics, np.float32(0))

    def do_nothing(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        return state, metrics

    idle = user_step.with_function(do_nothing)
    state = copy_state(opened.prepared.state, opened.placement)
    program = SinkProgram(idle, state, opened.loader, opened.placement, single_steps=True)
    steps = opened.loader.window(0).stop
    return float(time_sinks(program, state, 1, steps).dispatch_ms.min())
