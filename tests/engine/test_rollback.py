"""Where a run goes back to, without a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.checkpoint.checkpointer import Checkpoints, Retention, read_state
from pipeline.checkpoint.restore import parse_host_state
from pipeline.core.errors import RunError
from pipeline.engine.rollback import Rollbacks
from pipeline.engine.schedule import is_due
from pipeline.training.features.non_finite_steps import NonFiniteStepCounts
from pipeline.training.state import TrainState


def state_at(step: int, skipped: int = 0, weight: float = 1.0) -> TrainState:
    counts = NonFiniteStepCounts(jnp.int32(0), jnp.int32(skipped))
    params = {"w": jnp.float32(weight)}
    return TrainState(jnp.int32(step), params, {}, (), {"non_finite_steps": counts})


def rollbacks(saved: dict[int, TrainState], most: int = 9, periods: Any = (5,)) -> Rollbacks:
    return Rollbacks(most, periods, lambda: sorted(saved), lambda step, _: saved[step])


def test_rollback_restores_the_weights_of_the_checkpoint() -> None:
    found = rollbacks({5: state_at(5, skipped=2, weight=3.0)}).go_back(8, state_at(7))
    assert (int(found.step), float(found.params["w"])) == (8, 3.0)
    assert int(found.features["non_finite_steps"].left_out) == 2 + 3


def test_unscheduled_checkpoints_are_skipped() -> None:
    saved = {step: state_at(step) for step in (0, 5, 6, 7)}
    back = rollbacks(saved)
    back.go_back(8, state_at(7))
    assert back.done[0].to == 5


def test_checkpoints_with_non_finite_weights_are_skipped() -> None:
    saved = {0: state_at(0), 5: state_at(5, weight=np.inf), 10: state_at(10, weight=np.nan)}
    back = rollbacks(saved)
    back.go_back(11, state_at(10))
    assert back.done[0].to == 0


def test_checkpoint_is_used_by_one_rollback_only() -> None:
    back = rollbacks({0: state_at(0), 5: state_at(5)})
    for step in (7, 9):
        back.go_back(step, state_at(step - 1))
    assert [gone.to for gone in back.done] == [5, 0]
    with pytest.raises(RunError, match="there is no checkpoint left to go back to"):
        back.go_back(10, state_at(9))


def test_number_of_rollbacks_is_limited() -> None:
    back = rollbacks({step: state_at(step) for step in range(0, 50, 5)}, most=2)
    for step in (12, 23):
        back.go_back(step, state_at(step - 1))
    with pytest.raises(RunError, match="went back 2 times already, as often as it may"):
        back.go_back(34, state_at(33))


@pytest.mark.medium
@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(31, 60), unique=True, max_size=6))
def test_resumed_run_restores_its_rollbacks(steps: list[int]) -> None:
    saved = {step: state_at(step) for step in range(0, 60, 5)}
    unbroken = rollbacks(saved)
    for step in sorted(steps):
        before = rollbacks(saved)
        before.remember(parse_host_state(unbroken.state()).rollbacks)
        before.go_back(step, state_at(step - 1))
        unbroken.go_back(step, state_at(step - 1))
        assert before.done == unbroken.done


@pytest.mark.medium
def test_rollback_checkpoints_are_retained(tmp_path: Path) -> None:
    retention = Retention(2, holds=partial(is_due, periods=(5,)))
    with Checkpoints(tmp_path, retention) as checkpoints:
        for step in (0, 5, 10, 11, 12, 13):
            checkpoints.save(step, state_at(step), {}, None)
        assert list(checkpoints.list_steps()) == [5, 10, 12, 13]
    found = read_state(tmp_path, 5, state_at(13))
    assert int(found.step) == 5
