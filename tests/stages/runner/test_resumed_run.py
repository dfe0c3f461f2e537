from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError, RunError
from pipeline.stages.record.recorded_recipe import FREE_TO_CHANGE, write_recipe
from pipeline.stages.record.run_directory import SUMMARY, lock_run, make_run_dir
from pipeline.stages.runner.resumed_run import (
    describe_no_run,
    find_run_to_resume,
    keep_length,
    list_changed_keys,
    list_changes_with_length,
)
from tests.stages.record.test_run_directory import leave

Compose = Callable[..., Recipe]


def test_run_is_new_unless_it_resumes(tiny: Compose, tmp_path: Path) -> None:
    leave(tmp_path / "day" / "run", tiny())
    assert find_run_to_resume(tiny(), tmp_path) is None


@pytest.mark.slow
def test_auto_resumes_the_newest_unfinished_run_of_the_recipe(
    tiny: Compose, tmp_path: Path
) -> None:
    day = tmp_path / "2026-01-01"
    leave(day / "older", tiny(), None, age_s=50)
    wanted = leave(day / "wanted", tiny(), None, age_s=40)
    leave(day / "other_seed", tiny("seed=5"), None, age_s=30)
    leave(day / "done", tiny(), "done", age_s=20)
    (day / "no_run").mkdir()
    assert find_run_to_resume(tiny("train.resume=auto"), tmp_path) == wanted


@pytest.mark.parametrize("status", ["stopped", "failed", None])
def test_stopped_failed_and_killed_runs_are_unfinished(
    status: str | None, tiny: Compose, tmp_path: Path
) -> None:
    wanted = leave(tmp_path / "day" / "run", tiny(), status)
    assert find_run_to_resume(tiny("train.resume=auto"), tmp_path) == wanted


def test_truncated_summary_means_unfinished(tiny: Compose, tmp_path: Path) -> None:
    wanted = leave(tmp_path / "day" / "run", tiny())
    (wanted / "summary.json").write_text('{"status": "do')
    assert find_run_to_resume(tiny("train.resume=auto"), tmp_path) == wanted


