"""What a long run says besides its end."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.recipe import Recipe
from pipeline.engine.schedule import RunSchedule
from pipeline.stages.record.kept_times import KeptTimes, keep_times, locate_times
from pipeline.stages.runner.long_outlook import describe_first_loss
from pipeline.stages.runner.outlook import Outlook
from tests.conftest import MLP
from tests.stages.runner.test_outlook import DEVICE, lines_of, stop_at_once
from tests.whole_run import run

Compose = Callable[..., Recipe]


@pytest.mark.slow
def test_long_run_says_memory_checkpoints_and_what_is_shorter(
    tiny: Compose, tmp_path: Path
) -> None:
    length = ("train.steps=60", "train.sink_size=20")
    keys = (*MLP, *length, "eval.every_epochs=1", f"cache.root={tmp_path}")
    keep_times(locate_times(tiny(*keys), DEVICE), KeptTimes((600.0,), 900.0))
    ended = run(tiny(*keys), tmp_path / "run", signals=stop_at_once())
    assert ended.status == "stopped"
    lines = lines_of(tmp_path / "run")
    assert lines[0].startswith("about 600 s a step, 12 h ")
    assert lines[1] == (
        "the first line with a loss after 3 h 20 min; train.sink_size=1 prints one every 10 min, "
        "and changes the speed alone"
    )
    assert re.fullmatch(
        r"fits into memory: takes [\d.]+ [kM]B, [\d,.]+ [MG]B are available", lines[2]
    )
    assert lines[3] == "first checkpoint after 10 min; a crash loses at most 10 min of work"
    assert lines[4:] == [
        "shorter: images at their 8x8, without the resize to 32x32, have 16 times fewer pixels",
        "shorter: eval.every_epochs=10 saves 2 h 15 min",
        "shorter: train.minutes=60 trains what fits into an hour, 6 steps or 1.00 epochs",
    ]


@pytest.mark.parametrize(
    ("keys", "sink_steps", "line"),
    [
        (
            (),
            1562,
            "1 h 52 min; train.sink_size=13 prints one every 56 s, and changes the speed alone",
        ),
        (
            ("monitor.loss_every=100",),
            50,
            "7 min; train.sink_size=13 monitor.loss_every=13 prints one every 56 s, and changes "
            "the speed alone",
        ),
        (("train.sink_epochs=90", "train.epochs=null", "train.sink_size=100"), 100, "7 min"),
        ((), 13, None),
        (("monitor.loss_every=0",), 1562, None),
    ],
)
def test_late_first_loss_names_the_keys_that_make_it_earlier(
    keys: tuple[str, ...], sink_steps: int, line: str | None, tiny: Compose
) -> None:
    """4.3 s a step; sinks that are counted can't change."""
    schedule = RunSchedule(140_580, 1562, sink_steps)
    recipe = tiny("train.epochs=90", *keys)
    compiled: Any = SimpleNamespace(
        context=SimpleNamespace(recipe=recipe), built=SimpleNamespace(run_schedule=schedule)
    )
    lines = list(describe_first_loss(compiled, Outlook(140_580, 4.3)))
    assert lines == ([f"the first line with a loss after {line}"] if line else [])
