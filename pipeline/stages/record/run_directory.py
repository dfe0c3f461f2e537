"""Run directories: names of their files, creation and locks, and the list of descendants.

Files and folders of a run:

outputs/<date>/<time>_<recipe>/
    recipe.yaml, provenance.json, lowerings.json, summary.json, run.log, .lock
    metrics.jsonl, evals.jsonl, checkpoints/, events of TensorBoard
    scalars.jsonl                 scalars that callbacks log
    status.json                   what the run does now
    tokenizer.json                tokenizer of texts
    report/, profile/, dump/      results of the command `report`, of profiles and of dumps
    ckpt/, ckpt.json              with `checkpoint.prefix`
    descendants.jsonl             exports, converted weights and reproductions
    ranks/, plan.yaml             logs of several processes; the plan of parallel.mode=auto
    autopsy.json, reproducer/     of a non-finite step that ended the run
    earlier_autopsy/              both of these, after a resume
    price.json, trace.json, timeline.html, result of AutoTune      on an emulated device
    compiled.json                 for a device.target
    robustness.json               accuracy under attacks
    receipt.jsonl                 chain of digests, with `receipt.every_steps`
    receipt.json, receipt.json.sig    statement of the command `receipt`, and its signature
    leakage.json                  how well attacks recognise training samples
    fuzz/                         changed samples and weights that fool the network
    overrides.yaml, .claim        of a job of a sweep
    mirror.part/                  half of a checkpoint that is copied from a mirror
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pipeline.checkpoint.checkpoint_folder import AUTOPSY, EARLIER_AUTOPSY, MIRROR_DRAFT, REPRODUCER
from pipeline.checkpoint.checkpoint_folder import FOLDER as CHECKPOINTS
from pipeline.core.errors import DataError, RunError, printable
from pipeline.core.files.atomic_write import LOCK, Lock, format_json, try_lock_folder
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.trusted_files import open_unshared, require_real, require_real_trees
from pipeline.core.files.value_text import join_first
from pipeline.data.text.file_names import TOKENIZER
from pipeline.engine.monitors.live_status import BOARD_CONFIG, BOARD_FOLDER, STATUS
from pipeline.training.parallel.ranks import Ranks

DESCENDANTS = "descendants.jsonl"
Made = Literal["exported", "converted", "reproduced"]
"""How a descendant was made."""
MAX_DESCENDANTS_BYTES = 1 << 20
"""Most bytes of `DESCENDANTS` that are read, enough for ten thousand entries."""
OUTPUTS = Path("outputs")
RECIPE = "recipe.yaml"
SUMMARY = "summary.json"
LOG = "run.log"
PLAN = "plan.yaml"
LOWERINGS = "lowerings.json"
COMPILED = "compiled.json"
ROBUSTNESS = "robustness.json"
FUZZ = "fuzz"
LEAKAGE = "leakage.json"
CHAIN = "receipt.jsonl"
RECEIPT = "receipt.json"
ESTIMATE = "estimate.json"
"""Final value that a running run with the feature `estimate` expects."""
OVERRIDES = "overrides.yaml"
"""Overrides of a job of a sweep."""
CLAIM = ".claim"
"""File that a process locks while it runs a job of a sweep."""

APPENDED = (LOG, "metrics.jsonl", "evals.jsonl", "scalars.jsonl", DESCENDANTS, CHAIN)
"""Files to which lines are appended."""
CHECKPOINT_FILES = "ckpt"
CHECKPOINT_NAMES = "ckpt.json"
"""Folder of checkpoints as MindSpore's files, and the list of these by step."""
RECORDS = (
    *(SUMMARY, "provenance.json", LOWERINGS, AUTOPSY, CHECKPOINT_NAMES, COMPILED),
    *(STATUS, ESTIMATE),
)
RESULTS = (ROBUSTNESS, LEAKAGE, RECEIPT, f"{RECEIPT}.sig")
REPLACED = (RECIPE, PLAN, OVERRIDES, TOKENIZER, BOARD_CONFIG, *RECORDS, *RESULTS)
"""Files that are written as a whole, besides the files of an emulated device."""
PRICES = ("price.json", "trace.json", "timeline.html")
PROFILE = "profile"
REPORT = "report"
RANKS = "ranks"
DUMP = "dump"
AUTOPSY_FOLDERS = (REPRODUCER, EARLIER_AUTOPSY)
RESULT_FOLDERS = (CHECKPOINTS, CHECKPOINT_FILES, BOARD_FOLDER, RANKS, REPORT, PROFILE, DUMP)
FOLDERS = (*RESULT_FOLDERS, *AUTOPSY_FOLDERS, MIRROR_DRAFT)
BEFORE_A_RUN = (LOCK, CLAIM, OVERRIDES, LOWERINGS, RANKS, MIRROR_DRAFT)
"""Files that may exist before a run begins: a sweep's, and lowerings to use."""
DRAFTS = (f"{RECIPE}.", f"{OVERRIDES}.", f"{LOWERINGS}.")
"""Prefixes of half-written files, whose names end in `.part`."""
HYDRA_FILES = {"config.yaml", "hydra.yaml", "overrides.yaml"}
"""Files that Hydra writes before a run begins, in the folder `hydra.output_subdir`."""
MAX_ENTRIES = 3
"""Most entries of a directory that a message names."""