@pytest.mark.medium
def test_auto_does_not_parse_recipes_of_finished_runs(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        done = make_run_dir(tmp_path / "2026-01-01" / f"{number}_done")
        write_recipe(done, tiny())
        (done / SUMMARY).write_text('{"status": "done"}')
    parsed: list[Path] = []
    monkeypatch.setattr(
        "pipeline.stages.runner.resumed_run.list_changed_keys",
        lambda recipe, run_dir: parsed.append(run_dir) or ["another"],
    )
    assert find_run_to_resume(tiny("train.resume=auto"), tmp_path) is None
    assert parsed == []
    (done / SUMMARY).write_text('{"status": "failed"}')
    assert find_run_to_resume(tiny("train.resume=auto"), tmp_path) is None
    assert parsed == [done]


def test_auto_without_an_unfinished_run_starts_a_new_run(tiny: Compose, tmp_path: Path) -> None:
    leave(tmp_path / "day" / "done", tiny(), "done")
    assert find_run_to_resume(tiny("train.resume=auto"), tmp_path) is None
    assert find_run_to_resume(tiny("train.resume=auto"), tmp_path / "nowhere") is None


def test_auto_skips_unreadable_recipes(tiny: Compose, tmp_path: Path) -> None:
    """A run killed while it wrote its recipe, or a stranger's folder, is no reason to fail."""
    wanted = leave(tmp_path / "day" / "run", tiny(), None, age_s=10)
    texts = {"half": "name: [unclosed", "empty": "", "list": "- 1", "null": "train: null"}
    for name, text in texts.items():
        broken = leave(tmp_path / "day" / name, tiny())
        (broken / "recipe.yaml").write_text(text)
        os.utime(broken / "recipe.yaml", (2e9, 2e9))
    assert find_run_to_resume(tiny("train.resume=auto"), tmp_path) == wanted


@pytest.mark.slow
def test_named_finished_run_can_be_resumed(tiny: Compose, tmp_path: Path) -> None:
    """To train it longer."""
    run_dir = leave(tmp_path / "run", tiny("train.steps=5"), "done")
    assert find_run_to_resume(tiny("train.steps=9", f"train.resume={run_dir}")) == run_dir


@pytest.mark.slow
def test_loss_changing_keys_are_listed_with_both_values(tiny: Compose, tmp_path: Path) -> None:
    run_dir = leave(tmp_path / "run", tiny())
    changed = ["seed=2", "train.batch_size=8", "train.clip.norm=1.0", "dataset.eval.ops=[hwc2chw]"]
    ops = "dataset.train.ops=[hwc2chw]"
    recipe = tiny(*changed, ops, "model.name=mlp", "+model.hidden=[4]", f"train.resume={run_dir}")
    with pytest.raises(RecipeError) as caught:
        find_run_to_resume(recipe)
    problems = {problem.split(" = ")[0]: problem for problem in caught.value.problems}
    advice = "in the run to resume; keep it, or start a new run with checkpoint.restore"
    assert problems["seed"] == f"seed = 2: was 1 {advice}"
    assert problems["train.batch_size"] == f"train.batch_size = 8: was 16 {advice}"
    assert problems["train.clip.norm"] == f"train.clip.norm = 1.0: was null {advice}"
    assert problems["model.name"] == f"model.name = mlp: was lenet5 {advice}"
    assert problems["model.hidden.0"] == f"model.hidden.0 = 4: was null {advice}"
    assert problems["dataset.train.ops.0.name"].startswith("dataset.train.ops.0.name = hwc2chw: ")
    assert caught.value.exit_status == 2


FREE = {
    "train.epochs": "train.epochs=3",
    "train.sink_epochs": "train.sink_epochs=3",
    "train.steps": "train.steps=3",
    "train.minutes": "train.minutes=3",
    "train.until": "train.until=18:00",
    "train.end_step": "train.end_step=3",
    "train.planned_for": "train.planned_for='minutes = 3'",
    "train.sink": "train.sink=false",
    "train.sink_size": "train.sink_size=3",
    "train.mechanism": "train.mechanism=soft",
    "train.dispatch_seconds": "train.dispatch_seconds=3.0",
    "train.feed": "train.feed=stream",
    # From one size to another: tests/stages/test_fit_memory.py.
    "train.memory": None,
    "train.resume": None,
    "train.resume_changed": "train.resume_changed=allow",
    "dataset.root": "dataset.root=elsewhere",
    "dataset.mirrors": "dataset.mirrors=['https://elsewhere/']",
    "stages": "stages=[data,build,compile,train,checkpoint]",
    "autotune": "autotune=tune",
    "autotune_search": "autotune_search=ga",
    "debug": "debug=true",
    "checkpoint": "checkpoint.keep=3",
    "eval": "eval.every_steps=3",
    "monitor": "monitor.loss_every=3",
    "dump": "dump.steps=3",
    "receipt": "receipt.every_steps=4",
    "cache": "cache.compiled=false",
    "profile": "profile.steps=20",
    # Both with parallel.mode=data: tests/training/parallel/test_layouts.py.
    "parallel.devices": None,
    "parallel.mesh": None,
    "launch": "launch=none",
}


def test_free_keys_have_a_test_case_each() -> None:
    assert list(FREE) == [".".join(key) for key in FREE_TO_CHANGE]


@pytest.mark.slow
@pytest.mark.parametrize("override", [value for value in FREE.values() if value])
def test_free_keys_can_change_at_a_resume(override: str, tiny: Compose, tmp_path: Path) -> None:
    run_dir = leave(tmp_path / "run", tiny())
    assert find_run_to_resume(tiny(override, f"train.resume={run_dir}")) == run_dir


@pytest.mark.slow
def test_longer_list_differs_at_its_end(tiny: Compose, tmp_path: Path) -> None:
    run_dir = leave(tmp_path / "run", tiny("model=mlp", "model.hidden=[4]"))
    longer = tiny("model=mlp", "model.hidden=[4,5]", f"train.resume={run_dir}")
    with pytest.raises(RecipeError, match=r"model\.hidden\.1 = 5: was null in the run to resume"):
        find_run_to_resume(longer)


@pytest.mark.slow
@pytest.mark.parametrize("content", [None, "name: [unclosed", b"\xff\xfe\x00"])
def test_invalid_run_directory_is_refused(
    content: str | bytes | None, tiny: Compose, tmp_path: Path
) -> None:
    if content is not None:
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "recipe.yaml").write_bytes(data)
    with pytest.raises(RecipeError) as caught:
        find_run_to_resume(tiny(f"train.resume={tmp_path}"))
    assert caught.value.problems == (
        f"train.resume = {tmp_path}: must be a run directory; recipe.yaml can't be read from it",
    )


