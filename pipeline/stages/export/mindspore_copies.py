"""The checkpoints of a run that goes on, as MindSpore's `.ckpt` files beside them (K-01).

`ckpt.json` in the run directory lists the files by step, so that a resumed run goes on with its
own names, and nobody else's file is ever removed. In a folder that other runs may write to, a run
claims its prefix by a file before it writes any.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pipeline.checkpoint.checkpoint_folder import step_of
from pipeline.checkpoint.manifest import DamagedError
from pipeline.checkpoint.restore import read_checkpoint
from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.engine.schedule import RunSchedule
from pipeline.models.weights.files.weight_files import write_weights
from pipeline.stages.export.mindspore_checkpoints import file_name, free_prefix, weight_arrays
from pipeline.stages.record.run_directory import CHECKPOINT_FILES, CHECKPOINT_NAMES

STEP = re.compile(r"[0-9]{1,18}")


class MindSporeCopies:
    """The files of one run: `{prefix}-{epoch}_{step}.ckpt` in `directory`, by default in `ckpt`.

    Where the folder has files of that prefix from another run, `_1`, `_2` and so on is added to it.
    Raises RunError where the folder can't be made, or the list of the files be read.
    """

    def __init__(
        self, run_dir: Path, directory: Path | None, prefix: str, schedule: RunSchedule
    ) -> None:
        self._folder = (directory or run_dir / CHECKPOINT_FILES).absolute()
        self._shared = directory is not None
        self._list, self._schedule = run_dir / CHECKPOINT_NAMES, schedule
        self._names, known = self._listed(prefix)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._prefix = known or self._claimed(prefix)
            self._write_list()
        except OSError as error:
            problem = f"checkpoint.directory = {self._folder}: can't be written: {error.strerror}"
            raise RunError(problem) from error

    def add(self, checkpoint: Path) -> None:
        """Write the file of a complete checkpoint, and list it."""
        step = step_of(checkpoint)
        assert step is not None, "a checkpoint is named by its step"
        name = file_name(self._prefix, self._schedule, step)
        # Listed before it is written: a file that is killed in between is this run's to remove.
        self._names[step] = name
        self._write_list()
        saved = read_checkpoint(checkpoint)
        write_weights(self._folder / name, weight_arrays(saved, optimizer=False))

    def remove(self, step: int) -> None:
        """Remove the file of a step, where this run has written one."""
        name = self._names.pop(step, None)
        if name is not None:
            (self._folder / name).unlink(missing_ok=True)
            self._write_list()

    def agree(self, checkpoints: Mapping[int, Path]) -> None:
        """Write the files that checkpoints lack, and remove this run's others."""
        for step in [step for step in self._names if step not in checkpoints]:
            self.remove(step)
        for step, checkpoint in checkpoints.items():
            if not (self._folder / self._names.get(step, ".")).is_file():
                # A damaged checkpoint has none, and is named by whoever reads it.
                with suppress(DamagedError):
                    self.add(checkpoint)

    def _claimed(self, prefix: str) -> str:
        """Return a prefix that no other run has, and keep others from it."""
        number = 0
        while True:
            free = free_prefix(self._folder, prefix if number == 0 else f"{prefix}_{number}")
            if not self._shared:
                return free
            try:
                (self._folder / f".{free}.claim").touch(exist_ok=False)
            except FileExistsError:
                number += 1
            else:
                return free

    @property
    def _folder_listed(self) -> str | None:
        """The folder as the list names it; None for the run's own, which moves with it."""
        return str(self._folder) if self._shared else None

    def _write_list(self) -> None:
        by_step = {str(step): name for step, name in sorted(self._names.items())}
        files = {"folder": self._folder_listed, "prefix": self._prefix, "files": by_step}
        write_whole(self._list, json.dumps(files, indent=1) + "\n")

    def _listed(self, prefix: str) -> tuple[dict[int, str], str | None]:
        """Return the names of this run's files in the folder by step, and its prefix; nothing and
        None before there are any.

        The list may be a stranger's: only names that a run would give are believed.
        """
        try:
            kept = read_json(self._list)
        except FileNotFoundError:
            return {}, None
        except (OSError, ValueError) as error:
            raise RunError(f"{self._list}: can't be read: {error}") from error
        files = kept.get("files") if isinstance(kept, dict) else None
        if not isinstance(files, dict):
            raise RunError(f"{self._list}: must list files by step")
        known = kept.get("prefix")
        own = isinstance(known, str) and re.fullmatch(rf"{re.escape(prefix)}(_\d+)?", known)
        if not own or kept.get("folder") != self._folder_listed:
            return {}, None
        given = re.compile(rf"{re.escape(known)}-\d+_\d+\.ckpt")
        names = {
            int(step): name
            for step, name in files.items()
            if STEP.fullmatch(step) and isinstance(name, str) and given.fullmatch(name)
        }
        return names, known
