"""Non-finite steps that are skipped on the device, and the outcome of a step."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.loss_scales import Dynamic
from pipeline.training.non_finite_steps import STOP, NonFinitePolicy, Rollback, Skip
from pipeline.training.state import (
    NonFiniteStepCounts,
    OverflowCounts,
    Record,
    TrainState,
)
from pipeline.training.telemetry import StepOutcome, count_updates
from pipeline.training.update import count_non_finite_step, decide_outcome
from tests.step_rows import telemetry_of
from tests.training.test_step import LOUD, RATES, assert_same, make_batch, make_step, start

FINITE = Record(*map(jnp.float32, (0.5, 0.1, 2.0, 1.0, 0.0)))
NON_FINITE = FINITE._replace(loss=jnp.float32(np.nan))
OVERFLOW = FINITE._replace(grad_norm=jnp.float32(np.inf), skipped=jnp.float32(1))
NO_OVERFLOWS = OverflowCounts(jnp.int32(0), jnp.int32(0), jnp.int32(0))


def state(in_a_row: int = 0, left_out: int = 0) -> TrainState:
    counts = NonFiniteStepCounts(jnp.int32(in_a_row), jnp.int32(left_out))
    return TrainState(jnp.int32(7), {}, {}, (), jnp.float32(1), bad_steps=counts)


def after(
    record: Record, before: TrainState, policy: NonFinitePolicy
) -> tuple[int, int, int, bool]:
    """The step, both counts, and whether training continues."""
    outcome = decide_outcome(policy, before, record.loss, record.grad_norm)
    counted = count_non_finite_step(policy, before, outcome)
    assert counted.bad_steps is not None
    counts = int(counted.bad_steps.in_a_row), int(counted.bad_steps.left_out)
    return int(counted.step), *counts, bool(outcome.should_continue)


@pytest.mark.medium
def test_non_finite_step_is_counted_and_training_continues() -> None:
    assert after(NON_FINITE, state(1, 4), Skip(most_in_a_row=3)) == (8, 2, 5, True)


def test_consecutive_non_finite_steps_end_training() -> None:
    assert after(NON_FINITE, state(3, 4), Skip(most_in_a_row=3)) == (7, 3, 4, False)


def test_finite_step_resets_the_count() -> None:
    assert after(FINITE, state(2, 4), Skip()) == (7, 0, 4, True)


def test_overflow_neither_increments_nor_resets_the_count() -> None:
    before = replace(state(2, 4), overflows=NO_OVERFLOWS)
    assert after(OVERFLOW, before, Skip()) == (7, 2, 4, True)


@pytest.mark.parametrize("policy", [STOP, Rollback()])
def test_stop_and_rollback_policies_end_the_loop(policy: NonFinitePolicy) -> None:
    outcome = decide_outcome(policy, state(), NON_FINITE.loss, NON_FINITE.grad_norm)
    assert_same(count_non_finite_step(policy, state(), outcome), state())
    assert not bool(outcome.should_continue)


@pytest.mark.parametrize("skips_overflow", [False, True])
def test_telemetry_outcome_matches_the_step(skips_overflow: bool) -> None:
    """Applied, overflow and non-finite, each with and without a loss scale that skips overflows."""
    before = replace(state(), overflows=NO_OVERFLOWS if skips_overflow else None)
    records = (FINITE, OVERFLOW, NON_FINITE)
    decided = [decide_outcome(Skip(), before, r.loss, r.grad_norm) for r in records]
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
    assert overflown.overflows is not None
    assert overflown.bad_steps is not None
    assert (int(overflown.overflows.skipped_steps), int(overflown.bad_steps.left_out)) == (1, 0)
    broken = make_batch(columns={**make_batch().columns, "image": np.full((4, 2, 2, 1), np.nan)})
    left, record = step.step(overflown, broken, RATES)
    assert (record.skipped, bool(record.should_continue)) == (1, True)
    assert left.bad_steps is not None
    assert (int(left.step), int(left.bad_steps.left_out)) == (2, 1)
    assert_same((left.loss_scale, left.overflows), (overflown.loss_scale, overflown.overflows))
    assert_same((left.params, left.opt_state), (before.params, before.opt_state))
