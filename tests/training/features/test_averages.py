"""Schedule-free SGD and AdamW against the authors' sequences in numpy float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline import load_run, run
from pipeline.checkpoint.restore import read_saved
from pipeline.core.errors import RecipeError
from pipeline.training.features.averages import ScheduleFree
from pipeline.training.optimizers.adaptive import ScheduleFreeAdamW, ScheduleFreeSgd
from pipeline.training.state import Gradients, TrainState
from pipeline.training.step import get_evaluated_weights
from pipeline.training.step_config import StepConfig
from pipeline.training.update import apply_update
from tests.training.test_step import make_config

DECAY, STEPS, WARMUP, B2, EPS = 0.1, 50, 10, 0.95, 1e-6
COMMON = {"weight_decay": DECAY, "decay_rules": ()}
SGD = ScheduleFreeSgd(**COMMON, lr=0.4, momentum=0.9, rate_power=2.0, step_power=0.0)
ADAMW = ScheduleFreeAdamW(**COMMON, lr=0.05, b1=0.8, b2=B2, eps=EPS, rate_power=2.0, step_power=1.0)

PLAIN = "{name: sgd, lr: 0.1, weight_decay: 0.0, decay_rules: []}"
Spec = ScheduleFreeSgd | ScheduleFreeAdamW


def some_params() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {"dense_0": {"bias": rng.normal(size=3), "kernel": rng.normal(size=(4, 3))}}


def gradient_at(p: Any) -> Any:
    return np.sin(3 * p) + 0.2


def rates_of(spec: Spec) -> np.ndarray:
    """Warmup, the full rate, and a lower one, so the largest so far isn't always the present."""
    ramp = np.minimum(1, np.arange(1, STEPS + 1) / WARMUP)
    return np.float32(spec.lr) * np.where(np.arange(STEPS) < 40, ramp, 0.5)


def expected(spec: Spec, b1: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """x and y after each update of one array: the kernel."""
    y = some_params()["dense_0"]["kernel"]
    x, z, v, total, largest = y, y, np.zeros_like(y), 0.0, 0.0
    xs, ys = [], []
    for k, rate in enumerate(rates_of(spec)):
        g = gradient_at(y)
        v = B2 * v + (1 - B2) * g * g
        if isinstance(spec, ScheduleFreeAdamW):
            g = g / (np.sqrt(v / (1 - B2 ** (k + 1))) + EPS)
        z = z - rate * (g + DECAY * y)
        largest = max(largest, rate)
        weight = (k + 1) ** spec.step_power * largest**spec.rate_power
        total += weight
        x = (1 - weight / total) * x + weight / total * z
        y = b1 * x + (1 - b1) * z
        xs.append(x)
        ys.append(y)
    return xs, ys


def init_state(config: StepConfig, feature: ScheduleFree) -> TrainState:
    params = jax.tree.map(jnp.float32, some_params())
    parts = {feature.name: feature.init(params)}
    return TrainState(jnp.int32(0), params, {}, config.optimizer.init(params), parts)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "b1"), [(SGD, 0.9), (ADAMW, 0.8)], ids=["sgd", "adamw"])
def test_fifty_updates_match_the_sequences_in_float64(spec: Spec, b1: float) -> None:
    feature = ScheduleFree(spec.iterate_average())
    config = make_config(optimizer=spec.build(), features=(feature,))
    state = init_state(config, feature)

    @jax.jit
    def update(state: TrainState, rate: jax.Array) -> TrainState:
        values = jax.tree.map(lambda p: jnp.sin(3 * p) + 0.2, state.params)
        return apply_update(config, state, Gradients(values, jnp.float32(0), {}), 1, 1.0, rate)

    for rate, x, y in zip(rates_of(spec), *expected(spec, b1), strict=True):
        state = update(state, rate)
        evaluated = get_evaluated_weights(config, state)["params"]["dense_0"]["kernel"]
        np.testing.assert_allclose(evaluated, x, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(state.params["dense_0"]["kernel"], y, rtol=2e-5, atol=2e-5)


@pytest.mark.medium
def test_rate_of_zero_at_first_leaves_all_sequences_unchanged() -> None:
    feature = ScheduleFree(SGD.iterate_average())
    config = make_config(optimizer=SGD.build(), features=(feature,))
    state = init_state(config, feature)
    after = apply_update(config, state, Gradients(state.params, jnp.float32(0), {}), 1, 1.0, 0.0)
    kernel = after.features[feature.name]["evaluated"]["dense_0"]["kernel"]
    np.testing.assert_array_equal(kernel, state.params["dense_0"]["kernel"])
    np.testing.assert_array_equal(after.params["dense_0"]["kernel"], kernel)


@pytest.mark.slow
def test_loaded_run_has_the_averaged_weights(tiny: Callable[..., Any], tmp_path: Any) -> None:
    """As evaluations have: not the weights at which gradients were computed."""
    run(tiny("optimizer=schedule_free_adamw", "train.steps=6"), tmp_path)
    arrays = read_saved(tmp_path, lambda _: None).arrays
    loaded = load_run(tmp_path).parameters
    averages = {
        path.removeprefix("features/schedule_free/evaluated/"): array
        for path, array in arrays.items()
        if path.startswith("features/schedule_free/evaluated/")
    }
    assert len(averages) == sum(path.startswith("params/") for path in arrays) > 2
    for path, array in averages.items():
        np.testing.assert_array_equal(loaded[path], array)
        assert not np.array_equal(array, arrays[f"params/{path}"])


@pytest.mark.medium
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.features=[lookahead]"], "must be another optimizer with lookahead"),
        (
            ["train.features=[{name: accumulate_labels, labels: 50}]"],
            "must be another optimizer with accumulate_labels",
        ),
        (
            ["train.freeze=[conv_*]", "train.unfreeze=[{pattern: '*', after_steps: 5}]"],
            "train.unfreeze: must be [] with schedule_free_sgd",
        ),
        (
            [f"train.optimizers=[{{pattern: conv_0, optimizer: {PLAIN}}}]"],
            "train.optimizers: must be [] with schedule_free_sgd",
        ),
    ],
)
def test_feature_that_moves_parameters_otherwise_is_refused(
    overrides: list[str], words: str, tiny: Callable[..., Any]
) -> None:
    with pytest.raises(RecipeError) as caught:
        tiny("optimizer=schedule_free_sgd", *overrides)
    assert words in str(caught.value)
