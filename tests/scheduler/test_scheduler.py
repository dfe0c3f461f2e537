"""The short version of `python -m tests.scheduler`, and the rules of its scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scheduler.schedules import (
    RECIPES,
    SIZES,
    SLOWEST_S,
    Scheduler,
    is_retried,
    read_console,
)


@pytest.mark.slow
def test_random_schedules_equal_an_unbroken_run(cache: Path, tmp_path: Path) -> None:
    """Kills, stops, fewer devices, and machines with the mirror alone, on a store that fails."""
    scheduler = Scheduler(tmp_path, 2, cache, 0.05)
    for name in RECIPES:
        scheduler.run_job(name)
    assert scheduler.tally.wrong == []
    assert scheduler.tally.restored > 0


def test_failed_run_is_not_restarted(cache: Path, tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path, 0, cache, 0.0)
    keys = [*RECIPES["mlp"], "train.optimizer.lr=1e30", "train.loss_scale=1.0"]
    process = scheduler.start(tmp_path, keys, SIZES[-1])
    process.join(SLOWEST_S)
    assert process.exitcode == 1, read_console(tmp_path)
    assert [is_retried(status) for status in (0, 1, 2, 75, -9)] == [False] * 3 + [True] * 2
