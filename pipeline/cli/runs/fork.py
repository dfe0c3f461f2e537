"""`python -m pipeline fork RUN_DIR@N KEY=VALUE ...`: train on from a step of a run, changed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pipeline.checkpoint.checkpoint_folder import FOLDER, list_saved_steps
from pipeline.checkpoint.host_state import LOGS
from pipeline.checkpoint.restore import arrange_arrays
from pipeline.cli.commands.command import CommandResult
from pipeline.cli.train import train_run
from pipeline.config.overrides import get_key
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError, RunError, UsageError
from pipeline.core.files.name_text import show_name
from pipeline.core.files.value_text import join_first
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.inspect.dumps.opened_recipe import make_silent_reporter
from pipeline.inspect.replay import Replay, find_last_step, open_replay
from pipeline.stages.build import Built, build, fingerprint_rate_files
from pipeline.stages.data import load_data
from pipeline.stages.fork import (
    Fork,
    RateTable,
    is_evaluation_due,
    list_earlier_changes,
    read_host,
    stop_early,
    write_fork,
)
from pipeline.stages.record.continuity import require_readable_version, require_same_origin
from pipeline.stages.record.provenance import Provenance, describe_process
from pipeline.stages.record.recorded_recipe import FREE_TO_CHANGE, LENGTH, find_changes
from pipeline.stages.record.run_directory import (
    RECIPE,
    create_run_dir,
    make_run_dir,
    require_unused,
)
from pipeline.stages.record.summary import list_versions
from pipeline.stages.record.trained_run import read_run_recipe

END = "end"
"""The last step, after @."""
OWN_KEYS = ("train.resume", "checkpoint.restore", "hydra.run.dir")
FREE = tuple(path for path in FREE_TO_CHANGE if path not in LENGTH)
"""Keys that change no step."""
MAX_NAMED = 5
MAX_DIGITS = 9


def main(place: Path, overrides: Sequence[str] = (), out: Path | None = None) -> CommandResult:
    """Write a new run directory with the state of a run at a step, and train on from there.

    Raises UsageError for a place that isn't RUN_DIR@N, DataError if the run can't be read, if its
    data have changed or if `out` isn't empty, RecipeError if the recipe with `overrides` can't go
    on from the run's state, RunError if bits of the run can't be had or the new run fails.
    """
    started_at = time.perf_counter()
    run_dir, step_text = split_place(place)
    if keys := [word for word in overrides if get_key(word) in OWN_KEYS]:
        raise UsageError(keys, "can't be set: a fork has its own start, and --out its own folder")
    if out is not None:
        _require_folder(out)
    with Reporter() as reporter, open_replay(run_dir, reporter, advice="") as replay:
        step = find_last_step(run_dir) if step_text == END else int(step_text)
        replay.require_steps([step])
        fork, process = _plan_fork(replay, step, overrides)
        host = _read_host_state(replay, fork)
        state = replay.go_to(step)
        folder = create_run_dir(f"{fork.recipe.name}_fork") if out is None else make_run_dir(out)
        select = replay.opened.built.step_config.select_saved
        write_fork(folder, fork, asdict(process), state, host, select=select)
        reporter.print_stage("fork", f"{folder} begins with step {step:,} of {run_dir}")
    train = fork.recipe.train.model_copy(update={"resume": str(folder)})
    recipe = fork.recipe.model_copy(update={"train": train})
    summary = train_run((recipe, None), [f"+recipe={folder / RECIPE}"], started_at)
    facts = {**fork.to_dict(), "fork": str(folder), "status": summary.status}
    return CommandResult({**facts, "metrics": summary.metrics}, summary.exit_status)


def _require_folder(out: Path) -> None:
    """Raise UsageError if the new run can't be written to `out`, before a long replay."""
    try:
        if out.exists():
            require_unused(out)
        elif not next(path for path in out.absolute().parents if path.exists()).is_dir():
            raise UsageError([f"--out {out}"], "must be in a folder")
    except RunError as error:
        raise UsageError([f"--out {out}"], "must be a new or an empty folder") from error
    except OSError as error:
        raise UsageError([f"--out {out}"], f"can't be made: {error.strerror}") from error


def split_place(place: Path) -> tuple[Path, str]:
    """Return the run and the step, in digits or END, of RUN_DIR@N. Raises UsageError."""
    run_dir, _, step = str(place).rpartition("@")
    is_number = step.isascii() and step.isdecimal() and len(step) <= MAX_DIGITS
    if not run_dir or not (is_number or step == END):
        rule = f"must be RUN_DIR@N with a step of the run, 0 or more, or RUN_DIR@{END}"
        raise UsageError([str(place)], rule)
    return Path(run_dir), step