def test_run_is_locked_by_one_process(tiny: Compose, tmp_path: Path) -> None:
    """A second process neither joins a run that is being written, nor finds it to resume."""
    run_dir = leave(tmp_path / "day" / "run", tiny())
    message = re.escape(f"{run_dir}: another process is writing this run")
    with lock_run(run_dir):
        assert find_run_to_resume(tiny("train.resume=auto"), tmp_path) is None
        with pytest.raises(RunError, match=message), lock_run(run_dir):
            pass
    assert find_run_to_resume(tiny("train.resume=auto"), tmp_path) == run_dir


@pytest.mark.slow
def test_auto_skips_runs_of_another_length(tiny: Compose, tmp_path: Path) -> None:
    """Its schedule was another one, so it could not go on as if unbroken."""
    leave(tmp_path / "day" / "run", tiny("train.steps=50"))
    assert find_run_to_resume(tiny("train.steps=60", "train.resume=auto"), tmp_path) is None


def test_unfinished_run_of_another_length_is_named(tiny: Compose, tmp_path: Path) -> None:
    day = tmp_path / "day"
    other = leave(day / "other", tiny("train.epochs=3"), "stopped", age_s=20)
    leave(day / "other_seed", tiny("train.epochs=3", "seed=5"), "stopped", age_s=10)
    leave(day / "done", tiny("train.epochs=4"), "done")
    recipe = tiny("train.epochs=7", "train.resume=auto")
    assert describe_no_run(recipe, tmp_path) == (
        f"the unfinished run {other} has another length (train.epochs = 7: was 3); starting a new "
        f"run; train.resume={other} continues that one with the new length"
    )
    assert find_run_to_resume(tiny("train.epochs=7", f"train.resume={other}"), tmp_path) == other
    (other / SUMMARY).write_text('{"status": "done"}')
    expected = "no unfinished run of this recipe; starting a new one"
    assert describe_no_run(recipe, tmp_path) == expected


def test_run_continues_without_locks_and_never_joins_killed_runs(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without a summary may be alive; one that has ended is free."""

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("pipeline.core.files.atomic_write.fcntl.flock", refuse)
    ended = leave(tmp_path / "day" / "ended", tiny(), "stopped", age_s=10)
    alive = leave(tmp_path / "day" / "alive", tiny(), None)
    with lock_run(alive) as lock:
        assert not lock.is_certain
    assert find_run_to_resume(tiny("train.resume=auto"), tmp_path) == ended


def test_auto_skips_unlockable_runs(tiny: Compose, tmp_path: Path) -> None:
    wanted = leave(tmp_path / "day" / "run", tiny(), None, age_s=10)
    others = leave(tmp_path / "day" / "others", tiny())
    (others / ".lock").mkdir()
    assert find_run_to_resume(tiny("train.resume=auto"), tmp_path) == wanted


@pytest.mark.medium
def test_equal_recipe_is_compared_without_defaults(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that is done already asks this of every job."""
    write_recipe(tmp_path, tiny("train.resume=auto"))
    filled: list[object] = []
    module = "pipeline.config.defaults"
    monkeypatch.setattr(f"{module}.normalise_recipe", lambda tree: filled.append(tree) or tree)
    assert list_changed_keys(tiny(), tmp_path) == []
    assert filled == []
    (line,) = list_changed_keys(tiny("seed=3"), tmp_path)
    assert line.startswith("seed = 3: was 1")
    assert filled != []


@pytest.mark.medium
def test_recorded_steps_for_a_deadline_are_reused(tiny: Compose, tmp_path: Path) -> None:
    """A run that was killed before it chose its steps chooses anew; another deadline is refused."""
    asked = tiny("train.minutes=5")
    unplanned = asked.model_dump(mode="json")
    assert keep_length(asked, unplanned, tmp_path) == asked
    frozen = {"steps": 45, "minutes": None, "planned_for": "minutes = 5", "end_step": 40}
    recorded = {**unplanned, "train": {**unplanned["train"], **frozen}}
    train = keep_length(asked, recorded, tmp_path).train
    assert (train.steps, train.minutes, train.end_step) == (45, None, 40)
    assert list_changes_with_length(asked, recorded, tmp_path) == []
    assert keep_length(tiny(), recorded, tmp_path) == tiny()
    other = tiny("train.until=18:00")
    assert list_changes_with_length(other, recorded, "run") == [
        "train.until = 18:00: run has its length for minutes = 5; leave it out to keep that length"
    ]
    counted = tiny().model_dump(mode="json")
    with pytest.raises(RecipeError, match="run has its length for no deadline; leave it out"):
        keep_length(asked, counted, "run")
