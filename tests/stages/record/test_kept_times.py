"""Times that are kept from run to run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.recipe import Recipe
from pipeline.stages.record.kept_times import KeptTimes, keep_times, locate_times, read_times

Compose = Callable[..., Recipe]


def test_newer_times_replace_older_ones_but_unknown_ones_do_not(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "times" / "a.json"
    assert read_times(file) == KeptTimes()
    assert KeptTimes().step_s is None
    keep_times(file, KeptTimes((0.5,), 2.0, {"training step": 30.0, "evaluation": 4.0}))
    keep_times(file, KeptTimes((), None, {"training step": 40.0}))
    assert read_times(file) == KeptTimes((0.5,), 2.0, {"training step": 40.0, "evaluation": 4.0})


def test_one_run_on_a_busy_machine_does_not_change_the_expected_step(tmp_path: Path) -> None:
    """The median of the last five counts."""
    file = tmp_path / "a.json"
    for step_s in (9.0, 1.4, 1.5, 3.4, 1.3, 1.6):
        keep_times(file, KeptTimes((step_s,)))
    kept = read_times(file)
    assert kept.steps_s == (1.4, 1.5, 3.4, 1.3, 1.6)
    assert kept.step_s == 1.5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"steps_s": 1, "evaluation_s": 1, "compile_s": 7}',
        '{"steps_s": ["1", -2, true], "evaluation_s": true, "compile_s": {"a": -1}}',
        '{"steps_s": [1e999], "evaluation_s": NaN, "compile_s": {}}',
    ],
)
def test_damaged_file_has_no_times_and_is_replaced(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    assert read_times(file) == KeptTimes()
    keep_times(file, KeptTimes((1.0,)))
    assert read_times(file) == KeptTimes((1.0,))


def test_unwritable_folder_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    keep_times(tmp_path / "file" / "a.json", KeptTimes((1.0,)))
    keep_times(None, KeptTimes((1.0,)))
    assert read_times(None) == KeptTimes()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        (["train.steps=7", "seed=3", "train.optimizer.lr=0.3", "schedule=cosine"], True),
        (["name=other", "eval.every_epochs=3", "checkpoint.keep=1"], True),
        (["train.batch_size=8"], False),
        (["train.precision=bf16"], False),
        (["model=mlp"], False),
        (["optimizer=adam"], False),
        (["eval.samples=8"], False),
    ],
)
def test_times_are_of_runs_with_the_same_step(
    tiny: Compose, changes: list[str], *, is_same: bool
) -> None:
    file = locate_times(tiny(), "cpu:0 cpu")
    assert (locate_times(tiny(*changes), "cpu:0 cpu") == file) is is_same
    assert locate_times(tiny(), "cuda:0 H100") != file


@pytest.mark.medium
def test_recipe_that_keeps_no_programs_keeps_no_times(tiny: Compose) -> None:
    assert locate_times(tiny("cache.compiled=false"), "cpu:0 cpu") is None
