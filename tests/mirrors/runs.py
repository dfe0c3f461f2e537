"""Runs that copy checkpoints to a mirror, and the law of mirrors."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.checkpoint.checkpoint_folder import FOLDER, list_saved_steps, make_checkpoint_path
from pipeline.checkpoint.manifest import verify_files, write_manifest
from pipeline.checkpoint.mirror import Writer, read_mirror
from pipeline.checkpoint.mirror_writer import MirrorWriter
from pipeline.core.files.storage import Storage
from tests.mirrors.memory_store import MemoryStore, open_memory

RUN = "0123456789abcdef"
OTHER = "fedcba9876543210"
RUN_FILES = ("metrics.jsonl", "recipe.yaml")
WRITTEN = ("state/_METADATA", "host/metadata", "recipe/metadata")


def save(run_dir: Path, step: int, author: str) -> None:
    """Write a checkpoint whose files name its author."""
    folder = make_checkpoint_path(run_dir / FOLDER, step)
    for name in WRITTEN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} of {step} by {author}")
    write_manifest(folder, "digest")
    (run_dir / "metrics.jsonl").write_text(f"{step} by {author}\n")
    (run_dir / "recipe.yaml").write_text(f"run: {author}\n")


@dataclass
class Life:
    """A process of a run: it restores the mirror, then saves steps, of which it keeps one."""

    author: str
    run_dir: Path
    steps: tuple[int, ...]
    run: str = RUN
    restores: bool = False
    copied: list[int] = field(default_factory=list)
    """Steps that the mirror had when a synchronization ended."""
    writer: Writer = field(default_factory=lambda: Writer(0, "", ""))

    def work(self, storage: Storage) -> None:
        """Be the process."""
        if self.restores:
            runs = read_mirror(storage, RUN_FILES)
            same = [run for run in runs if run.identity == self.run]
            if same:
                same[0].restore(self.run_dir, lambda _: None)
        writer = MirrorWriter(storage, self.run, self.run_dir, RUN_FILES)
        writer.open()
        self.writer = writer.writer
        for step in self.steps:
            saved = list_saved_steps(self.run_dir / FOLDER)
            if saved and step <= saved[-1]:
                continue
            save(self.run_dir, step, self.author)
            for older in saved:
                shutil.rmtree(make_checkpoint_path(self.run_dir / FOLDER, older))
            writer.synchronize()
            self.copied.append(step)


def restore_newest(store: MemoryStore, run: str = RUN) -> tuple[int, str]:
    """Restore a run; return the newest step and its author, after every file was verified.

    Raises the errors of a mirror that can't be read, LookupError without the run.
    """
    for mirrored in read_mirror(open_memory(store), RUN_FILES):
        if mirrored.identity == run:
            with tempfile.TemporaryDirectory() as name:
                mirrored.restore(Path(name), lambda _: None)
                step = list_saved_steps(Path(name) / FOLDER)[-1]
                folder = make_checkpoint_path(Path(name) / FOLDER, step)
                verify_files(folder)
                return step, (folder / WRITTEN[0]).read_text().rpartition(" ")[2]
    raise LookupError(f"no copy of run {run}")


class Law:
    """The law of mirrors. Checked again only if something has changed.

    From the moment that a process has copied a step, a checkpoint of it, or of a later process, can
    be restored, and its newest one is as new.
    """

    def __init__(self, store: MemoryStore, lives: Sequence[Life]) -> None:
        self.checks = 0
        self.loss: str | None = None
        """The first way in which the law was broken."""
        self._store = store
        self._lives = lives
        self._state: list[object] = []

    def check(self) -> None:
        """Restore what the store has."""
        state = [self._store.version, *((life.writer, len(life.copied)) for life in self._lives)]
        if state != self._state and self.loss is None:
            self._state = state
            self.checks += 1
            self.loss = _find_loss(self._store, self._lives)


def _find_loss(store: MemoryStore, lives: Sequence[Life]) -> str | None:
    lives = sorted(lives, key=lambda life: life.writer)
    for run in {life.run for life in lives}:
        same = [life for life in lives if life.run == run]
        complete = [index for index, life in enumerate(same) if life.copied]
        if not complete:
            continue
        last = complete[-1]
        try:
            step, author = restore_newest(store, run)
        except Exception as error:  # any of them is a loss
            return f"{type(error).__name__}: {error}"
        authors = [life.author for life in same[last:]]
        least = same[last].copied[-1]
        if author not in authors or (author == authors[0] and step < least):
            return f"step {step} by {author} is restored, not step {least} by {authors[0]}"
    return None


@contextmanager
def make_folders(*authors: str) -> Iterator[dict[str, Path]]:
    """Make an empty run directory for each author."""
    with tempfile.TemporaryDirectory() as name:
        folders = {author: Path(name) / author for author in authors}
        for folder in folders.values():
            folder.mkdir()
        yield folders
