"""Checkpoint: the state of a run on disk, whole or not at all.

orbax writes a step's folder in the background under another name and renames it when it is
complete, so a run that is killed while saving keeps the checkpoint before. Before the renaming the
folder is sealed with a manifest. A checkpoint holds every array of `TrainState` under its path and,
as JSON, the recipe and what the host knows: the state of the monitors that decide something. The
data position, the schedule and the random generator are functions of the step. The metrics alone
may come later, where the evaluation of the step was given up and the resumed run has done it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import orbax.checkpoint as ocp

from pipeline.config.recipe import CheckpointSpec
from pipeline.errors import RunError
from pipeline.stages.manifest import write_manifest
from pipeline.stages.orbax_arrays import silence_orbax
from pipeline.stages.retention import not_kept, retention, write_metrics
from pipeline.stages.saved import FOLDER, by_path, fill, read_checkpoint, saved_steps
from pipeline.training.state import TrainState

NEVER_S = 100 * 365 * 86_400
"""A save is not given up: orbax goes by the time of day, which may be set forward meanwhile."""


class Checkpoints:
    """The checkpoints of one run: the newest `keep`, and the best when the recipe says by what.

    `recipe` is the run's, as JSON. Of the steps that are multiples of those `held`, the newest
    `keep` are kept whatever else is saved between them. Raises RunError where the folder can't be
    made.
    """

    def __init__(
        self,
        run_dir: Path,
        spec: CheckpointSpec,
        recipe: Mapping[str, Any] | None = None,
        held: Sequence[int] = (),
    ) -> None:
        silence_orbax()
        self._root = (run_dir / FOLDER).absolute()
        self._recipe = recipe or {}
        self._step: int | None = None
        self._tracks_best = spec.best is not None
        self._retention = retention(spec, self._root, held)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._retention,
            # The policy decides; this only has the metrics written, for a resumed run to compare.
            best_fn=(lambda metrics: metrics[spec.best]) if spec.best else None,
            cleanup_tmp_directories=True,
            # What is damaged in an old checkpoint is nobody's concern until it is restored.
            lightweight_initialize=True,
            async_options=ocp.AsyncOptions(
                timeout_secs=NEVER_S, post_finalization_callback=self._seal
            ),
        )
        with self._writing("make it"):
            self._root.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self._root, options=options)

    @property
    def latest(self) -> int | None:
        """The newest checkpoint's step, one that is still being written among them."""
        return self._manager.latest_step()

    def save(
        self,
        step: int,
        state: TrainState,
        host: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
    ) -> None:
        """Save once per step; written in the background. Raises RunError when the disk refuses.

        A step that is saved already, its evaluation having been given up, is given its metrics.
        """
        if self.latest == step:
            if metrics and self._tracks_best:
                self._add_metrics(step, metrics)
            return
        self.finish()
        # Copied: the device is given these buffers again while they are still being written.
        arrays = {path: np.array(leaf) for path, leaf in by_path(state).items()}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(arrays),
            host=ocp.args.JsonSave(dict(host)),
            recipe=ocp.args.JsonSave(dict(self._recipe)),
        )
        self._step = step
        with self._writing(f"save step {step}"):
            self._manager.save(step, args=args, metrics=dict(metrics) if metrics else None)

    def _add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Complete a checkpoint, and let go of those that would have gone when it was saved."""
        self.finish()
        with self._writing(f"save the metrics of step {step}"):
            write_metrics(self._root / str(step), metrics)
            for older in not_kept(self._retention, saved_steps(self._root)):
                self._manager.delete(older)

    def finish(self) -> None:
        """Wait until what was saved is on disk. Raises RunError when the disk refuses it."""
        with self._writing(f"save step {self._step}"):
            self._manager.wait_until_finished()

    def steps(self) -> Sequence[int]:
        """The steps of those that can be gone back to, ascending."""
        self.finish()
        return saved_steps(self._root)

    def read(self, step: int, like: TrainState) -> TrainState:
        """The state of one of `steps`. Raises DataError when it is not what was saved."""
        saved = read_checkpoint(self._root / str(step))
        return fill(saved.where, saved.arrays, like)

    def _seal(self) -> None:
        """On the thread that writes, when all files are there and before they get their name."""
        draft = self._root / f"{self._step}{ocp.utils.TMP_DIR_SUFFIX}"
        write_manifest(draft, self._recipe)

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # tensorstore makes a ValueError of a full disk
            reason = str(error).partition("\n")[0]
            raise RunError(f"{self._root}: can't {what}: {reason}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until all is on disk, whatever ends the run. Raises RunError when it can't be."""
        try:
            self.finish()
        finally:
            self._manager.close()
