"""Programs that exceed the host's memory are refused before they run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.stages import compile as require_memory
from tests.conftest import MLP
from tests.whole_run import run

pytestmark = pytest.mark.medium

BATCH = ("train.batch_size=48", "train.steps=2")


def test_program_larger_than_the_memory_is_refused_before_it_runs(
    tiny: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(require_memory, "find_usable_bytes", lambda: 10_000)
    with pytest.raises(RunError) as caught:
        run(tiny(*MLP, *BATCH, "stages=[data,build,compile]"), tmp_path / "run")
    text = str(caught.value)
    assert "MB are available; train.memory=auto computes as many samples at once as fit" in text
    assert "train.accumulate_steps=" in text or "a smaller train.batch_size than 48" in text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_free_pages_are_returned_before_a_program_is_refused(
    tiny: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable_bytes = [10_000, 10**12]
    monkeypatch.setattr(require_memory, "find_usable_bytes", lambda: usable_bytes.pop(0))
    run(tiny(*MLP, *BATCH, "stages=[data,build,compile]"), tmp_path / "run")
    assert usable_bytes == []


@pytest.mark.parametrize(
    ("overrides", "excess", "program", "advice"),
    [
        ((), 3.5, "training step", "train.accumulate_steps=4 divides the batch"),
        ((), 4.5, "training step", "train.accumulate_steps=6 divides the batch"),
        (("train.accumulate_steps=2",), 1.1, "training step", "train.accumulate_steps=4 divides"),
        ((), 100.0, "training step", "fit, or choose a smaller train.batch_size than 48"),
        ((), 2.0, "evaluation", "dataset.eval.batch_size"),
    ],
)
def test_advice_divides_the_batch(
    tiny: Callable[..., Recipe],
    overrides: tuple[str, ...],
    excess: float,
    program: str,
    advice: str,
) -> None:
    recipe = tiny(*MLP, *BATCH, *overrides)
    assert advice in require_memory._advise(recipe, excess, program)
