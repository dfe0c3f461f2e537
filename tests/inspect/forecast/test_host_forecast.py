"""Forecasts of a step here: parts that add up, of the step that a run compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.backends.base import Backend, CompileInputs
from pipeline.config.compose import compose_and_check
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.reporter import Reporter
from pipeline.engine.schedule import RunSchedule
from pipeline.inspect.forecast import host_forecast
from pipeline.inspect.forecast.host_forecast import (
    BYTE_NS,
    FLOP_PER_NS,
    KERNEL_NS,
    HostForecast,
    forecast_run,
    measure_us,
    measured_line,
    rough_us,
    total_line,
)
from pipeline.inspect.forecast.step_parts import StepPart, parts_of
from pipeline.stages.build import build
from pipeline.stages.compile import make_compile_inputs
from pipeline.stages.data import load_data

SLOWER = 3.0
"""How many times as long as by the rough count the parts of a test take."""


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[StepPart]:
    """Parts whose times were asked for; each takes `SLOWER` times its rough count."""
    asked: list[StepPart] = []

    def measure(part: StepPart, device: jax.Device, *, looped: bool) -> float:
        asked.append(part)
        return SLOWER * rough_us(part)

    monkeypatch.setattr(host_forecast, "measure_us", measure)
    return asked


def prepare(overrides: Sequence[str]) -> tuple[Recipe, CompileInputs, RunSchedule, Backend]:
    recipe = compose_and_check(overrides)
    backend = recipe.device.open(recipe.parallel)
    with Reporter() as reporter:
        dataset = load_data(recipe, reporter)
        built = build(recipe, dataset, reporter)
        work = make_compile_inputs(recipe, dataset, built, backend, reporter)
    return recipe, work, built.run_schedule, backend


def forecast(*overrides: str) -> HostForecast:
    recipe, work, run_schedule, backend = prepare(["+recipe=lenet5_digits", *overrides])
    return forecast_run(recipe, work, run_schedule, backend)


@pytest.mark.medium
def test_forecast_is_the_sum_of_its_parts(timed: list[StepPart]) -> None:
    found = forecast()
    assert found.step_ms == pytest.approx(found.products_ms + found.rest_ms + found.host_ms)
    assert 0 < found.host_ms < 1000
    assert found.measured == len(timed) == len(set(timed)) < found.parts
    assert host_forecast.MEASURED_SHARE <= found.measured_share < 1
    assert str(found).startswith("FORECAST, not measured: lenet5_digits on ")


@pytest.mark.slow
def test_untimed_parts_are_scaled_like_timed_parts(
    timed: list[StepPart], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = forecast()
    count = len(timed)
    monkeypatch.setattr(host_forecast, "MEASURED_SHARE", 2.0)
    every = forecast()
    assert every.measured == every.parts > count
    assert every.measured_share == pytest.approx(1.0)
    assert some.products_ms == pytest.approx(every.products_ms)
    assert some.rest_ms == pytest.approx(every.rest_ms)


@pytest.mark.slow
def test_timing_stops_at_its_budget(timed: list[StepPart], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_forecast, "BUDGET_S", -1.0)
    found = forecast()
    assert found.measured == 1
    assert found.products_ms + found.rest_ms > 0


@pytest.mark.slow
def test_doubled_batch_takes_up_to_twice_as_long(timed: list[StepPart]) -> None:
    small, large = (forecast(f"train.batch_size={size}") for size in (48, 96))
    assert small.products_ms < large.products_ms < 2.05 * small.products_ms


@pytest.mark.slow
def test_every_microbatch_is_counted(timed: list[StepPart]) -> None:
    once, twice = (forecast(f"train.accumulate_steps={n}") for n in (1, 2))
    assert twice.products_ms == pytest.approx(once.products_ms, rel=0.2)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.mode=eager", "train.mode = eager: must be graph"),
        ("parallel.mode=data,parallel.devices=2", "2 devices share a step"),
    ],
)
def test_unsupported_recipe_is_refused(override: str, problem: str) -> None:
    with pytest.raises(RunError, match=problem):
        forecast(*override.split(","))


@pytest.mark.medium
def test_absent_chip_is_not_timed(timed: list[StepPart]) -> None:
    recipe, work, run_schedule, backend = prepare(["+recipe=lenet5_digits"])
    absent: Any = SimpleNamespace(
        device=object(), placement=backend.placement, describe=lambda: {"device": "H900"}
    )
    with pytest.raises(RunError, match="H900: can't be timed on this machine"):
        forecast_run(recipe, work, run_schedule, absent)
    assert not timed


def test_check_reports_size_and_direction_of_the_error() -> None:
    found = HostForecast("lenet5", "cpu:0", "O0", 1.0, 0.5, 0.5, 3, 2, 0.9)
    assert measured_line(found, found.step_ms / 1.25).endswith("the forecast is 25% too long")
    assert measured_line(found, found.step_ms / 0.8).endswith("the forecast is 20% too short")


def test_forecast_of_a_long_run_has_its_days() -> None:
    found = HostForecast("resnet50", "cpu:0", "O0", 9000.0, 500.0, 100.0, 3, 2, 0.9)
    assert total_line(found, 140_580) == (
        "  in all    15.6 days (140,580 steps), besides evaluations"
    )


CPU = jax.devices("cpu")[0]


def only_part(function: Callable[..., Any], *args: Any) -> StepPart:
    (part,) = parts_of(jax.make_jaxpr(function)(*args), "cpu")
    return part


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("left", "right", "axes", "flops"),
    [
        ((3, 5), (5, 7), (((1,), (0,)), ((), ())), 2 * 3 * 5 * 7),
        ((2, 3, 5), (2, 7, 5), (((2,), (2,)), ((0,), (0,))), 2 * 2 * 3 * 5 * 7),
        ((2, 3, 5), (2, 3, 7), (((0, 1), (0, 1)), ((), ())), 2 * 2 * 3 * 5 * 7),
    ],
)
def test_product_time_counts_multiplications_and_additions(
    left: tuple[int, ...], right: tuple[int, ...], axes: Any, flops: int
) -> None:
    part = only_part(lambda a, b: jax.lax.dot_general(a, b, axes), ones(*left), ones(*right))
    results = part.program.jaxpr.outvars[0].aval.size
    moved = 4 * (np.prod(left) + np.prod(right) + results)
    ns = KERNEL_NS + BYTE_NS * moved + flops / FLOP_PER_NS["product"]
    assert rough_us(part) == pytest.approx(1e-3 * ns)


def test_convolution_time_counts_its_kernel_for_each_value() -> None:
    def convolve(x: Any, k: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    part = only_part(convolve, ones(2, 8, 8, 3), ones(3, 3, 3, 16))
    moved = 4 * (2 * 64 * 3 + 9 * 3 * 16 + 2 * 64 * 16)
    flops = 2 * (2 * 64 * 16) * (9 * 3)
    ns = KERNEL_NS + BYTE_NS * moved + flops / FLOP_PER_NS["convolution"]
    assert rough_us(part) == pytest.approx(1e-3 * ns)


def test_exponentials_and_random_draws_cost_more_than_sums() -> None:
    x = ones(64, 64)
    added, exponential = only_part(lambda x: x + 1, x), only_part(jnp.exp, x)
    key = jax.random.key(0)
    drawn = only_part(lambda k: jax.random.bits(k, (64, 64)), key)
    assert rough_us(added) < rough_us(exponential) < rough_us(drawn)


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32, np.uint8, np.bool_])
def test_parts_of_any_dtype_are_timed(dtype: Any, looped: bool) -> None:
    part = only_part(lambda x: jnp.where(x > 0, x, x[::-1]), ones(64, 8, dtype=dtype))
    assert 0 < measure_us(part, CPU, looped=looped) < 1e6


@pytest.mark.medium
def test_parts_with_keys_are_timed() -> None:
    def draw(key: Any) -> Any:
        return key, jax.random.bits(key, (8, 8))

    assert 0 < measure_us(only_part(draw, jax.random.key(0)), CPU, looped=True) < 1e6


def test_part_without_operands_is_timed() -> None:
    assert 0 < measure_us(only_part(lambda: jnp.arange(64) * 2), CPU, looped=True) < 1e6
