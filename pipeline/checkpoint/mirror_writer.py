"""Writing of a mirror: copies of a run's checkpoints, and the thread that makes them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Self

from pipeline.checkpoint.checkpoint_folder import (
    FOLDER,
    MANIFEST,
    MIRROR_DRAFT,
    list_saved_steps,
    make_checkpoint_path,
)
from pipeline.checkpoint.manifest import LATE_METRICS, DamagedError, describe_file, describe_files
from pipeline.checkpoint.mirror import (
    OPENED,
    RECORDS,
    Record,
    Warn,
    Writer,
    list_writers,
    read_mirror,
)
from pipeline.core.errors import PipelineError, RecipeError, RunError
from pipeline.core.files.storage import Storage, retry


@dataclass
class Attempt:
    """An attempt to copy a checkpoint: what it has written, or what may still arrive."""

    step: int
    folder: str
    files: Record
    records: list[str] = field(default_factory=list)


class MirrorWriter:
    """Copies the checkpoints of a run to an address, into a folder of this process alone.

    `run` identifies the run. `files` are names of files of the run that are copied with each
    checkpoint if they exist. Every attempt has names of its own, so a late request of a former one
    changes nothing. The newest complete copy is never removed before a newer one is complete.
    """

    def __init__(self, storage: Storage, run: str, run_dir: Path, files: Sequence[str]) -> None:
        self._storage = storage
        self._run = run
        self._run_dir = run_dir
        self._files = files
        self._draft = run_dir / MIRROR_DRAFT
        self._numbers = count(1)
        self._attempts: list[Attempt] = []
        self._copied: dict[int, Attempt] = {}
        """The last complete attempt of each step."""
        self.writer = Writer(0, secrets.token_hex(8), run)
        """This process; its generation is known when the mirror is open."""
        self._predecessors: set[Writer] = set()
        """Processes of this run whose folders were there before."""

    def open(self) -> None:
        """Make the folder of this process, after which earlier ones copy no more.

        Raises RecipeError if the mirror is of another run, RunError if another process has copied a
        newer step of this run than the run directory has.
        """
        self._require_mirror_of_run()
        writers = list_writers(self._storage)
        generation = 1 + max((writer.generation for writer in writers), default=0)
        self.writer = Writer(generation, self.writer.name, self._run)
        self._predecessors = {writer for writer in writers if writer.run == self._run}
        opened = json.dumps({"run": self._run, "generation": generation}).encode()
        retry(lambda: self._storage.write(f"{self.writer.folder}/{OPENED}", opened))
        try:
            # Another process may have copied until it could see the folder.
            self._require_mirror_of_run()
        except PipelineError:
            retry(lambda: self._storage.remove(self.writer.folder))
            raise

    def _require_mirror_of_run(self) -> None:
        runs = {run.identity: run for run in read_mirror(self._storage, self._files)}
        url = self._storage.url
        if runs and self._run not in runs:
            problem = "holds another run; name another address"
            raise RecipeError(f"checkpoint.mirror = {url}: {problem}")
        newest = max(list_saved_steps(self._run_dir / FOLDER), default=0)
        if runs and runs[self._run].newest > newest:
            raise RunError(
                f"{url}: holds step {runs[self._run].newest} of {self._run_dir}, which has step "
                f"{newest}: another process continues this run; train.resume=auto continues it here"
            )

    def synchronize(self) -> None:
        """Copy all checkpoints that the address lacks, the newest first, and remove those that the
        run directory lacks, and copies of earlier processes. Raises RunError, DataError, OSError.
        """
        while (step := self._find_uncopied_step()) is not None:
            try:
                self._copy(step)
            except (FileNotFoundError, DamagedError):
                # A checkpoint that was removed meanwhile needs no copy.
                if step in list_saved_steps(self._run_dir / FOLDER):
                    raise
        if self._copied:
            self._remove_outdated()

    def _list_local(self) -> dict[int, Record]:
        """Return a short record of each local checkpoint, by step.

        It has only the manifest and the late metrics, since one of them changes if any file does.
        """
        root = self._run_dir / FOLDER
        local: dict[int, Record] = {}
        for step in list_saved_steps(root):
            folder = make_checkpoint_path(root, step)
            record = {}
            for name in (MANIFEST, LATE_METRICS):
                with suppress(FileNotFoundError):
                    record[f"{FOLDER}/{step}/{name}"] = describe_file(folder / name)
            if record:
                local[step] = record
        return local

    def _find_uncopied_step(self) -> int | None:
        """Return the newest step that the address lacks, or whose files differ there, else None."""
        for step, record in sorted(self._list_local().items(), reverse=True):
            copied = self._copied[step].files if step in self._copied else {}
            if any(copied.get(name) != entry for name, entry in record.items()):
                return step
        return None

    def _copy(self, step: int) -> None:
        """Copy a checkpoint and the files of the run, then write the record."""
        self._list_predecessors()
        try:
            attempt = Attempt(step, f"{step}-{next(self._numbers)}", self._make_draft(step))
            self._attempts.append(attempt)
            for name in attempt.files:
                path = f"{self.writer.folder}/{attempt.folder}/{name}"
                retry(partial(self._storage.upload, self._draft / name, path))
        finally:
            shutil.rmtree(self._draft, ignore_errors=True)
        self._list_predecessors()
        retry(partial(self._write_record, attempt))
        self._copied[step] = attempt

    def _write_record(self, attempt: Attempt) -> None:
        """Write a record under a new name: a former one may have arrived, and be complete."""
        attempt.records.append(f"{RECORDS}/{attempt.step}-{next(self._numbers)}.json")
        tree = {"step": attempt.step, "folder": attempt.folder, "files": attempt.files}
        path = f"{self.writer.folder}/{attempt.records[-1]}"
        self._storage.write(path, json.dumps(tree).encode())

    def _make_draft(self, step: int) -> Record:
        """Link a checkpoint and copy the run's files into the draft; return their record.

        So the files stay as they are during the upload, while the run may remove the checkpoint and
        writes its logs.
        """
        shutil.rmtree(self._draft, ignore_errors=True)
        folder = make_checkpoint_path(self._draft / FOLDER, step)
        source = make_checkpoint_path(self._run_dir / FOLDER, step)
        # `shutil.copytree` would hide that a file is missing, if the run removes the checkpoint.
        for file in describe_files(source):
            target = self._draft / file.relative_to(self._run_dir)
            target.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(file, target)
        record = {
            file.relative_to(self._draft).as_posix(): entry
            for file, entry in describe_files(folder).items()
        }
        for name in self._files:
            if (self._run_dir / name).is_file():
                shutil.copyfile(self._run_dir / name, self._draft / name)
                record[name] = describe_file(self._draft / name)
        return record

    def _remove_outdated(self) -> None:
        """Remove copies that the run directory lacks, former attempts, and earlier processes'.

        If the run directory lacks all that were copied, the newest copy stays.
        """
        retained = (self._list_local().keys() & self._copied.keys()) or {max(self._copied)}
        for step in self._copied.keys() - retained:
            del self._copied[step]
        complete = {attempt.folder for attempt in self._copied.values()}
        outdated = [attempt for attempt in self._attempts if attempt.folder not in complete]
        predecessors = self._list_predecessors()
        for attempt in outdated:
            for name in (*attempt.records, attempt.folder):
                retry(partial(self._storage.remove, f"{self.writer.folder}/{name}"))
            self._attempts.remove(attempt)
        for writer in predecessors:
            for folder in (f"{writer.folder}/{RECORDS}", writer.folder):
                retry(partial(self._storage.remove, folder))

    def _list_predecessors(self) -> list[Writer]:
        """Return earlier processes of this run that have a folder.

        Raises RunError if a later one has one, since it may continue the run, or if this one's was
        removed.
        """
        writers = list_writers(self._storage)
        if any(writer > self.writer for writer in writers):
            raise RunError(f"{self._storage.url}: another process writes this mirror now")
        if self.writer not in writers:
            raise RunError(f"{self._storage.url}: the folder of this process was removed")
        return [writer for writer in writers if writer in self._predecessors]


class Mirror:
    """Copies the checkpoints of a run to an address, in a separate thread.

    If a copy fails, `failure` has the reason, and the next checkpoint starts a new attempt; `warn`
    is called for the first of successive failures. `failure` is None after an attempt without an
    error.
    """

    def __init__(self, writer: MirrorWriter, warn: Warn) -> None:
        self.failure: str | None = None
        self._writer = writer
        self._warn = warn
        self._wakeup = threading.Condition()
        self._has_work = True
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def __enter__(self) -> Self:
        self._writer.open()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait until all is copied or the copy has failed. Doesn't wait after KeyboardInterrupt."""
        self._is_closing = True
        self._wake()
        while self._thread.is_alive() and not isinstance(error, KeyboardInterrupt):
            self._thread.join(0.1)

    def add(self, checkpoint: Path) -> None:
        """Copy a new checkpoint in the background."""
        self._wake()

    def remove(self, step: int) -> None:
        """Remove the copy of a step in the background."""
        self._wake()

    def synchronize(self, checkpoints: Mapping[int, Path]) -> None:
        """Copy missing checkpoints and remove others in the background."""
        self._wake()

    def _wake(self) -> None:
        """Wake the thread, which determines what to copy and to remove."""
        with self._wakeup:
            self._has_work = True
            self._wakeup.notify()

    def _work(self) -> None:
        """Copy whenever the thread is woken, and a last time when the mirror closes."""
        while True:
            with self._wakeup:
                self._wakeup.wait_for(lambda: self._has_work or self._is_closing)
                self._has_work = False
                is_last = self._is_closing
            try:
                self._writer.synchronize()
                self.failure = None
            except Exception as error:  # of any library of a storage
                reason = str(error) or type(error).__name__
                if self.failure is None:
                    self._warn(f"checkpoint.mirror: {reason}; training goes on without it")
                self.failure = reason
            if is_last and not self._has_work:
                return


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        # The file system has no links.
        shutil.copyfile(source, target)
