"""Checkpoints: the state of a run, written to disk whole or not at all, and which of them are kept.

A checkpoint is written in the background as a draft, sealed with a manifest, synced and renamed.
After a kill or a power cut while saving, the previous checkpoint still exists. A checkpoint holds
every array of `TrainState` by path, in orbax's format, and the recipe and the state of the host as
JSON. The data position, the learning rates and the random numbers are computed from the step. Only
the metrics may be added later, if a resumed run repeats an interrupted evaluation.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from pipeline.checkpoint.array_database import write_arrays
from pipeline.checkpoint.checkpoint_folder import (
    FOLDER,
    HOST,
    MANIFEST,
    META,
    METRICS,
    RECIPE,
    SECRET,
    STATE,
    list_saved_steps,
    make_checkpoint_path,
    make_draft_path,
    remove_checkpoint,
    remove_draft,
    remove_drafts,
)
from pipeline.checkpoint.host_state import LOGS
from pipeline.checkpoint.manifest import (
    MOST_JSON_BYTES,
    SAVED_AT,
    DamagedError,
    read_json,
    require_complete,
    write_manifest,
)
from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import commit, sync
from pipeline.core.files.value_text import format_bytes
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.training.component_specs import list_metric_directions
from pipeline.training.state import TrainState

LOG = logging.getLogger(__name__)


class Copies(Protocol):
    """Copies of checkpoints at other places or in the formats of other programs."""

    def add(self, checkpoint: Path) -> None:
        """Write the copy of a complete checkpoint. Raises OSError, DataError."""

    def remove(self, step: int) -> None:
        """Remove the copy of a step, if there is one. Raises OSError."""

    def synchronize(self, checkpoints: Mapping[int, Path]) -> None:
        """Write missing copies of the checkpoints, which are by step, and remove other copies.
        Raises OSError, DataError."""


class Checkpoints:
    """The checkpoints of one run; `retention` selects which to keep.

    `recipe` is the run's recipe as JSON, and `recipe_digest` a digest of the keys that change the
    run's results. Every complete checkpoint and every removed step is passed to each of `copies`.
    `select` returns the part of a state to save. Raises RunError if the folder can't be made.
    """

    def __init__(
        self,
        run_dir: Path,
        retention: Retention,
        recipe: Mapping[str, Any] | None = None,
        recipe_digest: str = "",
        copies: Sequence[Copies] = (),
        select: Callable[[TrainState], TrainState] = lambda state: state,
    ) -> None:
        self._select = select
        self._root = (run_dir / FOLDER).absolute()
        self._recipe = dict(recipe or {})
        self._recipe_digest = recipe_digest
        self._retention = retention
        self._copies = copies
        self._last_step: int | None = None
        self._state_bytes = 0
        """Bytes of the last state that was to be saved."""
        self._last_save: Future[None] | None = None
        with self._convert_errors("make it"):
            self._root.mkdir(exist_ok=True)  # without parents: the run directory must exist
            # This also syncs the names of the logs, which exist by now.
            sync(self._root.parent)
            remove_drafts(self._root)
            # An earlier process may have been killed after it wrote a checkpoint, before the copy.
            paths = {
                step: make_checkpoint_path(self._root, step)
                for step in list_saved_steps(self._root)
            }
            for copy in copies:
                copy.synchronize(paths)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def require_space(self, state_bytes: int) -> None:
        """Raise RunError if a run without checkpoints can't save a state of this size, before it
        trains in vain."""
        free_bytes = shutil.disk_usage(self._root).free
        if free_bytes < state_bytes and not list_saved_steps(self._root):
            raise RunError(
                f"{self._root}: a checkpoint takes {format_bytes(state_bytes)}, "
                f"{format_bytes(free_bytes)} are free; make room, or leave out the stage checkpoint"
            )

    def save(
        self,
        step: int,
        state: TrainState,
        host_state: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
    ) -> None:
        """Wait for the previous save, then save the state of a step in the background.

        `host_state` is JSON. If the step is saved already, only the metrics are added. Raises
        RunError if the previous save failed; `finish` raises RunError if this save fails.
        """
        with self._convert_errors(f"save step {step}"):
            is_saved = step == self._last_step or step in list_saved_steps(self._root)
        metrics_to_save = metrics if self._retention.best is not None else None
        self.finish()
        self._last_step = step
        if is_saved:
            if metrics_to_save:
                with self._convert_errors(f"save the metrics of step {step}"):
                    add_metrics(make_checkpoint_path(self._root, step), metrics_to_save)
                    self._remove_old()
            return
        # Copied, since the device reuses the buffers while they are being written.
        arrays = {
            path: np.array(leaf) for path, leaf in flatten_by_path(self._select(state)).items()
        }
        self._state_bytes = sum(array.nbytes for array in arrays.values())
        texts = {
            f"{HOST}/{META}": json.dumps(host_state),
            f"{RECIPE}/{META}": json.dumps(self._recipe),
        }
        if metrics_to_save:
            texts[f"{METRICS}/{METRICS}"] = json.dumps(dict(metrics_to_save))
        with self._convert_errors(f"save step {step}"):
            _require_readable(texts)
        logs = [self._root.parent / name for name in host_state.get(LOGS, {})]
        self._last_save = self._writer.submit(self._write, step, arrays, texts, logs)

    def _write(
        self,
        step: int,
        arrays: Mapping[str, np.ndarray],
        texts: Mapping[str, str],
        logs: Sequence[Path],
    ) -> None:
        """Write a checkpoint, then remove checkpoints that retention doesn't keep.

        A resumed run needs the files `logs` as they are now, so they are synced before the draft
        becomes a checkpoint.
        """
        folder = make_checkpoint_path(self._root, step)
        draft = make_draft_path(folder)
        try:
            if not self._root.is_dir():
                # It may have been removed while the run trains.
                self._root.mkdir()
            is_secret = any(path.startswith(SECRET) for path in arrays)
            draft.mkdir(mode=0o700 if is_secret else 0o777)
            write_arrays(draft / STATE, arrays)
            for name, text in texts.items():
                (draft / name).parent.mkdir()
                (draft / name).write_text(text, encoding="utf-8")
            write_manifest(draft, self._recipe_digest)
            if is_secret:
                for path in (draft, *draft.rglob("*")):
                    path.chmod(0o700 if path.is_dir() else 0o600)
            require_complete(draft)
            for log in logs:
                sync(log)
            commit(draft, folder)
            LOG.info("checkpoint of step %d is on disk", step)
        except BaseException:
            # If the disk is full, this frees space for the run's summary.
            remove_draft(draft)
            raise
        for copy in self._copies:
            copy.add(folder)
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove the checkpoints that retention doesn't keep, and their copies."""
        for step in self._retention.list_removable(self._root, list_saved_steps(self._root)):
            with self._convert_errors(f"remove step {step}"):
                for copy in self._copies:
                    copy.remove(step)
                remove_checkpoint(make_checkpoint_path(self._root, step))

    def finish(self) -> None:
        """Wait until the last save is on disk.

        Raises RunError if it failed, and DataError if one of `copies` raised it.
        """
        if self._last_save is not None:
            with self._convert_errors(f"save step {self._last_step}"):
                self._last_save.result()

    def list_steps(self) -> Sequence[int]:
        """Wait for the last save; return the steps of the checkpoints, ascending."""
        self.finish()
        return list_saved_steps(self._root)

    @contextmanager
    def _convert_errors(self, action: str) -> Iterator[None]:
        """Turn errors of the disk into a RunError with the text "can't `action`"."""
        try:
            yield
        except (OSError, ValueError, DamagedError) as error:
            problem = describe_disk_error(error, self._root, self._state_bytes)
            raise RunError(f"{self._root}: can't {action}: {problem}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait until the last save is on disk, also if an error ends the run. Raises RunError if
        the save failed or its checkpoint has been damaged since."""
        try:
            self.finish()
            if error is None and self._last_step is not None:
                require_complete(make_checkpoint_path(self._root, self._last_step))
        except DamagedError as damage:
            step = self._last_step
            raise RunError(f"{damage}; step {step} was complete when it was saved") from damage
        finally:
            self._writer.shutdown()


def describe_disk_error(error: Exception, folder: Path, nbytes: int) -> str:
    """Return an error of writing `nbytes` into a folder as text; of a full disk, with the free
    bytes and what helps."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
        if error.filename is not None and Path(os.fsdecode(error.filename)) != folder:
            text += f": {os.fsdecode(error.filename)}"
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return text
    needed = f"a checkpoint takes {format_bytes(nbytes)}, " if nbytes else ""
    free_bytes = 0
    with suppress(OSError):
        free_bytes = shutil.disk_usage(folder).free
    free = f"{needed}{format_bytes(free_bytes)} are free"
    advice = "make room, or keep fewer checkpoints, as in checkpoint.keep=1"
    return f"{error.strerror}: {free}; {advice}"


def _require_readable(texts: Mapping[str, str]) -> None:
    """Raise ValueError for a JSON file that a resumed run wouldn't read: callbacks' states may have
    any size."""
    for name, text in texts.items():
        if len(text) > MOST_JSON_BYTES:
            size = f"{len(text):,} bytes, more than {MOST_JSON_BYTES:,}"
            raise ValueError(f"{name} would have {size}; do callbacks return large states?")


class NoCheckpoints:
    """Replaces `Checkpoints` in a process that saves nothing: only the first of a run does."""

    def save(
        self,
        step: int,
        state: TrainState,
        host_state: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
    ) -> None:
        """Save nothing."""

    def finish(self) -> None:
        """Wait for nothing."""

    def list_steps(self) -> Sequence[int]:
        """Return nothing: the first process lists the checkpoints."""
        return ()


@dataclass(frozen=True)
class Retention:
    """Rules for a run's checkpoints. A checkpoint is kept if any rule keeps it."""

    keep: int
    """Number of newest checkpoints to keep."""
    best: str | None = None
    """Metric whose best checkpoint is kept; None: no rule."""
    holds: Callable[[int], bool] = lambda _: False
    """Returns whether a rollback may go back to a step. The newest `keep` of these steps are kept
    too, so that extra checkpoints, such as those that signals cause, don't replace them."""
    minutes: int | None = None
    """Least time between two checkpoints that this rule keeps, of which the first checkpoint is
    one (MindSpore's keep_checkpoint_per_n_minutes); None: no rule."""

    def list_removable(self, root: Path, steps: Sequence[int]) -> list[int]:
        """Return the steps whose checkpoints may be removed. `steps` are all steps, ascending."""
        rollback_steps = [step for step in steps if self.holds(step)]
        retained: set[int | None] = {*steps[-self.keep :], *rollback_steps[-self.keep :]}
        if self.best is not None:
            retained.add(_find_best_step(root, steps, self.best))
        if self.minutes is not None:
            retained.update(_select_spaced(root, steps, 60.0 * self.minutes))
        return [step for step in steps if step not in retained]


def add_metrics(folder: Path, metrics: Mapping[str, float]) -> None:
    """Add metrics to a complete checkpoint that was saved without metrics. Raises OSError."""
    draft = make_draft_path(folder)
    draft.write_text(json.dumps(dict(metrics)), encoding="utf-8")
    # If the process is killed after this, an empty folder remains, which is harmless.
    (folder / METRICS).mkdir(exist_ok=True)
    commit(draft, folder / METRICS / METRICS)
    sync(folder)


def _select_spaced(root: Path, steps: Sequence[int], spacing_s: float) -> Iterator[int]:
    """Yield the first step, and each step saved at least `spacing_s` after the last yielded one.

    If the clock was set back by more than that, the time since the last one is unknown.
    """
    last_saved_at = -math.inf
    for step in steps:
        saved_at = _read_value(make_checkpoint_path(root, step) / MANIFEST, SAVED_AT)
        if isinstance(saved_at, float) and abs(saved_at - last_saved_at) >= spacing_s:
            last_saved_at = saved_at
            yield step


def _find_best_step(root: Path, steps: Sequence[int], metric: str) -> int | None:
    """Return the step with the best value, the newest of equals; None if no step has a value."""
    sign = 1 if list_metric_directions([metric])[metric] == "max" else -1
    scores = {}
    for step in steps:
        value = _read_number(make_checkpoint_path(root, step) / METRICS / METRICS, metric)
        if value is not None:
            scores[step] = sign * value
    return max(scores, key=lambda step: (scores[step], step), default=None)


def _read_number(file: Path, key: str) -> float | None:
    """Read a number, finite or infinite, of a JSON file; None if it is missing or not a number."""
    try:
        value = float(_read_value(file, key))
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(value) else value


def _read_value(file: Path, key: str) -> Any:
    """Read a value of a JSON file; None if it is missing."""
    try:
        return read_json(file)[key]
    except (DamagedError, LookupError, TypeError):
        return None
