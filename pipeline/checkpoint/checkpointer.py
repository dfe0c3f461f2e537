"""Checkpoint: the state of a run on disk, whole or not at all.

A checkpoint is written in the background under the name of a draft, sealed with a manifest, synced
and renamed. After a kill or a power cut while saving, the previous checkpoint is still there. A
checkpoint holds every array of `TrainState` under its path, written by orbax, and, as JSON,
the recipe and the state of the host. The data position, the schedule and the random generator are
functions of the step. Only the metrics may be added later, if the evaluation of the step was
interrupted and the resumed run has repeated it.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from pipeline.checkpoint.checkpoint_folder import (
    FOLDER,
    HOST,
    JSON,
    METRICS,
    RECIPE,
    STATE,
    checkpoint_path,
    draft_path,
    remove_checkpoint,
    remove_draft,
    remove_drafts,
    saved_steps,
)
from pipeline.checkpoint.host_state import LOGS
from pipeline.checkpoint.manifest import DamagedError, require_complete, write_manifest
from pipeline.checkpoint.orbax_arrays import silence_orbax, write_arrays
from pipeline.checkpoint.restore import fill, read_checkpoint
from pipeline.checkpoint.retention import Retention, add_metrics
from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import commit, sync
from pipeline.core.host.tree_paths import leaves_by_path
from pipeline.training.state import TrainState

LOG = logging.getLogger(__name__)


class Copies(Protocol):
    """Copies of checkpoints in the formats of other programs."""

    def add(self, checkpoint: Path) -> None:
        """Write the copy of a complete checkpoint. Raises OSError, DataError."""

    def remove(self, step: int) -> None:
        """Remove the copy of a step, if there is one. Raises OSError."""

    def agree(self, checkpoints: Mapping[int, Path]) -> None:
        """Write missing copies, and remove copies without a checkpoint. Raises OSError,
        DataError."""


class Checkpoints:
    """The checkpoints of one run; `retention` selects those that are kept.

    `recipe` is the run's, as JSON, and `recipe_digest` a digest of the keys that decide its
    numbers. `copies` is notified of each complete checkpoint and of each removed step.
    Raises RunError if the folder can't be made.
    """

    def __init__(
        self,
        run_dir: Path,
        retention: Retention,
        recipe: Mapping[str, Any] | None = None,
        recipe_digest: str = "",
        copies: Copies | None = None,
    ) -> None:
        silence_orbax()
        self._root = (run_dir / FOLDER).absolute()
        self._recipe = dict(recipe or {})
        self._recipe_digest = recipe_digest
        self._retention = retention
        self._copies = copies
        self._requested: int | None = None
        self._written: Future[None] | None = None
        with self._writing("make it"):
            self._root.mkdir(exist_ok=True)  # not the run directory, which may be gone
            # The run's directory has the names of the logs, which exist by now.
            sync(self._root.parent)
            remove_drafts(self._root)
            if copies is not None:
                # A kill may have come between a checkpoint and its copy.
                copies.agree(
                    {step: checkpoint_path(self._root, step) for step in saved_steps(self._root)}
                )
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._prepared = False

    def prepare(self) -> None:
        """Import orbax in the background for the first save. Later calls do nothing."""
        if not self._prepared:
            self._prepared = True
            # No run needs orbax before its first checkpoint, and its import takes long.
            self._writer.submit(importlib.import_module, "orbax.checkpoint")

    def save(
        self,
        step: int,
        state: TrainState,
        host_state: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
    ) -> None:
        """Save the state of a step in the background, after waiting for the save before.

        `host_state` is JSON. If the step is saved already, only the metrics are added. Raises
        RunError if the save before failed; `finish` raises it for this one.
        """
        with self._writing(f"save step {step}"):
            is_saved = step == self._requested or step in saved_steps(self._root)
        best_metrics = metrics if self._retention.best is not None else None
        self.finish()
        self._requested = step
        if is_saved:
            if best_metrics:
                with self._writing(f"save the metrics of step {step}"):
                    add_metrics(checkpoint_path(self._root, step), best_metrics)
                    self._remove_old()
            return
        # Copied: the device reuses these buffers while they are still being written.
        arrays = {path: np.array(leaf) for path, leaf in leaves_by_path(state).items()}
        texts = {
            f"{HOST}/{JSON}": json.dumps(host_state),
            f"{RECIPE}/{JSON}": json.dumps(self._recipe),
        }
        if best_metrics:
            texts[f"{METRICS}/{METRICS}"] = json.dumps(dict(best_metrics))
        logs = [self._root.parent / name for name in host_state.get(LOGS, {})]
        self._written = self._writer.submit(self._write, step, arrays, texts, logs)

    def _write(
        self,
        step: int,
        arrays: Mapping[str, np.ndarray],
        texts: Mapping[str, str],
        logs: Sequence[Path],
    ) -> None:
        """Write a checkpoint, then remove checkpoints that need not be retained.

        A checkpoint has only the last lines of the `logs`, so they are synced before the rename.
        """
        folder = checkpoint_path(self._root, step)
        draft = draft_path(folder)
        try:
            if not self._root.is_dir():
                self._root.mkdir()
            draft.mkdir()
            write_arrays(draft / STATE, arrays)
            for name, text in texts.items():
                (draft / name).parent.mkdir()
                (draft / name).write_text(text, encoding="utf-8")
            write_manifest(draft, self._recipe_digest)
            require_complete(draft)
            for log in logs:
                sync(log)
            commit(draft, folder)
            LOG.info("checkpoint of step %d is on disk", step)
        except BaseException:
            # If the disk is full, the run's summary needs the draft's room.
            remove_draft(draft)
            raise
        if self._copies is not None:
            self._copies.add(folder)
        self._remove_old()

    def _remove_old(self) -> None:
        for step in self._retention.removable(self._root, saved_steps(self._root)):
            with self._writing(f"remove step {step}"):
                if self._copies is not None:
                    self._copies.remove(step)
                remove_checkpoint(checkpoint_path(self._root, step))

    def finish(self) -> None:
        """Wait until the last save is on disk. Raises RunError if it failed."""
        if self._written is not None:
            with self._writing(f"save step {self._requested}"):
                self._written.result()

    def steps(self) -> Sequence[int]:
        """Wait for the last save; return the steps of the complete checkpoints, ascending."""
        self.finish()
        return saved_steps(self._root)

    def read(self, step: int, like: TrainState) -> TrainState:
        """Read the state of one of `steps`. Raises DataError if the checkpoint is damaged."""
        saved = read_checkpoint(checkpoint_path(self._root, step))
        return fill(saved.where, saved.arrays, like)

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Raise RunError, "can't `what`", for errors of the disk in the block."""
        try:
            yield
        except (OSError, ValueError, DamagedError) as error:
            # tensorstore raises ValueError for a full disk.
            raise RunError(f"{self._root}: can't {what}: {_reason(error)}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait until the last save is on disk, also if an error ends the run.

        Raises RunError if the save failed, so that no run reports success without its checkpoint.
        """
        try:
            self.finish()
            if error is None and self._requested is not None:
                require_complete(checkpoint_path(self._root, self._requested))
        except DamagedError as damage:
            step = self._requested
            raise RunError(f"{damage}; step {step} was saved and is not there") from damage
        finally:
            self._writer.shutdown()


class NoCheckpoints:
    """Checkpoints of a process that writes none, since the first process of the run does."""

    def prepare(self) -> None:
        """Do nothing."""

    def save(
        self,
        step: int,
        state: TrainState,
        host_state: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
    ) -> None:
        """Save nothing."""


def _reason(error: Exception) -> str:
    """Return an error's text without the specification of 1,500 letters that tensorstore adds."""
    first = str(error).partition("\n")[0]
    return re.split(r" \[(?:tensorstore_spec|os_error_code)=", first)[0]
