"""The step that is left out, on the device."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.bad_steps import STOP, BadStepPolicy, Rollback, Skip
from pipeline.training.loss_scales import Dynamic
from pipeline.training.state import BadStepCounts, Record, TrainState
from pipeline.training.update import skip_bad_step, updates_so_far
from tests.training.test_step import LOUD, RATES, assert_same, make_batch, make_step, start

GOOD = Record(*map(jnp.float32, (0.5, 0.1, 2.0, 1.0, 0.0)))
BAD = GOOD._replace(loss=jnp.float32(np.nan))
OVERFLOW = GOOD._replace(grad_norm=jnp.float32(np.inf), skipped=jnp.float32(1))


def state(in_a_row: int = 0, left_out: int = 0) -> TrainState:
    counts = BadStepCounts(jnp.int32(in_a_row), jnp.int32(left_out))
    return TrainState(jnp.int32(7), {}, {}, (), jnp.float32(1), bad_steps=counts)


def after(record: Record, before: TrainState, policy: BadStepPolicy) -> tuple[int, int, int, bool]:
    """The step, both counts, and whether training goes on."""
    found, told = skip_bad_step(policy, before, record)
    assert found.bad_steps is not None
    counts = int(found.bad_steps.in_a_row), int(found.bad_steps.left_out)
    return int(found.step), *counts, bool(told.should_continue)


def test_a_bad_step_counts_and_training_goes_on() -> None:
    assert after(BAD, state(1, 4), Skip(most_in_a_row=3)) == (8, 2, 5, True)


def test_so_many_in_a_row_end_it() -> None:
    assert after(BAD, state(3, 4), Skip(most_in_a_row=3)) == (7, 3, 4, False)


def test_a_good_step_ends_a_row() -> None:
    assert after(GOOD, state(2, 4), Skip()) == (7, 0, 4, True)


def test_an_overflow_neither_counts_nor_ends_a_row() -> None:
    assert after(OVERFLOW, state(2, 4), Skip()) == (7, 2, 4, True)


@pytest.mark.parametrize("policy", [STOP, Rollback()])
def test_other_policies_end_the_loop(policy: BadStepPolicy) -> None:
    found, told = skip_bad_step(policy, state(), BAD)
    assert_same(found, state())
    assert not bool(told.should_continue)


def test_what_was_left_out_is_no_update() -> None:
    assert int(updates_so_far(state(left_out=3))) == 4


def test_an_overflow_is_the_loss_scales_and_a_loss_that_is_no_number_the_policys() -> None:
    step = make_step(loss_scale=Dynamic(init=1e36, factor=4.0), train_ops=LOUD, on_nan=Skip())
    before = start(step)
    overflown, told = step.step(before, make_batch(), RATES)
    assert (told.skipped, bool(told.should_continue)) == (1, True)
    assert overflown.overflows is not None
    assert overflown.bad_steps is not None
    assert (int(overflown.overflows.skipped_steps), int(overflown.bad_steps.left_out)) == (1, 0)
    broken = make_batch(columns={**make_batch().columns, "image": np.full((4, 2, 2, 1), np.nan)})
    left, told = step.step(overflown, broken, RATES)
    assert (told.skipped, bool(told.should_continue)) == (1, True)
    assert left.bad_steps is not None
    assert (int(left.step), int(left.bad_steps.left_out)) == (2, 1)
    assert_same((left.loss_scale, left.overflows), (overflown.loss_scale, overflown.overflows))
    assert_same((left.params, left.opt_state), (before.params, before.opt_state))
