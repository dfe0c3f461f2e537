"""Mirror: a copy of a run's checkpoints at an address, from which another machine can continue.

Every process that writes has a folder, `GENERATION-RUN-NAME/`. Its generation is above those of all
folders that were there before. `STEP-NUMBER/` in it holds the files of a checkpoint, and files of
the run as they were then. `records/STEP-NUMBER.json` names such a folder and lists its files with
sizes and SHA-256. A record is written after its files and removed before them, so an interrupted
copy is never read.

No name is used twice. So a process that was replaced, and whose requests arrive late, can neither
change nor remove what its successor has copied. Of two processes the later one's checkpoints count.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Self

from pipeline.checkpoint.checkpoint_folder import (
    FOLDER,
    MANIFEST,
    MIRROR_DRAFT,
    make_checkpoint_path,
)
from pipeline.checkpoint.manifest import DamagedError, describe_file, is_entry, require_complete
from pipeline.core.errors import DataError, RunError
from pipeline.core.files.atomic_write import commit
from pipeline.core.files.storage import Storage, StoredFile, retry

RECORDS = "records"
OPENED = "opened.json"
"""File that makes the folder of a process, which object stores can't have without a file."""
MOST_RECORD_BYTES = 64 << 20
"""Most bytes of a record that are read."""
MOST_NAME_BYTES = 200
"""Most bytes of a part of a file's path. File systems allow 143 to 255."""
MOST_PATH_LETTERS = 500
"""Most letters of a file's path below the run directory."""
MOST_READS = 20
"""Most listings until two are equal, and most restorations from a mirror that changes."""
OLD_OWNER = "owner.json"
"""File of mirrors whose processes shared a folder."""
_WRITER = re.compile(r"([0-9]{8,15})-([0-9a-f]{16})-([0-9a-f]{16})")
_RECORD = re.compile(r"(0|[1-9][0-9]{0,17})-([0-9]{1,18})\.json")
Warn = Callable[[str], None]
Record = Mapping[str, Mapping[str, Any]]
"""The files that a record lists: entries as in a manifest, by path in the run directory."""


class MismatchError(RunError):
    """A file that was downloaded differs from its record. `retry` downloads it again."""


@dataclass(frozen=True, order=True)
class Writer:
    """A process that writes a mirror, or has written it. Later ones are greater."""

    generation: int
    name: str
    """Random, 16 hexadecimal digits."""
    run: str
    """16 hexadecimal digits that identify the run."""

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.generation:08}-{self.run}-{self.name}"

    @classmethod
    def parse(cls, folder: str) -> Self | None:
        """Return the writer of a folder; None for any other name."""
        match = _WRITER.fullmatch(folder)
        return None if match is None else cls(int(match[1]), match[3], match[2])


@dataclass(frozen=True)
class Copy:
    """A copy of a checkpoint, as its record describes it."""

    step: int
    writer: Writer
    number: int
    """The record's number. Of one writer's copies of a step the highest one counts."""
    folder: str
    """The folder of its files at the address."""
    files: Record

    def require_files(self, files: Mapping[str, StoredFile]) -> None:
        """Raise DamagedError unless a listing has all files of the copy in their sizes."""
        for name, entry in self.files.items():
            file = files.get(f"{self.folder}/{name}")
            if file is None:
                raise DamagedError(f"lists {name}, which is missing")
            if file.size_bytes not in (entry["bytes"], None):
                raise DamagedError(
                    f"lists {name} with {entry['bytes']} bytes, not {file.size_bytes}"
                )


