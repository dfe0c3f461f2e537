"""The mirror of a run: copies of its checkpoints at an address, from which it can be restored."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from pipeline.checkpoint.checkpoint_folder import FOLDER, MIRROR_DRAFT, list_saved_steps
from pipeline.checkpoint.checkpointer import Copies
from pipeline.checkpoint.mirror import MirroredRun, Warn, read_mirror
from pipeline.checkpoint.mirror_writer import Mirror, MirrorWriter
from pipeline.config.defaults import normalise_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError, get_exit_status
from pipeline.core.files.atomic_write import format_json
from pipeline.core.files.safe_yaml import MAX_BYTES, parse_written_yaml
from pipeline.core.files.storage import open_storage
from pipeline.core.reporter import Reporter
from pipeline.data.text.file_names import TOKENIZER
from pipeline.engine.monitors.log_lines import EVALS, METRICS, SCALARS
from pipeline.stages.record.provenance import PROVENANCE, read_provenance
from pipeline.stages.record.run_directory import LOG, LOWERINGS, PLAN, RECIPE
from pipeline.stages.runner.context import RunContext
from pipeline.stages.runner.evaluations import Evaluations
from pipeline.stages.runner.open_run import convert_os_errors
from pipeline.stages.runner.resumed_run import list_changes_with_length
from pipeline.stages.runner.run_feature import RestoreRun, RunFeature

LOGS = (METRICS, EVALS, SCALARS)
FILES = (*LOGS, LOG, TOKENIZER, PROVENANCE, LOWERINGS, PLAN, RECIPE)
"""Files of a run that are copied with each checkpoint."""
KEY = "checkpoint.mirror"
RESTORE_S = 6 * 3600.0
"""Most seconds that other processes wait while the first restores a run."""
UNKNOWN = "0" * 16
"""Identity of a run without provenance, which may be any run."""


def find_mirrored_run(recipe: Recipe, run_dir: Path | None, warn: Warn) -> MirroredRun | None:
    """Return the run of `checkpoint.mirror` if `train.resume=auto` has to restore it, else None.

    `run_dir` is the local run to resume; None without one. If it is the mirror's run, and its last
    checkpoint isn't older than the mirror's, nothing is restored. If it is another run, the mirror
    is restored, with a warning if the local run is newer. Raises RecipeError if the mirror is of
    another run, if it is newer than a run that `train.resume` names, or if a newer local run has
    no provenance that tells whether it is the mirror's; DataError or RunError if either can't be
    read.
    """
    url = recipe.checkpoint.mirror
    if url is None or "checkpoint" not in recipe.stages:
        return None
    runs = read_mirror(open_storage(url), FILES, warn)
    if not runs:
        return None
    identity = None if run_dir is None else identify_run(run_dir)
    same_run = next((run for run in runs if run.identity == identity), None)
    if recipe.train.resume != "auto":
        advice = "name another address, or continue that run: train.resume=auto"
        if run_dir is None or same_run is None:
            raise RecipeError(f"{KEY} = {url}: holds another run; {advice}")
        if _find_newest(run_dir) < same_run.newest:
            # The run would remove these checkpoints.
            problem = f"holds step {same_run.newest} of {run_dir}, which has no checkpoint as new"
            raise RecipeError(f"{KEY} = {url}: {problem}; {advice}")
        return None
    if same_run is not None and not same_run.copies:
        # Damaged at the address, and sound here.
        return None
    candidates = [run for run in runs if run.copies] or runs
    # Two runs that began at once may have copied to one address.
    changes = []
    for mirrored in candidates if same_run is None else [same_run]:
        changes.append(_list_changes(recipe, mirrored))
        if not changes[-1]:
            if run_dir is None:
                return mirrored
            if same_run is None:
                _compare_other_run(mirrored, run_dir, identity == UNKNOWN, warn)
                return mirrored
            return mirrored if _find_newest(run_dir) < mirrored.newest else None
    problem = "holds a run of another recipe"
    if len(changes) > 1:
        problem = f"holds {len(changes)} runs of other recipes; changes of {candidates[0].identity}"
    raise RecipeError([f"{KEY} = {url}: {problem}", *changes[0]])


def _compare_other_run(mirrored: MirroredRun, run_dir: Path, may_be_same: bool, warn: Warn) -> None:
    """Warn if a local run is newer than the mirrored one, which is restored instead. Raises
    RecipeError if they may be the same run."""
    local, url = _find_newest(run_dir), mirrored.storage.url
    if local <= mirrored.newest:
        return
    if may_be_same:
        problem = f"holds step {mirrored.newest} of a run that may be {run_dir}, which has step "
        problem += f"{local} and no {PROVENANCE}"
        advice = f"name another address, or move {run_dir} away to restore step {mirrored.newest}"
        raise RecipeError(f"{KEY} = {url}: {problem}; {advice}")
    text = f"step {mirrored.newest} of {url} is restored; {run_dir}, another run, has step {local}"
    warn(f"{KEY}: {text}")


def _list_changes(recipe: Recipe, mirrored: MirroredRun) -> list[str]:
    """Return the keys in which a recipe differs from a mirrored run's. Raises DataError."""
    url = mirrored.storage.url
    text = mirrored.read_small(RECIPE, MAX_BYTES).decode(errors="replace")
    try:
        recorded = parse_written_yaml(text)
    except ValueError as error:
        raise DataError(f"{url}: {RECIPE} can't be read: {error}") from error
    if not isinstance(recorded, dict):
        raise DataError(f"{url}: {RECIPE} must hold keys and values")
    return list_changes_with_length(recipe, normalise_recipe(recorded), url)