def _plan_fork(replay: Replay, step: int, overrides: Sequence[str]) -> tuple[Fork, Provenance]:
    """Check the recipe of a fork, and print what differs. Returns it with the provenance."""
    opened, run_dir, reporter = replay.opened, replay.run_dir, replay.reporter
    if opened.recipe.privacy is not None:
        raise RecipeError("privacy: must be null for fork: a guarantee counts the steps of one run")
    require_readable_version(run_dir)
    recipe = read_run_recipe(run_dir, [*overrides, "train.resume=null", "checkpoint.restore=null"])
    if recipe.privacy is not None:
        raise RecipeError("privacy: must be null for fork: a guarantee counts the steps of one run")
    if "train" not in recipe.stages or "checkpoint" not in recipe.stages:
        raise RecipeError("stages: must have train and checkpoint for fork")
    dataset = load_data(recipe, make_silent_reporter())
    built = build(recipe, dataset, make_silent_reporter())
    # The recipe as it was recorded, since the opened one may be placed on fewer devices.
    recorded = read_run_recipe(run_dir).model_dump(mode="json")
    tree = recipe.model_dump(mode="json")
    changes = tuple(
        change
        for change in find_changes(tree, recorded, free=())
        if change.path not in (("train", "resume"), ("checkpoint", "restore"))
    )
    decisive = find_changes(tree, recorded, FREE)
    names = join_first([change.key for change in decisive], MAX_NAMED) or "no key"
    _require_same_arrays(opened.built, built, f"{run_dir}: with other values of {names}")
    total = built.run_schedule.total
    if step >= total:
        rule = f"{total:,} steps in all, and the fork begins after step {step:,} of {run_dir}"
        raise RecipeError(f"train: {rule}; set a greater length, as in train.steps={2 * step or 1}")
    evaluates = any(
        is_evaluation_due(side, schedule.steps_per_epoch, step)
        for side, schedule in (
            (opened.recipe, opened.built.run_schedule),
            (recipe, built.run_schedule),
        )
    )
    fork = Fork(run_dir, step, recipe, changes, evaluates)
    process = _describe_origin(replay, recipe, dataset)
    table = _make_table(opened.built)
    earlier = list_earlier_changes(decisive, table, _make_table(built), step)
    text = join_first(list(map(str, changes)), MAX_NAMED, "; ") or "no key"
    reporter.print_stage("changed", text)
    if earlier:
        keys = join_first([change.key for change in earlier], MAX_NAMED)
        reporter.warn(
            f"{keys}: would have changed steps up to {step:,} too, which stay as the run made "
            "them; later steps have the new values"
        )
    return fork, process


def _require_same_arrays(left: Built, right: Built, subject: str) -> None:
    """Raise RecipeError if two states have arrays of other names, shapes or types."""
    try:
        arrange_arrays(Path("state"), flatten_by_path(left.state), right.state)
    except DataError as error:
        _, _, problems = str(error).partition("of another recipe: ")
        text = f"{subject} the state has other arrays: {problems}"
        raise RecipeError(f"{text}; steps of the run that could be kept: none") from error


def _make_table(built: Built) -> RateTable:
    return RateTable(built.learning_rates, built.run_schedule.total)


def _describe_origin(replay: Replay, recipe: Recipe, dataset: Dataset) -> Provenance:
    """Require settings, plug-ins and data of the run, and describe this process with the data of
    the fork. Raises DataError if they differ and `train.resume_changed` is refuse."""
    opened = replay.opened
    versions = list_versions(opened.backend.describe())

    def describe(recipe: Recipe, dataset: Dataset) -> Provenance:
        splits = {"train": dataset.train, "eval": dataset.whole_eval}
        process = describe_process(recipe.seed, versions, opened.backend.device, splits)
        rate_files = fingerprint_rate_files(recipe.train)
        data = {**process.data, "learning rates": rate_files} if rate_files else process.data
        return replace(process, data=data)

    origin = describe(opened.recipe, opened.dataset)
    on_changed = recipe.train.resume_changed
    require_same_origin(replay.run_dir, origin, on_changed, replay.reporter.warn)
    return describe(recipe, dataset)


def _read_host_state(replay: Replay, fork: Fork) -> Mapping[str, Any]:
    """Return the host's state at the step of a fork, as JSON.

    Raises DataError if it depends on callbacks and isn't saved.
    """
    early_stop = {"early_stop": stop_early(fork)}
    saved = read_host(replay.run_dir, fork.step)
    if saved is not None:
        # Marks of logs are of longer logs, if the run was evaluated at the step.
        return {**saved, **early_stop, LOGS: {}}
    if fork.step > 0 and replay.opened.recipe.train.callbacks:
        steps = list_saved_steps(replay.run_dir / FOLDER)
        names = join_first(list(map(str, steps)), MAX_NAMED) or "none"
        raise DataError(
            f"{show_name(str(replay.run_dir))}: step {fork.step:,}: what its callbacks had "
            f"remembered there is unknown; it is saved with checkpoints, of the steps {names}"
        )
    for step in list_saved_steps(replay.run_dir / FOLDER):
        sink = (read_host(replay.run_dir, step) or {}).get("sink")
        if sink is not None:
            return {**early_stop, "sink": sink}
    return early_stop