@dataclass(frozen=True)
class MirroredRun:
    """A run at an address, as its records describe it."""

    storage: Storage
    identity: str
    """16 hexadecimal digits that identify the run."""
    copies: Sequence[Copy]
    """Complete copies of its last process, and of earlier ones up to its newest step; the newest
    step first, and of one step the last process' copy."""
    faults: Sequence[str]
    """Problems of records whose checkpoints can't be restored."""
    run_files: Collection[str]
    """Names of files of a run that a record may list beside a checkpoint's."""

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint; 0 without any."""
        return self.copies[0].step if self.copies else 0

    def read_small(self, name: str, at_most_bytes: int) -> bytes:
        """Return a file of at most `at_most_bytes` that was copied with the newest checkpoint, or
        with an older one if it is damaged there. Raises DataError if it is damaged everywhere."""
        for copy in self.copies:
            if name not in copy.files:
                continue
            read = partial(self.storage.read, f"{copy.folder}/{name}", at_most_bytes)
            content = retry(read) or b""
            entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            if entry == copy.files[name]:
                return content
        if not self.copies:
            raise self._make_error([])
        raise DataError(f"{self.storage.url}: {name} is missing or damaged beside all checkpoints")

    def restore(self, run_dir: Path, warn: Warn) -> None:
        """Copy all checkpoints, and the run's files of the newest one, into a new run directory.

        The copies are verified in a draft before they are moved. Damaged checkpoints are left out
        with a warning. If another process has added and removed checkpoints meanwhile, the new ones
        are copied. Raises DataError if all are damaged.
        """
        draft = run_dir / MIRROR_DRAFT
        run = self
        for _ in range(MOST_READS):
            shutil.rmtree(draft, ignore_errors=True)
            steps, faults = run._download_all(draft)
            runs = read_mirror(self.storage, self.run_files) if faults else ()
            now = next((other for other in runs if other.identity == self.identity), run)
            if now.copies == run.copies:
                break
            run = now
        if not steps:
            raise run._make_error(faults)
        for fault in faults:
            warn(f"{fault}; left out, and step {steps[0]} is the newest")
        # The recipe is moved last, since a directory with a recipe is a run.
        for path in sorted(draft.iterdir(), key=lambda path: path.name == "recipe.yaml"):
            commit(path, run_dir / path.name)
        draft.rmdir()

    def _download_all(self, draft: Path) -> tuple[list[int], list[str]]:
        """Copy all checkpoints into a draft; return their steps, and the problems of others."""
        restored: list[int] = []
        faults: list[str] = []
        for copy in self.copies:
            if copy.step in restored:
                continue
            folder = make_checkpoint_path(draft / FOLDER, copy.step)
            # The run's files come with the newest sound step, the first in the draft.
            is_first = not restored
            names = [name for name in copy.files if is_first or name.startswith(f"{FOLDER}/")]
            try:
                for name in names:
                    self._download(copy, name, draft / name)
                require_complete(folder)
            except DataError as error:
                faults.append(str(error))
                shutil.rmtree(draft if is_first else folder, ignore_errors=True)
                continue
            restored.append(copy.step)
        return restored, faults

    def _download(self, copy: Copy, name: str, file: Path) -> None:
        """Copy a file and compare it with its entry. Raises DamagedError if it differs."""
        file.parent.mkdir(parents=True, exist_ok=True)

        def download() -> None:
            self.storage.download(f"{copy.folder}/{name}", file)
            if describe_file(file) != copy.files[name]:
                problem = "doesn't match its record"
                raise MismatchError(f"{self.storage.url}/{copy.folder}/{name}: {problem}")

        try:
            retry(download)
        except MismatchError as error:
            raise DamagedError(str(error)) from error

    def _make_error(self, faults: Sequence[str]) -> DataError:
        reasons = "; ".join([*faults, *self.faults])
        return DataError(f"{self.storage.url}: no checkpoint can be read: {reasons}")


def read_mirror(
    storage: Storage, run_files: Collection[str], warn: Warn = lambda _: None
) -> tuple[MirroredRun, ...]:
    """Return the runs at an address that have records, the one that was written last first.

    A record that can't be used is skipped with a warning. `run_files` are the names of files that
    it may list beside a checkpoint's. Raises DataError if the mirror can't be read, and if there
    are other files than a mirror's; RunError if it changes all the time.
    """
    copies: dict[str, Copy] = {}
    before = None
    for _ in range(MOST_READS):
        files = retry(storage.list_files)
        _require_mirror(storage, files)
        names = {name for name in files if _match_record(name) is not None}
        interrupted: set[str] = set()
        damaged: dict[str, str] = {}
        for name in names:
            try:
                if name not in copies:
                    # No record is written twice, so a whole one is read once.
                    content = retry(partial(storage.read, name, MOST_RECORD_BYTES))
                    if (tree := _parse(content)) is None:
                        interrupted.add(name)
                        continue
                    copies[name] = _parse_copy(tree, name, run_files)
                copies[name].require_files(files)
            except DamagedError as error:
                damaged[name] = str(error)
        # A listing isn't of one moment: a checkpoint may have been replaced by a newer one during
        # it. So the next listing must say the same.
        state = (names, interrupted, damaged)
        if not files or (names and not interrupted and not damaged) or state == before:
            break
        before = state
    else:
        raise RunError(f"{storage.url}: changes while it is read; another process writes there")
    for name in sorted(interrupted):
        warn(f"{storage.url}/{name}: isn't a file, or was written in part; skipped")
    for name, problem in sorted(damaged.items()):
        warn(f"{storage.url}/{name}: {problem}; skipped")
    complete = [copies[name] for name in names - interrupted - damaged.keys()]
    last_writers = {writer.run: writer for writer in sorted(copy.writer for copy in complete)}
    runs = [
        MirroredRun(storage, last.run, _select_copies(complete, last), (), run_files)
        for last in sorted(last_writers.values(), reverse=True)
    ]
    problems: dict[str, list[str]] = {}
    for name, problem in sorted(damaged.items()):
        run = name.split("-")[1]
        if run not in last_writers:
            problems.setdefault(run, []).append(f"{name}: {problem}")
    runs += [MirroredRun(storage, run, (), texts, run_files) for run, texts in problems.items()]
    return tuple(runs)


def _select_copies(complete: Sequence[Copy], last: Writer) -> list[Copy]:
    """Return the copies of a run, the newest first, up to the newest of its last process."""
    newest = max(copy.step for copy in complete if copy.writer == last)
    copies = [copy for copy in complete if copy.writer.run == last.run and copy.step <= newest]
    return sorted(copies, key=lambda copy: (copy.step, copy.writer, copy.number), reverse=True)


def list_writers(storage: Storage) -> list[Writer]:
    """Return all processes that have a folder at an address, the first one first."""
    writers = map(Writer.parse, retry(storage.list_names))
    return sorted(writer for writer in writers if writer is not None)


def _require_mirror(storage: Storage, files: Collection[str]) -> None:
    """Raise DataError if there are files, but no folder of a writer."""
    if OLD_OWNER in files:
        problem = f"is a mirror of an older version, and holds {OLD_OWNER}; name another address"
        raise DataError(f"{storage.url}: {problem}")
    if files and not any(Writer.parse(name.partition("/")[0]) for name in files):
        raise DataError(f"{storage.url}: isn't a mirror, and holds {next(iter(files))}")


def _match_record(name: str) -> tuple[Writer, int, int] | None:
    """Return writer, step and number of a record's path; None for the path of anything else."""
    match name.split("/"):
        case [folder, room, file] if room == RECORDS:
            writer = Writer.parse(folder)
            numbers = _RECORD.fullmatch(file)
            if writer is not None and numbers is not None:
                return writer, int(numbers[1]), int(numbers[2])
    return None


