"""Verdicts by evidence that is known: each rule, and the order of rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.backends.loading.loader_stats import LoaderReport, SlowSample
from pipeline.inspect.profiler.measured_profile import exceeds_peaks
from pipeline.inspect.profiler.profiled_executable import Compilation
from pipeline.inspect.profiler.step_profile import (
    TRIAD_BYTES,
    HostTime,
    OperatorTime,
    Peaks,
    StepProfile,
)
from pipeline.inspect.profiler.verdict import EventCost, Evidence, SinkGain, decide

PEAKS = Peaks(flops=1e11, bytes_per_s=1e10)
LOADER = LoaderReport("resident", False, 0.0, 0.0, None, None, None, {}, None)


def operator(name: str, ms: float, kind: str, layer: str, **more: Any) -> OperatorTime:
    """An operator of the forward pass that takes `ms` of a step of 10 ms."""
    given = {"of_flops": 0.1, "of_bytes": 0.1, "flops": 1.0, "nbytes": 1.0, **more}
    times = 1.0, ms, ms / 10, ms
    return OperatorTime(name, kind, layer, "forward", *times, **given)


PRODUCT = operator("dot.1", 8.0, "matrix products, by XLA", "dense_0")
RELU = operator("max.1", 1.0, "element by element", "relu_0")


def evidence(*operators: OperatorTime, **more: Any) -> Evidence:
    """Evidence of a healthy step of 10 ms."""
    host = HostTime(step=10.0, device=9.9, wait=0.0, between=0.1, dispatches=5, steps=500)
    profile = StepProfile(
        *("measured", "cpu:0", "mine", 32, 60, 10.0, 11.0, (), ()),
        operators or (PRODUCT, RELU),
        iteration=None,
        peaks=PEAKS,
        host=host,
    )
    return replace(Evidence(profile, host, LOADER, sink_steps=100), **more)


def waiting(ms: float) -> HostTime:
    return HostTime(step=10.0, device=10.0 - ms, wait=ms, between=0.0)


def test_healthy_step_has_the_verdict_operators() -> None:
    verdict = decide(evidence())
    assert (verdict.name, verdict.change) == ("operators", None)
    assert "dense_0 8 ms" in verdict.why


def test_data_bound_verdict_names_the_column_and_the_sample() -> None:
    sample = SlowSample("image", 7, "a.png", 0.02)
    loader = replace(LOADER, kind="stream", prepare_ms_per_step={"image": 9.0, "label": 0.1})
    found = decide(
        evidence(
            host=waiting(6.0),
            loader=replace(loader, slowest_sample=sample),
            faster_data="train.feed=resident",
        )
    )
    assert found.name == "data-bound, severely"
    assert "slowest is image" in found.why
    assert "a.png" in found.why
    assert found.change is not None
    assert (found.change.what, found.change.gain) == ("train.feed=resident", pytest.approx(2.5))
    assert decide(evidence(host=waiting(2.0))).name == "data-bound"
    assert decide(evidence(host=waiting(0.9))).name == "operators"


def test_recompiling_verdict_names_the_function_and_its_shapes() -> None:
    later = [Compilation("jit(f)", n, 0.5, f"float32[{n}]") for n in range(1, 5)]
    found = decide(evidence(compilations=tuple(later), compiled_steps=400))
    assert found.name == "recompiling"
    assert "jit(f) 4 times, for float32[3] then float32[4]" in found.why
    assert found.change is not None
    assert found.change.gain == pytest.approx(2.0)
    # Each of an evaluation's own is compiled once.
    once = tuple(replace(one, name=f"jit(f{n})") for n, one in enumerate(later))
    assert decide(evidence(compilations=once, compiled_steps=400)).name == "operators"


def test_callback_bound_verdict_names_its_layer() -> None:
    call = operator("pure_callback.1", 4.0, "calls of Python", "look_0")
    found = decide(evidence(PRODUCT, call))
    assert (found.name, found.share) == ("callback-bound", pytest.approx(0.4))
    assert "layer look_0" in found.why


def test_longer_sink_is_advised_only_if_surely_faster() -> None:
    gain = SinkGain(500, 1.0, 10.0)
    found = decide(evidence(sink=gain))
    assert found.name == "dispatch-bound"
    assert str(found.change).startswith("train.sink_size=500: 10.00x predicted")
    assert decide(evidence(sink=replace(gain, now_ms=1.05))).name == "operators"
    # A gain within the noise, and a sink that is shorter than the recipe's.
    assert decide(evidence(sink=replace(gain, now_ms=1.3, error=0.2))).name == "operators"
    assert decide(evidence(sink=replace(gain, size=50))).name == "operators"


def test_host_and_event_bound_verdicts_have_their_share() -> None:
    host = HostTime(step=10.0, device=6.0, wait=0.0, between=4.0)
    found = decide(evidence(host=host, callbacks=("look",)))
    assert (found.name, found.share) == ("host-bound", pytest.approx(0.4))
    found = decide(evidence(events=EventCost(ms=10.0, count=7)))
    assert (found.name, found.share) == ("event-bound", pytest.approx(0.5))


def test_converting_verdict_advises_float32() -> None:
    turn = operator("convert.1", 3.0, "conversions of types", "dense_0")
    found = decide(evidence(PRODUCT, turn, precision="bf16"))
    assert found.name == "converting"
    assert found.change is not None
    assert found.change.what == "train.precision=O0"


def test_elementwise_bound_verdict_names_its_layer() -> None:
    stack = operator("fusion.1", 6.0, "element by element", "gelu_3")
    found = decide(evidence(replace(PRODUCT, ms=2.0), stack))
    assert found.name == "elementwise-bound"
    assert found.change is not None
    assert found.change.what == "leave out or replace layer gelu_3"
    assert found.change.gain == pytest.approx(2.5)
    # Moves in a layer with products, as im2col, are part of these.
    moves = operator("copy.1", 7.0, "moves and conversions", "dense_0")
    assert decide(evidence(PRODUCT, moves)).name == "operators"


def test_roofline_decides_between_memory_and_compute_bound() -> None:
    fast = replace(PRODUCT, of_flops=0.7, flops=1e9, nbytes=1e6)
    assert decide(evidence(fast, RELU)).name == "compute-bound"
    wide = replace(PRODUCT, of_bytes=0.8, flops=1e7, nbytes=1e7)
    assert decide(evidence(wide, RELU)).name == "memory-bound"
    # A cache may hold it all.
    assert decide(evidence(replace(wide, nbytes=1e6, flops=1e6), RELU)).name == "operators"


def test_bandwidth_exceeds_the_peak_only_with_operands_beyond_a_cache() -> None:
    """40 MB a call may be in a cache, from which reading is faster than from the memory."""
    fast = replace(PRODUCT, calls=2.0, of_bytes=1.5, nbytes=8e7)
    assert not exceeds_peaks(evidence(fast).profile)
    assert exceeds_peaks(evidence(replace(fast, nbytes=2 * TRIAD_BYTES + 1)).profile)
    assert exceeds_peaks(evidence(replace(fast, of_flops=1.1)).profile)
    assert not exceeds_peaks(evidence(replace(fast, of_flops=1.1, share=0.001)).profile)
