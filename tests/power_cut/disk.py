"""A simulated disk: the files that remain after a power cut, by the promises of POSIX alone.

A file has its content at the last sync, or none. A folder has its names at the last sync; each
change since then has happened or not. A rename is atomic. Real file systems promise more than that,
but each of them something else.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from tests.power_cut.recording import Call


@dataclass(eq=False)
class File:
    """A file: its content, and the content on the disk."""

    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""

    def outcome(self, draw: random.Random, luck: float) -> bytes:
        """Return the content after a power cut; more than was synced with a chance of `luck`."""
        if draw.random() >= luck:
            return self.synced
        if self.content.startswith(self.synced):
            # Appended bytes may be written in part.
            return bytes(self.content[: draw.randint(len(self.synced), len(self.content))])
        return bytes(self.content)


@dataclass(eq=False)
class Folder:
    """A folder: its entries by name, and the entries on the disk."""

    entries: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)


@dataclass(eq=False)
class Change:
    """A change of names: the new entry of each name in a folder, None for a removed name."""

    names: Sequence[tuple[Folder, str, File | Folder | None]]

    def apply(self) -> None:
        """Change the names on the disk."""
        for folder, name, entry in self.names:
            _set(folder.synced, name, entry)


class Disk:
    """Applies calls to a folder in memory; its files are on the disk at first."""

    def __init__(self, folder: Path) -> None:
        self._root = _load(folder)
        self._pending: list[Change] = []

    def apply(self, calls: Iterable[Call]) -> None:
        """Apply calls; their effects are only in memory until a sync."""
        for call in calls:
            self._apply(call)

    def _apply(self, call: Call) -> None:
        match call.kind:
            case "mkdir":
                self._change((call.path, Folder()))
            case "remove":
                self._change((call.path, None))
            case "rename":
                self._change((call.path, None), (call.content.decode(), self._find(call.path)))
            case "open" if self._get(call.path) is None:
                self._change((call.path, File()))
            case "open" if call.place:
                self._find_file(call.path).content.clear()
            case "write":
                content = self._find_file(call.path).content
                content.extend(bytes(max(0, call.place - len(content))))
                content[call.place : call.place + len(call.content)] = call.content
            case "truncate":
                content = self._find_file(call.path).content
                del content[call.place :]
                content.extend(bytes(call.place - len(content)))
            case "sync":
                self._sync(self._find(call.path))

    def _change(self, *entries: tuple[str, File | Folder | None]) -> None:
        names = []
        for path, entry in entries:
            folder = self._find(str(PurePath(path).parent))
            assert isinstance(folder, Folder), path
            _set(folder.entries, PurePath(path).name, entry)
            names.append((folder, PurePath(path).name, entry))
        self._pending.append(Change(names))

    def _sync(self, entry: File | Folder) -> None:
        if isinstance(entry, File):
            entry.synced = bytes(entry.content)
            return
        unsynced: list[Change] = []
        for change in self._pending:
            if any(folder is entry for folder, _, _ in change.names):
                change.apply()
            else:
                unsynced.append(change)
        self._pending = unsynced

    def _get(self, path: str) -> File | Folder | None:
        entry: File | Folder | None = self._root
        for name in PurePath(path).parts:
            assert isinstance(entry, Folder), path
            entry = entry.entries.get(name)
        return entry

    def _find(self, path: str) -> File | Folder:
        entry = self._get(path)
        assert entry is not None, path
        return entry

    def _find_file(self, path: str) -> File:
        entry = self._find(path)
        assert isinstance(entry, File), path
        return entry

    def write(self, folder: Path) -> None:
        """Write all files in memory into a new folder."""
        _write(self._root, folder)

    def cut_power(self, draw: random.Random, folder: Path) -> None:
        """Write the files after a power cut into a new folder; this ends the use of the disk."""
        luck = draw.choice((0.0, 0.5, 1.0))
        for change in self._pending:
            if draw.random() < luck:
                change.apply()
        # Names may be newer than contents, or older.
        _write_synced(self._root, folder, draw, draw.choice((0.0, 0.5)))


def _set(entries: dict[str, File | Folder], name: str, entry: File | Folder | None) -> None:
    if entry is None:
        entries.pop(name, None)
    else:
        entries[name] = entry


def _load(path: Path) -> File | Folder:
    if path.is_dir():
        entries = {entry.name: _load(entry) for entry in sorted(path.iterdir())}
        return Folder(entries, dict(entries))
    content = path.read_bytes()
    return File(bytearray(content), content)


def _write(entry: File | Folder, path: Path) -> None:
    if isinstance(entry, File):
        path.write_bytes(entry.content)
        return
    path.mkdir()
    for name, inner in entry.entries.items():
        _write(inner, path / name)


def _write_synced(entry: File | Folder, path: Path, draw: random.Random, luck: float) -> None:
    if isinstance(entry, File):
        path.write_bytes(entry.outcome(draw, luck))
        return
    path.mkdir()
    for name, inner in entry.synced.items():
        _write_synced(inner, path / name, draw, luck)
