"""Mirrors in a local folder with a fault: each must be restored, or be refused by one message."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.checkpoint_folder import FOLDER, list_saved_steps, make_checkpoint_path
from pipeline.checkpoint.manifest import verify_files
from pipeline.checkpoint.mirror import read_mirror
from pipeline.checkpoint.mirror_writer import MirrorWriter
from pipeline.core.errors import PipelineError
from pipeline.core.files.storage import open_storage
from tests.mirrors.runs import RUN, RUN_FILES, save

SLOWEST_S = 20
"""Seconds after which a mirror hangs."""
STEPS = (10, 20, 30)


@dataclass(frozen=True)
class Result:
    """What a process made of a faulty mirror."""

    fault: str
    result: str
    """The restored step and warnings, or a message."""
    wrong: str | None
    """What breaks the promise: an exception, a hang, a sound checkpoint that wasn't restored."""


def _make_pipe(path: Path) -> None:
    os.mkfifo(path)


def _make_socket(path: Path) -> None:
    folder = Path.cwd()
    os.chdir(path.parent)  # paths of sockets have 108 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(folder)


def _make_folder(path: Path) -> None:
    path.mkdir()
    (path / "x").write_text("x")


@dataclass(frozen=True)
class Fault:
    """A fault of a mirror, which is made in the folder of its process."""

    text: str
    damaged: frozenset[int]
    """Steps that can't be restored."""
    make: Callable[[Path], object]
    is_silent: bool = False
    """Whether the mirror looks as if these steps were never copied, so that there is no warning."""


KINDS: Mapping[str, Callable[[Path], object]] = {
    "a pipe": _make_pipe,
    "a socket": _make_socket,
    "a folder": _make_folder,
    "an empty folder": Path.mkdir,
    "a broken link": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a folder": lambda path: path.symlink_to("."),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "empty": lambda path: path.write_bytes(b""),
    "random bytes": lambda path: path.write_bytes(random.Random(0).randbytes(300)),
    "missing": lambda path: None,
}
NAMES = (
    "../x",
    "/etc/passwd",
    "mirror.part",
    FOLDER,
    f"{FOLDER}/30",
    f"{FOLDER}/30/manifest.json/below",
    "metrics.jsonl/below",
    "recipe.yaml/below/below",
    f"{FOLDER}/20/state/x",
    f"{FOLDER}/30/../20/x",
    "summary.json",
    "",
    ".",
    "..",
    f"{FOLDER}/30/a\0b",
    f"{FOLDER}/30/a\ud800",
    f"{FOLDER}/30/a\nb",
    f"{FOLDER}/30/a\\b",
    f"{FOLDER}/30/{'x' * 300}",
    f"{FOLDER}/30/{'x/' * 3000}x",
)
VALUES: Mapping[str, Any] = {
    "step": (True, None, -30, 31, 30.0, "30", 10**400, [30]),
    "folder": ("", "..", "30-1/..", "/", "20-1", None, "30-99", "x" * 5000),
    "files": (None, [], {}, 30, {"manifest.json": {"bytes": 1, "sha256": ""}}),
}
ENTRIES: tuple[Any, ...] = (
    None,
    {},
    {"bytes": -1, "sha256": ""},
    {"bytes": 10**400, "sha256": ""},
    {"bytes": "1", "sha256": ""},
    {"bytes": 1, "sha256": None},
    {"bytes": True, "sha256": "0"},
)


def make_mirror(folder: Path) -> Path:
    """Copy a run of three checkpoints to `folder/store`; return the folder of its process."""
    run_dir = folder / "run"
    run_dir.mkdir()
    for step in STEPS:
        save(run_dir, step, "author")
    writer = MirrorWriter(open_storage(f"file://{folder}/store"), RUN, run_dir, RUN_FILES)
    writer.open()
    writer.synchronize()
    return folder / "store" / writer.writer.folder


