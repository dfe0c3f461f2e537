"""Mirror: a copy of a run's checkpoints at an address, from which another machine can continue.

`owner.json` names the run, and the process that writes. `STEP/` holds the files of a checkpoint,
and files of the run as they were then. `records/STEP.json` lists them with sizes and SHA-256. A
record is written after its files and removed before them, so an interrupted copy is never read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Self

from pipeline.checkpoint.checkpoint_folder import (
    FOLDER,
    MANIFEST,
    list_saved_steps,
    make_checkpoint_path,
)
from pipeline.checkpoint.manifest import (
    LATE_METRICS,
    DamagedError,
    describe_file,
    describe_files,
    is_entry,
    require_complete,
)
from pipeline.core.errors import DataError, PipelineError, RunError
from pipeline.core.files.atomic_write import commit
from pipeline.core.files.storage import Storage, retry

OWNER = "owner.json"
RECORDS = "records"
DRAFT = "mirror.part"
"""Folder of the run directory for files that are being copied from or to an address."""
MOST_RECORD_BYTES = 64 << 20
"""Most bytes of a record and of `owner.json` that are read."""
Warn = Callable[[str], None]
Record = Mapping[str, Mapping[str, Any]]
"""The files that a record lists: entries as in a manifest, by path in the run directory."""


class MismatchError(RunError):
    """A file that was downloaded differs from its record. `retry` downloads it again."""


@dataclass(frozen=True)
class MirroredRun:
    """A run at an address, as its records describe it."""

    storage: Storage
    identity: str
    """A digest that identifies the run."""
    records: Mapping[int, Record]
    """Records of the complete checkpoints by step."""

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint; 0 without any."""
        return max(self.records, default=0)

    def read_small(self, name: str, at_most_bytes: int) -> bytes:
        """Return a file of at most `at_most_bytes` that was copied with the newest checkpoint, or
        with an older one if it is damaged there. Raises DataError if it is damaged everywhere."""
        for step in sorted(self.records, reverse=True):
            read = partial(self.storage.read, f"{step}/{name}", at_most_bytes)
            content = retry(read) or b""
            entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            if entry == self.records[step].get(name):
                return content
        raise DataError(f"{self.storage.url}: {name} is missing or damaged beside all checkpoints")

    def restore(self, run_dir: Path, warn: Warn) -> None:
        """Copy all checkpoints, and the run's files of the newest one, into a new run directory.

        The copies are verified in a draft before they are moved. Damaged checkpoints are left out
        with a warning. Raises DataError if all are damaged.
        """
        draft = run_dir / DRAFT
        shutil.rmtree(draft, ignore_errors=True)
        restored: list[int] = []
        faults: list[str] = []
        for step in sorted(self.records, reverse=True):
            record = self.records[step]
            folder = make_checkpoint_path(draft / FOLDER, step)
            # The run's files come with the newest sound step, the first in the draft.
            is_first = not restored
            names = [name for name in record if is_first or name.startswith(f"{FOLDER}/")]
            try:
                for name in names:
                    self._download(step, name, record[name], draft / name)
                require_complete(folder)
            except DataError as error:
                faults.append(str(error))
                shutil.rmtree(draft if is_first else folder, ignore_errors=True)
                continue
            restored.append(step)
        if not restored:
            raise DataError(f"{self.storage.url}: no checkpoint can be read: {'; '.join(faults)}")
        for fault in faults:
            warn(f"{fault}; left out, and step {restored[0]} is the newest")
        # The recipe is moved last, since a directory with a recipe is a run.
        for path in sorted(draft.iterdir(), key=lambda path: path.name == "recipe.yaml"):
            commit(path, run_dir / path.name)
        draft.rmdir()

    def _download(self, step: int, name: str, entry: Mapping[str, Any], file: Path) -> None:
        """Copy a file and compare it with its entry. Raises DamagedError if it differs."""
        file.parent.mkdir(parents=True, exist_ok=True)

        def download() -> None:
            self.storage.download(f"{step}/{name}", file)
            if describe_file(file) != entry:
                raise MismatchError(f"{self.storage.url}/{step}/{name}: doesn't match its record")

        try:
            retry(download)
        except MismatchError as error:
            raise DamagedError(str(error)) from error


def read_mirror(storage: Storage) -> MirroredRun | None:
    """Read the records at an address; None if nothing is there. Raises DataError if it can't be
    read, or if there are other files than a mirror's."""
    owner = _parse(retry(lambda: storage.read(OWNER, MOST_RECORD_BYTES)))
    if owner is None:
        if files := retry(storage.list_files):
            raise DataError(f"{storage.url}: isn't a mirror, and holds {next(iter(files))}")
        return None
    records = {}
    for file in retry(storage.list_files):
        path = PurePosixPath(file)
        if len(path.parts) != 2 or path.parts[0] != RECORDS or not path.stem.isdecimal():
            continue
        step = int(path.stem)
        record = _parse_record(retry(partial(storage.read, file, MOST_RECORD_BYTES)), step)
        if record is not None:
            records[step] = record
    return MirroredRun(storage, str(owner.get("run")), records)