def _parse(content: bytes | None) -> Any:
    """Return the JSON in a file; None if it is missing or was written in part."""
    try:
        return json.loads(content or b"")
    except (ValueError, RecursionError):
        return None


def _parse_copy(tree: Any, name: str, run_files: Collection[str]) -> Copy:
    """Return the copy that a record describes. Raises DamagedError for anything else, such as a
    record of files outside of the run."""
    matched = _match_record(name)
    assert matched is not None, name
    writer, step, number = matched
    match tree:
        case {"step": int() as recorded, "folder": str() as folder, "files": dict() as files}:
            if recorded != step or re.fullmatch(rf"{step}-[0-9]{{1,18}}", folder) is None:
                raise DamagedError("is of another step")
            for file, entry in files.items():
                if not (_is_safe(file, step) or file in run_files) or not is_entry(entry):
                    raise DamagedError(f"lists {file[:100]!r}, which is no file of a checkpoint")
                if any(str(parent) in files for parent in PurePosixPath(file).parents):
                    raise DamagedError(f"lists {file[:100]!r} below a file")
            if f"{FOLDER}/{step}/{MANIFEST}" not in files:
                raise DamagedError(f"doesn't list {MANIFEST}")
            return Copy(step, writer, number, f"{writer.folder}/{folder}", files)
    raise DamagedError("isn't a record of a checkpoint")


def _is_safe(name: str, step: int) -> bool:
    """Return whether a path leads to a file of a step's checkpoint, on any file system."""
    path = PurePosixPath(name)
    return (
        str(path) == name
        and name.isprintable()
        and len(name) <= MOST_PATH_LETTERS
        and len(path.parts) > 2
        and path.parts[:2] == (FOLDER, str(step))
        and ".." not in path.parts
        and all(len(part.encode()) <= MOST_NAME_BYTES for part in path.parts)
    )