def list_faults() -> Iterator[Fault]:
    """Yield faults of a mirror of three steps."""
    all_steps = frozenset(STEPS)
    newest = frozenset({STEPS[-1]})

    def replace(pattern: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            (path,) = folder.glob(pattern)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            make(path)

        return change

    places = {
        "records/30-*.json": newest,
        "30-*/metrics.jsonl": newest,
        f"20-*/{FOLDER}/20/manifest.json": frozenset({20}),
        f"30-*/{FOLDER}/30/state": newest,
        "records": all_steps,
        "opened.json": frozenset(),
    }
    for pattern, steps in places.items():
        for kind, make in KINDS.items():
            is_silent = kind in ("a folder", "an empty folder", "missing")
            yield Fault(f"{pattern} is {kind}", steps, replace(pattern, make), is_silent)
    for kind, make in KINDS.items():
        if kind != "missing":
            for name in ("x", "../x", "records/x", "records/40-9.json"):
                yield Fault(f"{kind} is added as {name}", frozenset(), _add(name, make))
    for name in NAMES:
        yield Fault(f"a record lists {name[:40]!r}", newest, _edit("files", name, ENTRIES[-1]))
    for key, values in VALUES.items():
        for value in values:
            yield Fault(f"a record's {key} is {value!r}"[:70], newest, _edit(key, None, value))
    for entry in ENTRIES:
        text = f"a record's entry is {entry!r}"[:70]
        yield Fault(text, newest, _edit("files", "metrics.jsonl", entry))
    for size in (0, 1, 40, 300):
        yield Fault(f"a record is cut after {size} bytes", newest, _cut(size))


def _add(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda folder: (make(folder / name), None)[1]


def _edit(key: str, name: str | None, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (file,) = folder.glob("records/30-*.json")
        record = json.loads(file.read_text())
        if name is None:
            record[key] = value
        else:
            record[key][name] = value
        file.write_text(json.dumps(record))

    return change


def _cut(size: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (file,) = folder.glob("records/30-*.json")
        file.write_bytes(file.read_bytes()[:size])

    return change


def restore_faulty(fault: Fault) -> Result:
    """Restore a mirror with a fault."""
    signal.signal(signal.SIGALRM, _raise_hang)
    signal.alarm(SLOWEST_S)
    try:
        with tempfile.TemporaryDirectory() as name:
            return _restore_faulty(Path(name), fault)
    finally:
        signal.alarm(0)


def _raise_hang(number: int, frame: object) -> None:
    raise TimeoutError("hangs")


def _restore_faulty(folder: Path, fault: Fault) -> Result:
    fault.make(make_mirror(folder))
    sound = sorted(frozenset(STEPS) - fault.damaged)
    storage = open_storage(f"file://{folder}/store")
    warnings: list[str] = []
    target = folder / "restored"
    target.mkdir()
    before = _list_tree(folder / "store")
    try:
        runs = read_mirror(storage, RUN_FILES, warnings.append)
        if not runs:
            restored = []
            result = "no run is there"
        else:
            runs[0].restore(target, warnings.append)
            restored = list_saved_steps(target / FOLDER)
            result = f"step {restored[-1]}"
    except PipelineError as error:
        restored = []
        result = f"refused: {str(error).replace(str(folder), '')[:60]}"
    except Exception as error:  # the promise is broken
        return Result(fault.text, f"{type(error).__name__}: {error}"[:90], "exception")
    wrong = None
    if restored != sound:
        wrong = f"restored {restored}, not {sound}"
    if fault.damaged and not (warnings or fault.is_silent) and restored:
        wrong = "no warning"
    if _list_tree(folder / "store") != before:
        wrong = "the mirror was changed"
    for step in restored:
        verify_files(make_checkpoint_path(target / FOLDER, step))
    outside = {path.name for path in target.iterdir()} - {FOLDER, *RUN_FILES}
    if outside or set(os.listdir(folder)) != {"run", "store", "restored"}:
        wrong = f"wrote {outside}"
    plural = "" if len(warnings) == 1 else "s"
    return Result(fault.text, f"{result}, {len(warnings)} warning{plural}", wrong)


def _list_tree(folder: Path) -> list[tuple[str, int, int]]:
    paths = [(path, path.lstat()) for path in sorted(folder.rglob("*"))]
    return [(str(path), status.st_mtime_ns, status.st_size) for path, status in paths]