class Mirror:
    """Copies the checkpoints of a run to an address, in a separate thread.

    The thread copies every checkpoint that the address lacks, the newest first, and removes those
    that the run directory lacks. `files` are names of files of the run that are copied with each
    checkpoint if they exist. If a copy fails, `failure` has the reason, and the next checkpoint
    starts a new attempt; `warn` is called for the first of successive failures. `failure` is None
    after an attempt without an error.
    """

    def __init__(
        self, mirrored: MirroredRun, run_dir: Path, files: Sequence[str], warn: Warn
    ) -> None:
        self.failure: str | None = None
        self._storage = mirrored.storage
        self._identity = mirrored.identity
        self._records = dict(mirrored.records)
        self._run_dir = run_dir
        self._files = files
        self._warn = warn
        self._writer = uuid.uuid4().hex
        """Random name of this process in `owner.json`."""
        self._wakeup = threading.Condition()
        self._has_work = True
        self._is_closing = False
        self._draft = run_dir / DRAFT
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def __enter__(self) -> Self:
        owner = {"run": self._identity, "writer": self._writer}
        retry(lambda: self._storage.write(OWNER, json.dumps(owner).encode()))
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
                self._synchronize()
                self.failure = None
            except (PipelineError, OSError) as error:
                if self.failure is None:
                    self._warn(f"checkpoint.mirror: {error}; training goes on without it")
                self.failure = str(error)
            if is_last and not self._has_work:
                return

    def _synchronize(self) -> None:
        """Copy and remove until the address has the checkpoints of the run directory."""
        while (step := self._find_uncopied_step()) is not None:
            try:
                self._copy(step)
            except (FileNotFoundError, DamagedError):
                # A checkpoint that was removed meanwhile needs no copy.
                if step in list_saved_steps(self._run_dir / FOLDER):
                    raise
        removed_steps = self._records.keys() - self._list_local().keys()
        for step in sorted(removed_steps):
            self._require_ownership()
            self._remove(step)

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
            copied = self._records.get(step, {})
            if any(copied.get(name) != entry for name, entry in record.items()):
                return step
        return None

    def _copy(self, step: int) -> None:
        """Copy a checkpoint and the files of the run, then write the record."""
        self._require_ownership()
        try:
            # Made first: a damaged checkpoint must not replace its copy.
            record = self._make_draft(step)
            if step in self._records:
                self._remove(step)
            for name in record:
                retry(partial(self._storage.upload, self._draft / name, f"{step}/{name}"))
        finally:
            shutil.rmtree(self._draft, ignore_errors=True)
        self._require_ownership()
        content = json.dumps({"step": step, "files": record}).encode()
        retry(lambda: self._storage.write(f"{RECORDS}/{step}.json", content))
        self._records[step] = record

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

    def _remove(self, step: int) -> None:
        retry(lambda: self._storage.remove(f"{RECORDS}/{step}.json"))
        self._records.pop(step)
        retry(lambda: self._storage.remove(str(step)))

    def _require_ownership(self) -> None:
        """Raise RunError unless `owner.json` names this process: another may continue the run."""
        owner = _parse(retry(lambda: self._storage.read(OWNER, MOST_RECORD_BYTES)))
        if owner is None or owner.get("writer") != self._writer:
            raise RunError(f"{self._storage.url}: another process writes this mirror now")


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        # The file system has no links.
        shutil.copyfile(source, target)


def _parse(content: bytes | None) -> Mapping[str, Any] | None:
    """Return the JSON object in a file; None if it is missing or was written in part."""
    try:
        tree = json.loads(content or b"")
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) else None


def _parse_record(content: bytes | None, step: int) -> Record | None:
    """Return a record; None if it was written in part, or names files outside of the run."""
    match _parse(content):
        case {"step": int() as number, "files": dict() as files} if number == step:
            if all(_is_safe(name, step) and is_entry(entry) for name, entry in files.items()):
                return files
    return None


def _is_safe(name: str, step: int) -> bool:
    """Return whether a path leads to a file of a step's checkpoint, or of the run directory."""
    path = PurePosixPath(name)
    is_relative = str(path) == name and not path.is_absolute() and ".." not in path.parts
    return is_relative and (len(path.parts) == 1 or path.parts[:2] == (FOLDER, str(step)))