def _find_newest(run_dir: Path) -> int:
    """Return the step of the newest checkpoint of a run; 0 without any."""
    return max(list_saved_steps(run_dir / FOLDER), default=0)


def identify_run(run_dir: Path) -> str:
    """Return 16 hexadecimal digits of the first process in a run's provenance; `UNKNOWN` without.
    Raises DataError if it is damaged."""
    for process in read_provenance(run_dir):
        return hashlib.sha256(format_json(process).encode()).hexdigest()[:16]
    return UNKNOWN


def restore_from_mirror(mirrored: MirroredRun, run_dir: Path) -> None:
    """Restore a run from its mirror into a new directory. Remove the directory if that fails."""
    reporter = Reporter()
    url = mirrored.storage.url
    try:
        with convert_os_errors(run_dir), reporter.clock(f"restoring step {mirrored.newest}"):
            mirrored.restore(run_dir, reporter.warn)
    except BaseException:
        shutil.rmtree(run_dir / MIRROR_DRAFT, ignore_errors=True)
        with suppress(OSError):
            run_dir.rmdir()
        raise
    reporter.print_stage(
        "mirror", f"step {mirrored.newest} and before, from {url}; now in {run_dir}"
    )


@contextmanager
def open_mirror(context: RunContext) -> Iterator[Mirror]:
    """Open the mirror of a run, and wait for its copies at the end.

    If a copy has failed, the status of a run becomes `failed`, with the reason in the summary. A
    stopped run only gets a warning. Raises RecipeError if the mirror is of another run, DataError
    or RunError if it can't be written.
    """
    url = context.recipe.checkpoint.mirror
    assert url is not None, "the run has a mirror"
    run = identify_run(context.run_dir)
    writer = MirrorWriter(open_storage(url), run, context.run_dir, FILES)
    with Mirror(writer, context.reporter.warn) as mirror:
        yield mirror
    if mirror.failure is None:
        return
    summary = context.summary
    reason = f"{KEY}: lacks the last checkpoints: {mirror.failure}"
    if summary.status == "stopped":
        context.reporter.warn(f"{reason}; {context.run_dir} has them")
        return
    summary.status = "failed"
    summary.reason = f"{reason}; {context.run_dir} has them, and train.resume=auto copies them"
    summary.exit_status = get_exit_status(summary.status)


class RunMirror(RunFeature):
    """The mirror of a run with `checkpoint.mirror`."""

    restore_s = RESTORE_S

    def restore_run(self, recipe: Recipe, run_dir: Path | None) -> RestoreRun | None:
        """Find the run of the mirror, if it is the one to resume."""
        mirrored = find_mirrored_run(recipe, run_dir, Reporter().warn)
        return None if mirrored is None else partial(restore_from_mirror, mirrored)

    @contextmanager
    def copy_checkpoints(self, evaluations: Evaluations) -> Iterator[Sequence[Copies]]:
        """Copy every checkpoint to the address."""
        with open_mirror(evaluations.run.context) as mirror:
            yield (mirror,)
