"""Steps that two recipes share, by hand-made tables of learning rates."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.core.files.tree_diff import Difference
from pipeline.stages.fork import RateTable, count_equal_steps, list_earlier_changes

EPOCHS = Difference(("train", "epochs"), 20, 10)
DECAY = Difference(("train", "schedule", "decay_steps"), 2, 1)
SEED = Difference(("seed",), 2, 1)


def make_table(*rates: float, total: int | None = None) -> RateTable:
    return RateTable(np.float32(rates), total or len(rates))


@pytest.mark.parametrize(
    ("one", "other", "steps"),
    [
        (make_table(1, 1, 1), make_table(1, 1, 1, 1, 1), 3),
        (make_table(1, 1, 0.5), make_table(1, 1, 1, 1, 0.5), 2),
        (make_table(0.5, 1), make_table(1, 1), 0),
        (make_table(1, 1, 1, total=2), make_table(1, 1, 1), 2),
    ],
)
def test_steps_are_equal_until_the_first_other_rate(
    one: RateTable, other: RateTable, steps: int
) -> None:
    assert count_equal_steps(one, other) == count_equal_steps(other, one) == steps


def test_tables_of_other_rules_share_no_step() -> None:
    rules = RateTable(np.ones((3, 2), np.float32), 3)
    assert count_equal_steps(rules, make_table(1, 1, 1)) == 0
    other = RateTable(np.float32([[1, 1], [1, 2], [1, 1]]), 3)
    assert count_equal_steps(rules, other) == 1


def test_length_and_schedule_change_early_steps_only_by_their_rates() -> None:
    tables = make_table(1, 1, 0.5), make_table(1, 1, 1, 0.5)
    changes = [EPOCHS, DECAY, SEED]
    assert list_earlier_changes(changes, *tables, 0) == []
    assert list_earlier_changes(changes, *tables, 2) == [SEED]
    assert list_earlier_changes(changes, *tables, 3) == changes