@dataclass(frozen=True)
class Descendant:
    """An export, converted weights or a reproduction of a run."""

    made: Made
    to: str
    """Absolute path."""
    at: str = ""
    """Time, ISO 8601."""


def note_descendant(run_dir: Path, made: Made, to: Path) -> None:
    """Append a descendant at the path `to`. Errors of the file system are ignored."""
    entry = Descendant(made, os.path.abspath(to), time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    with (
        suppress(OSError),
        open(run_dir / DESCENDANTS, "a", encoding="utf-8", opener=open_unshared) as file,
    ):
        file.write(format_json(asdict(entry)) + "\n")


def read_descendants(run_dir: Path) -> Sequence[Descendant]:
    """Read the descendants of a run; for each kind and path the newest entry.

    Invalid lines are skipped, since the file may come from a stranger.
    """
    file = run_dir / DESCENDANTS
    if not file.is_file():
        return []
    try:
        with file.open("rb") as opened:
            lines = opened.read(MAX_DESCENDANTS_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    descendants: dict[tuple[str, str], Descendant] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            made = entry.get("made")
            to = entry.get("to")
            at = entry.get("at")
        except (ValueError, AttributeError, RecursionError):
            continue
        if made in get_args(Made) and isinstance(to, str):
            descendants[made, to] = Descendant(made, to, at if isinstance(at, str) else "")
    return list(descendants.values())


def create_run_dir(name: str, outputs: Path = OUTPUTS) -> Path:
    """Create a new directory for a run of the named recipe. Raises RunError if that fails."""
    date, clock = time.strftime("%Y-%m-%d %H-%M-%S").split()
    return make_unique(outputs / date / f"{clock}_{name}")


def make_unique(run_dir: Path) -> Path:
    """Make `run_dir`, or the first of `run_dir_1`, `run_dir_2`, ... that is free; return its path.

    `mkdir` fails for an existing directory, so two processes can't make the same one. Raises
    RunError if the directory can't be made.
    """
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1000):
            path = run_dir if attempt == 0 else run_dir.with_name(f"{run_dir.name}_{attempt}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise RunError(explain_unmade(run_dir, error)) from error
    raise RunError(f"{run_dir}: a thousand directories of that name exist already")


def explain_unmade(run_dir: Path, error: OSError) -> str:
    """Return a message about a directory that can't be made."""
    if run_dir.is_symlink() and not run_dir.exists():
        return f"{run_dir}: is a link to {run_dir.readlink()}, which isn't there"
    return f"{run_dir}: can't make the run directory: {error.strerror}"


def make_run_dir(run_dir: Path) -> Path:
    """Make a directory that the user has named, unless it exists.

    Raises RunError if it can't be made or holds a run, DataError if it holds other files.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        require_unused(run_dir)
    except OSError as error:
        raise RunError(explain_unmade(run_dir, error)) from error
    return run_dir


def require_unused(run_dir: Path) -> None:
    """Raise RunError if a directory holds a run, DataError if it holds other files.

    Allowed are files that prepare a run, and files of a run that was killed before it began.
    """
    if (run_dir / RECIPE).exists():
        raise RunError(
            f"{run_dir}: holds a run already; name another directory, or resume that run: "
            f"train.resume={run_dir}"
        )
    require_own(run_dir)
    entries = sorted(path.name for path in run_dir.iterdir() if not _is_preparation(path))
    if not entries:
        return
    is_of_run = any(name in (*APPENDED, *REPLACED, *PRICES, *FOLDERS) for name in entries)
    content = f"a run without its {RECIPE}" if is_of_run else "other files than a run's"
    names = join_first(list(map(printable, entries)), MAX_ENTRIES)
    raise DataError(f"{run_dir}: holds {content}: {names}; name a new or an empty directory")


def _is_preparation(path: Path) -> bool:
    """Return whether an entry may exist before a run begins."""
    if path.name in BEFORE_A_RUN or (path.name.endswith(".part") and path.name.startswith(DRAFTS)):
        return True
    if path.is_symlink() or not path.is_dir():
        return False
    names = {file.name for file in path.iterdir()}
    return bool(names) and names <= HYDRA_FILES


def require_own(run_dir: Path) -> None:
    """Raise DataError if a file that a run writes or deletes is a link or not a regular file.

    The directory may belong to another user. A run doesn't change other files.
    """
    require_real(run_dir, (*APPENDED, *REPLACED, *PRICES, LOCK, CLAIM), APPENDED)
    require_real_trees(run_dir, FOLDERS)


@contextmanager
def lock_run(run_dir: Path, *, new: bool = False) -> Iterator[Lock]:
    """Lock a run directory against other processes, if its file system supports locks.

    Raises RunError if another process writes to it, or if it holds a run and this is a `new` run;
    DataError if a link in it would redirect writes.
    """
    require_real(run_dir, (LOCK,), ())
    with try_lock_folder(run_dir) as lock:
        if lock is None:
            raise RunError(f"{run_dir}: another process is writing this run")
        # Checked under the lock, since two processes may have found the directory empty.
        if new:
            require_unused(run_dir)
        else:
            require_own(run_dir)
        yield lock


def is_free(run_dir: Path) -> bool:
    """Return whether no process writes to a run; without locks, whether the run has ended."""
    try:
        with try_lock_folder(run_dir) as lock:
            if lock is None:
                return False
            return lock.is_certain or read_status(run_dir) is not None
    except OSError:
        return False


def read_written_at_ns(file: Path) -> int:
    """Return the time at which a file was written, in ns; 0 if it has been removed."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def find_run_dir(folder: Path) -> Path | None:
    """Return the first run directory of `folder` and the two folders around it; else None. For a
    link, those around the folder that it leads to come last."""
    # The parent of "." is "." in a relative path.
    around = Path(os.path.abspath(folder)).parents[:2]
    target = Path(os.path.realpath(folder)).parents[:2]
    named = (folder, folder.parent, folder.parent.parent)
    return next((path for path in (*named, *around, *target) if (path / RECIPE).is_file()), None)


def require_run_dir(folder: Path) -> Path:
    """Return the result of `find_run_dir`. Raises DataError if it is None."""
    run_dir = find_run_dir(folder)
    if run_dir is None:
        raise DataError(describe_missing_run(folder))
    return run_dir


def describe_missing_run(folder: Path) -> str:
    """Return the message about a folder that has no run or doesn't exist."""
    advice = f"`python -m pipeline runs {OUTPUTS}` lists runs"
    if folder.exists():
        return f"{folder}: isn't a run directory; it holds no {RECIPE}; {advice}"
    looked_in = f", looked in {folder.absolute().parent}" if not folder.is_absolute() else ""
    return f"{folder}: there is no such run{looked_in}; {advice}"


def read_status(run_dir: Path) -> str | None:
    """Read the status in a run's summary; None if it can't be read."""
    status = read_outcome(run_dir).get("status")
    return status if isinstance(status, str) else None


def read_outcome(run_dir: Path) -> Mapping[str, Any]:
    """Read the keys of a run's summary; {} if it can't be read."""
    try:
        outcome = read_json(run_dir / SUMMARY)
    except (OSError, ValueError):
        return {}
    return outcome if isinstance(outcome, dict) else {}


Write = Callable[[], object]


class HeldWrites:
    """Queue of writes that wait for `release`. If `is_held` is False, writes are done at once."""

    def __init__(self, *, held: bool = False) -> None:
        self.is_held = held
        self._waiting: list[Write] = []

    def add(self, write: Write) -> None:
        """Do a write at once, or queue it."""
        if self.is_held:
            self._waiting.append(write)
        else:
            write()

    def release(self) -> None:
        """Do the queued writes in order, and all later writes at once. Raises their errors."""
        self.is_held = False
        waiting = self._waiting
        self._waiting = []
        for write in waiting:
            write()


@dataclass(frozen=True)
class RunFolder:
    """A run directory. A resumed run changes it only after all checks.

    If the run is refused or killed before that, the files of the earlier run are unchanged.
    """

    path: Path
    accepted: HeldWrites = field(default_factory=HeldWrites)
    """Writes that wait until all checks have passed: log, provenance, lowerings."""
    advanced: HeldWrites = field(default_factory=HeldWrites)
    """Writes over records of the earlier run, which wait for a new step or the run's end."""
    resuming: bool = False
    """Whether the run resumes an earlier run in this directory."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that share the directory; only the first one writes."""
