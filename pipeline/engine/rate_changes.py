"""Changes of learning rates and parameters that callbacks request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from pipeline.checkpoint.host_state import MAX_RATE, RateChange

if TYPE_CHECKING:
    from pipeline.training.part_specs import RateRule
    from pipeline.training.state import TrainState


def combined_changes(changes: Sequence[RateChange]) -> tuple[RateChange, ...]:
    """Return changes that do the same in one rate, one factor, or one of each in this order."""
    kept: list[RateChange] = []
    for change in changes:
        if change.factor is None:
            kept = [change]
        elif kept and kept[-1].factor is not None:
            kept[-1] = RateChange(factor=min(kept[-1].factor * change.factor, MAX_RATE))
        else:
            kept.append(change)
    return tuple(kept)


def changed_rates(
    rates: np.ndarray, changes: Sequence[RateChange], rules: Sequence[RateRule] = ()
) -> np.ndarray:
    """Return a table of learning rates, a row for each update, with changes in their order.

    They hold for rows of updates in the past too, which a rollback may repeat. A rate that is set
    is that of the main schedule, and times its factor that of each rule without a schedule of its
    own, whose columns follow.
    """
    for change in changes:
        if change.factor is None:
            rates = rates.copy()
            columns = rates.reshape(len(rates), -1)
            columns[:, 0] = change.rate
            for column, rule in enumerate(rules, start=1):
                if rule.schedule is None:
                    columns[:, column] = columns[:, 0] * np.float32(rule.factor)
        else:
            with np.errstate(over="ignore"):
                rates = rates * np.float32(change.factor)
    return rates


def with_parameters(state: TrainState, params: Any) -> TrainState:
    """Return the state on the host with other parameters; a moving average stays what it is."""
    return replace(jax.tree.map(np.asarray, state), params=params)
