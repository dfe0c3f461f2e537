"""M-06, L-03, L-07: frozen parameters, rates, initialisers by pattern, averages, microbatches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from pipeline.data.random import seed_words
from pipeline.models.layers.initializers import Constant
from pipeline.models.layers.model_spec import InitRule
from pipeline.training.component_specs import AverageSpec
from pipeline.training.optimizers.first_order import Sgd
from pipeline.training.state import merge_params, require_trainable, select_averaged, split_params
from pipeline.training.step import make_train_step
from tests.training.test_step import (
    RATES,
    Noisy,
    assert_same,
    flat,
    make_batch,
    make_config,
    make_step,
    plain,
    start,
)

PARAMS = {
    "conv_0": {"kernel": np.ones(2), "bias": np.zeros(1)},
    "block": {"conv_0": {"kernel": np.full(3, 2.0)}},
}
SGD = Sgd(lr=0.1, weight_decay=0.0, decay_rules=()).build()


@pytest.mark.parametrize(
    ("pattern", "stays"),
    [
        ("conv_0", {"conv_0"}),
        ("conv_*", {"conv_0"}),
        ("block", {"block"}),
        ("*conv_0", {"conv_0", "block"}),
        ("*/kernel", {"block"}),
    ],
)
def test_pattern_covers_a_scope_and_its_contents(pattern: str, stays: set[str]) -> None:
    trained, frozen = split_params(PARAMS, (pattern,))
    assert stays <= set(frozen)
    assert_same(merge_params(trained, frozen), PARAMS)
    assert len(jax.tree.leaves(trained)) + len(jax.tree.leaves(frozen)) == 3


def test_patterns_freezing_nothing_or_everything_are_refused() -> None:
    with pytest.raises(ValueError, match="'dense' matches none of the 3 parameters"):
        require_trainable(PARAMS, ("conv_0", "dense"))
    with pytest.raises(ValueError, match=r"conv_0, block freezes all 3 parameters; nothing is"):
        require_trainable(PARAMS, ("conv_0", "block"))


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["Dense_0", "Dense_1"])
def test_frozen_parameters_are_unchanged_and_trained_parameters_updated(frozen: str) -> None:
    step = make_step(frozen=(frozen,))
    before = start(step)
    after, record = step.step(before, make_batch(), RATES)
    expected, _ = plain().step(start(plain()), make_batch(), RATES)
    (other,) = {"Dense_0", "Dense_1"} - {frozen}
    assert_same(after.params[frozen], before.params[frozen])
    np.testing.assert_allclose(
        flat(after.params[other]), flat(expected.params[other]), rtol=1e-6, atol=1e-7
    )
    assert frozen not in str(jax.tree.structure(after.opt_state))
    shifted = (flat(before.params[other]) - flat(after.params[other])) / RATES[0]
    assert record.grad_norm == pytest.approx(np.linalg.norm(shifted), rel=1e-4)


def products(jaxpr: Any) -> int:
    """The number of matrix products, inside of calls and branches too."""
    result = 0
    for equation in jaxpr.eqns:
        result += equation.primitive.name == "dot_general"
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                result += products(inner) if hasattr(inner, "eqns") else 0
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("frozen", "backward"), [((), 3), (("Dense_0",), 1), (("Dense_1",), 2)])
def test_backward_pass_ends_at_the_first_trained_layer(
    frozen: tuple[str, ...], backward: int
) -> None:
    """M-06: none below a frozen beginning; through a frozen end if something below is trained."""
    step = make_train_step(make_config(frozen=frozen))
    jaxpr = jax.make_jaxpr(step.step)(start(make_step(frozen=frozen)), make_batch(), RATES)
    assert products(jaxpr.jaxpr) == 2 + backward


@pytest.mark.slow
def test_rates_by_pattern_are_shares_of_the_schedule() -> None:
    """L-03; the last rule that covers a parameter wins, and the first rate is logged."""
    groups = ("*", "Dense_1", "*/bias")
    step, ruled = make_step(optimizer=SGD), make_step(optimizer=SGD, rate_groups=groups)
    before = start(step)
    after, _ = step.step(before, make_batch(), RATES)
    rates = RATES[:, None] * np.array([1, 0.5, 2, 0], np.float32)
    by_rule, record = ruled.step(before, make_batch(), rates)
    assert record.learning_rate == RATES[0]
    for layer, factor in (("Dense_0", 0.5), ("Dense_1", 2.0)):
        shifted, moved_by_rule = (
            flat(state.params[layer]["kernel"]) - flat(before.params[layer]["kernel"])
            for state in (after, by_rule)
        )
        np.testing.assert_allclose(moved_by_rule, factor * shifted, rtol=1e-3, atol=1e-6)
        assert_same(by_rule.params[layer]["bias"], before.params[layer]["bias"])


@pytest.mark.slow
def test_initialisers_by_pattern_change_only_matched_parameters() -> None:
    rules = (InitRule(pattern="Dense_1/kernel", init=Constant(value=0.25)),)
    fresh, ruled = start(plain()), start(make_step(init_rules=rules))
    assert (np.asarray(ruled.params["Dense_1"]["kernel"]) == 0.25).all()
    assert_same(ruled.params["Dense_0"], fresh.params["Dense_0"])
    rule = InitRule(pattern="x", init=Constant(value=0.0))
    step = make_train_step(make_config(init_rules=(rule,)))
    with pytest.raises(ValueError, match=r"init.rules: pattern 'x' matches none of the 4 param"):
        jax.eval_shape(step.init, seed_words(7))


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [False, True])
def test_average_follows_the_weights(warmup: bool) -> None:
    """By hand in float64; it is what evaluations look at."""
    spec = AverageSpec(decay=0.6, warmup=warmup)
    step = make_step(average=spec, frozen=("Dense_0/bias",))
    state = start(step)
    expected = {path: np.float64(leaf) for path, leaf in by_path(state.features["average"]).items()}
    for number in range(4):
        state, _ = step.step(state, make_batch(number), RATES)
        decay = min(0.6, (1 + number) / (10 + number)) if warmup else 0.6
        weights = by_path(state.params)
        expected = {
            path: decay * value + (1 - decay) * weights[path] for path, value in expected.items()
        }
    result = by_path(state.features["average"])
    assert sorted(result) == ["Dense_0/kernel", "Dense_1/bias", "Dense_1/kernel"]
    for path, value in expected.items():
        np.testing.assert_allclose(result[path], value, rtol=1e-5, atol=1e-7)
    sums = step.evaluate(state, make_batch(9), step.zero_sums())
    _, frozen = split_params(state.params, ("Dense_0/bias",))
    swapped = replace(state, params=merge_params(state.features["average"], frozen))
    parts = {"loss_scale": state.features["loss_scale"]}
    without_average = replace(swapped, features=parts)
    plainly = plain().evaluate(without_average, make_batch(9), step.zero_sums())
    assert_same(sums, plainly)


def by_path(tree: Any) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def test_average_restarts_from_restored_weights() -> None:
    restarted = select_averaged({"conv_0": {"bias": np.ones(1)}}, PARAMS)
    assert_same(restarted, {"conv_0": {"bias": PARAMS["conv_0"]["bias"]}})


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("changed", [{}, {"reduction": "sum"}], ids=["mean", "sum"])
@pytest.mark.parametrize("count", [4, 3])
def test_microbatches_add_up_to_the_batch(
    microbatches: int, changed: dict[str, Any], count: int
) -> None:
    """L-07: loss, gradient norm and weights, of a short batch too."""
    whole, split = make_step(**changed), make_step(**changed, accumulate=microbatches)
    batch = make_batch(count=np.int32(count))
    outcomes = [step.step(start(step), batch, RATES) for step in (whole, split)]
    (after, record), (after_split, record_split) = outcomes
    np.testing.assert_allclose(record_split[:5], record[:5], rtol=1e-5)
    np.testing.assert_allclose(flat(after_split.params), flat(after.params), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_batch_norm_statistics_are_per_microbatch() -> None:
    """The exception: statistics change with every microbatch, as with smaller batches."""
    step = make_step(network=Noisy(), accumulate=2)
    after, _ = step.step(start(step), make_batch(), RATES)
    x = make_batch().columns["image"].reshape(4, -1) / 255
    first, second = x[:2].mean(axis=0), x[2:].mean(axis=0)
    mean = after.collections["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(mean, 0.99 * 0.01 * first + 0.01 * second, rtol=1e-4)
