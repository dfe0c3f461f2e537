"""Non-finite steps that are skipped on the device, and the outcome of a step."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.features.loss_scales import Dynamic, LossScaleState, OverflowCounts
from pipeline.training.features.non_finite_steps import (
    STOP,
    NonFinitePolicy,
    NonFiniteStepCounts,
    NonFiniteSteps,
    Rollback,
    Skip,
)
from pipeline.training.state import Record, TrainState
from pipeline.training.step_config import StepConfig
from pipeline.training.telemetry import StepOutcome, count_updates
from pipeline.training.update import decide_outcome
from tests.step_rows import telemetry_of
from tests.training.test_step import (
    LOUD,
    RATES,
    assert_same,
    make_batch,
    make_config,
    make_step,
    start,
)

FINITE = Record(*map(jnp.float32, (0.5, 0.1, 2.0, 1.0, 0.0)))
NON_FINITE = FINITE._replace(loss=jnp.float32(np.nan))
OVERFLOW = FINITE._replace(grad_norm=jnp.float32(np.inf), skipped=jnp.float32(1))
NO_OVERFLOWS = OverflowCounts(jnp.int32(0), jnp.int32(0), jnp.int32(0))
SKIPPING = LossScaleState(jnp.float32(1), NO_OVERFLOWS)


def state(in_a_row: int = 0, left_out: int = 0) -> TrainState:
    counts = NonFiniteStepCounts(jnp.int32(in_a_row), jnp.int32(left_out))
    parts = {"loss_scale": LossScaleState(jnp.float32(1), None), "non_finite_steps": counts}
    return TrainState(jnp.int32(7), {}, {}, (), parts)


def make_policy_config(policy: NonFinitePolicy) -> StepConfig:
    return make_config(on_nan=policy if policy.counts_steps else None)


def count_step(config: StepConfig, before: TrainState, outcome: StepOutcome) -> TrainState:
    feature = config.find(NonFiniteSteps)
    return before if feature is None else feature.change_step(before, outcome)


def after(
    record: Record, before: TrainState, policy: NonFinitePolicy
) -> tuple[int, int, int, bool]:
    """The step, both counts, and whether training continues."""
    config = make_policy_config(policy)
    outcome = decide_outcome(config, before, record.loss, record.grad_norm)
    counted = count_step(config, before, outcome)
    part = counted.features["non_finite_steps"]
    counts = int(part.in_a_row), int(part.left_out)
    return int(counted.step), *counts, bool(outcome.should_continue)


@pytest.mark.medium
def test_non_finite_step_is_counted_and_training_continues() -> None:
    assert after(NON_FINITE, state(1, 4), Skip(most_in_a_row=3)) == (8, 2, 5, True)


def test_consecutive_non_finite_steps_end_training() -> None:
    assert after(NON_FINITE, state(3, 4), Skip(most_in_a_row=3)) == (7, 3, 4, False)


def test_finite_step_resets_the_count() -> None:
    assert after(FINITE, state(2, 4), Skip()) == (7, 0, 4, True)


def test_overflow_neither_increments_nor_resets_the_count() -> None:
    before = state(2, 4).replace_part("loss_scale", SKIPPING)
    assert after(OVERFLOW, before, Skip()) == (7, 2, 4, True)


@pytest.mark.parametrize("policy", [STOP, Rollback()])
def test_stop_and_rollback_policies_end_the_loop(policy: NonFinitePolicy) -> None:
    config = make_policy_config(policy)
    outcome = decide_outcome(config, state(), NON_FINITE.loss, NON_FINITE.grad_norm)
    assert_same(count_step(config, state(), outcome), state())
    assert not bool(outcome.should_continue)


@pytest.mark.parametrize("skips_overflow", [False, True])
def test_telemetry_outcome_matches_the_step(skips_overflow: bool) -> None:
    """Applied, overflow and non-finite, each with and without a loss scale that skips overflows."""
    before = state().replace_part("loss_scale", SKIPPING) if skips_overflow else state()
    records = (FINITE, OVERFLOW, NON_FINITE)
    config = make_policy_config(Skip())
    decided = [decide_outcome(config, before, r.loss, r.grad_norm) for r in records]
    rows = [[*r[:4], outcome.skipped] for r, outcome in zip(records, decided, strict=True)]
    read = telemetry_of(0, np.array(rows, np.float32)).classify_steps(skips_overflow=skips_overflow)
    for name in StepOutcome._fields:
        assert getattr(read, name).tolist() == [bool(getattr(one, name)) for one in decided]
    assert sum(getattr(read, name).astype(int) for name in StepOutcome._fields).tolist() == [1] * 3


def test_skipped_step_is_not_an_update() -> None:
    assert int(count_updates(state(left_out=3))) == 4


@pytest.mark.slow
def test_overflow_is_for_the_loss_scale_and_nan_loss_for_the_policy() -> None:
    step = make_step(loss_scale=Dynamic(init=1e36, factor=4.0), train_ops=LOUD, on_nan=Skip())
    before = start(step)
    overflown, record = step.step(before, make_batch(), RATES)
    assert (record.skipped, bool(record.should_continue)) == (1, True)
    scale, counts = (overflown.features[name] for name in ("loss_scale", "non_finite_steps"))
    assert (int(scale.overflows.skipped_steps), int(counts.left_out)) == (1, 0)
    broken = make_batch(columns={**make_batch().columns, "image": np.full((4, 2, 2, 1), np.nan)})
    left, record = step.step(overflown, broken, RATES)
    assert (record.skipped, bool(record.should_continue)) == (1, True)
    assert (int(left.step), int(left.features["non_finite_steps"].left_out)) == (2, 1)
    assert_same(left.features["loss_scale"], scale)
    assert_same((left.params, left.opt_state), (before.params, before.opt_state))
