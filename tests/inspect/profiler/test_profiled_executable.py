"""Compilations while a run trains, and how long each took, against the clock."""

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.inspect.profiler import profiled_executable
from pipeline.inspect.profiler.profiled_executable import (
    LAST_EVENT,
    MAX_GAP_S,
    Compilations,
    watch_compilations,
)


def test_compilation_is_recorded_for_each_shape() -> None:
    @jax.jit
    def moments(x: jax.Array) -> jax.Array:
        return jnp.sin(x).mean() + jnp.linalg.norm(x @ x)

    # The first program of a process waits for more than being compiled.
    jax.jit(jnp.negative)(np.ones(3, np.float32)).block_until_ready()
    calls_s = []
    with watch_compilations() as watch:
        for size in (3, 5, 5):
            began = time.perf_counter()
            moments(np.ones((size, size), np.float32)).block_until_ready()
            calls_s.append(time.perf_counter() - began)
    own = [one for one in watch.compilations if one.name == "jit(moments)"]
    assert len(own) == 2
    assert "float32[3,3]" in own[0].shapes
    assert "float32[5,5]" in own[1].shapes
    for one, call_s in zip(own, calls_s, strict=False):
        assert 0.1 * call_s < one.seconds <= call_s


def test_compilation_time_excludes_earlier_tracing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock of the test's own: each event is noted at its end, with its length."""
    watch = Compilations()
    events = (
        (1.000, "/jax/core/compile/jaxpr_trace_duration", 0.500),
        (1.000 + 3 * MAX_GAP_S, "/jax/core/compile/jaxpr_trace_duration", 0.004),
        (1.003 + 3 * MAX_GAP_S, "/jax/core/compile/jaxpr_to_mlir_module_duration", 0.002),
        (1.030 + 3 * MAX_GAP_S, LAST_EVENT, 0.026),
    )
    ends = iter([ended_s for ended_s, _, _ in events])
    monkeypatch.setattr(
        profiled_executable, "time", SimpleNamespace(perf_counter=lambda: next(ends))
    )
    for _, event, length_s in events:
        watch.record_event(event, length_s, fun_name="step")
    (found,) = watch.compilations
    assert found.name == "step"
    assert found.seconds == pytest.approx(0.034)
