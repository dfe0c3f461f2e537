"""Run directories: created so that no two runs share one, and found to resume.

outputs/<date>/<time>_<recipe>/  recipe.yaml  metrics.jsonl  evals.jsonl  summary.json  run.log
                                 provenance.json  lowerings.json  checkpoints/  .lock  events of
                                 TensorBoard, which names a run by the folder that they lie in
Callbacks that log leave scalars.jsonl, texts tokenizer.json, the command `report` leaves report/,
a profile profile/, dumps dump/, `checkpoint.prefix` ckpt/ and ckpt.json, and what is exported,
converted or reproduced is noted in descendants.jsonl. Several processes also leave ranks/, and
parallel.mode=auto plan.yaml. A non-finite step that ends a run leaves autopsy.json and reproducer/,
which are in earlier_autopsy/ after a resume. On an emulated device also price.json, trace.json,
timeline.html, and AutoTune's result; for a device.target compiled.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.checkpoint.autopsy_archive import AUTOPSY, EARLIER_AUTOPSY, REPRODUCER
from pipeline.checkpoint.checkpoint_folder import FOLDER as CHECKPOINTS
from pipeline.core.errors import DataError, RunError, printable
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.folder_lock import LOCK, Lock, owned_folder
from pipeline.core.files.real_files import require_real, require_real_trees
from pipeline.core.files.value_text import join_first
from pipeline.data.text.text_format import TOKENIZER
from pipeline.stages.record.descendants import DESCENDANTS
from pipeline.training.parallel.ranks import Ranks

OUTPUTS = Path("outputs")
RECIPE = "recipe.yaml"
SUMMARY = "summary.json"
LOG = "run.log"
PLAN = "plan.yaml"
"""Which devices share what, as it was searched."""
LOWERINGS = "lowerings.json"
"""The lowerings of the run's layers."""
COMPILED = "compiled.json"
"""Figures of programs for a chip that is not there."""
OVERRIDES = "overrides.yaml"
CLAIM = ".claim"
"""The overrides of a job of a sweep, and the file that a process at it locks."""

APPENDED = (LOG, "metrics.jsonl", "evals.jsonl", "scalars.jsonl", DESCENDANTS)
"""Files that are changed in place."""
CHECKPOINT_FILES = "ckpt"
CHECKPOINT_NAMES = "ckpt.json"
"""Checkpoints as MindSpore's files, and a list of these by step."""
BOARD_FOLDER = "embeddings"
BOARD_CONFIG = "projector_config.pbtxt"
"""The folder and the file of what TensorBoard's projector shows."""
REPLACED = (
    *(RECIPE, SUMMARY, "provenance.json", LOWERINGS, PLAN, AUTOPSY, OVERRIDES, TOKENIZER),
    *(CHECKPOINT_NAMES, BOARD_CONFIG, COMPILED),
)
"""Files that are written as a whole, besides an emulated device's."""
PRICES = ("price.json", "trace.json", "timeline.html")
PROFILE = "profile"
"""Files of a profile: where the time of traced steps went."""
REPORT = "report"
"""The page and the files of `report`."""
RANKS = "ranks"
"""The logs of a run's processes."""
DUMP = "dump"
"""The tensors of steps, by the time at which they were dumped."""
FOLDERS = (
    *(CHECKPOINTS, BOARD_FOLDER, REPRODUCER, EARLIER_AUTOPSY, RANKS, REPORT, PROFILE),
    *(DUMP, CHECKPOINT_FILES),
)
BEFORE_A_RUN = (LOCK, CLAIM, OVERRIDES, LOWERINGS, RANKS)
"""Files that may be there before a run begins: a sweep's notes, and lowerings to use."""
DRAFTS = (f"{RECIPE}.", f"{OVERRIDES}.", f"{LOWERINGS}.")
"""Prefixes of half-written files, whose names end in `.part`."""
OF_HYDRA = {"config.yaml", "hydra.yaml", "overrides.yaml"}
"""Files that Hydra writes before a run begins, in the folder `hydra.output_subdir`."""
MAX_ENTRIES = 3
"""Most entries of a directory that a message names."""


def create(name: str, outputs: Path = OUTPUTS) -> Path:
    """Create a new directory for a run of the named recipe. Raises RunError if it can't."""
    return make_unique(outputs / time.strftime("%Y-%m-%d") / f"{time.strftime('%H-%M-%S')}_{name}")


def make_unique(run_dir: Path) -> Path:
    """Make a directory that did not exist before, `run_dir` or `run_dir_1`, `run_dir_2`, ...

    `mkdir` either makes the directory or fails, so two processes never get the same one.
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
        raise RunError(f"{run_dir}: can't make the run directory: {error.strerror}") from error
    raise RunError(f"{run_dir}: a thousand directories of that name are there already")


def make(run_dir: Path) -> Path:
    """Make a directory that the user has named, unless it is there.

    Raises RunError if it can't be made, or holds a run that would be overwritten, DataError if it
    holds something else.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        require_unused(run_dir)
    except OSError as error:
        raise RunError(f"{run_dir}: can't make the run directory: {error.strerror}") from error
    return run_dir


def require_unused(run_dir: Path) -> None:
    """Raise RunError if a directory holds a run, DataError if it holds anything else.

    Files that prepare a run may be there, and files of a run that was killed before it began.
    """
    if (run_dir / RECIPE).exists():
        raise RunError(
            f"{run_dir}: holds a run already; name another directory, or go on with that run: "
            f"train.resume={run_dir}"
        )
    require_own(run_dir)
    entries = sorted(path.name for path in run_dir.iterdir() if not _prepares_a_run(path))
    if not entries:
        return
    is_of_run = any(name in (*APPENDED, *REPLACED, *FOLDERS) for name in entries)
    what = (
        f"what is left of a run without its {RECIPE}" if is_of_run else "no run, and is not empty"
    )
    names = join_first(list(map(printable, entries)), MAX_ENTRIES)
    raise DataError(
        f"{run_dir}: holds {what}: {names}; name a directory that is empty or not there yet"
    )


def _prepares_a_run(path: Path) -> bool:
    if path.name in BEFORE_A_RUN or (path.name.endswith(".part") and path.name.startswith(DRAFTS)):
        return True
    if path.is_symlink() or not path.is_dir():
        return False
    return OF_HYDRA >= {file.name for file in path.iterdir()} > set()


def require_own(run_dir: Path) -> None:
    """Raise DataError if an entry that a run writes or deletes is a link or no regular file.

    The directory may be another user's. Other entries are never touched.
    """
    require_real(run_dir, (*APPENDED, *REPLACED, *PRICES, LOCK, CLAIM), APPENDED)
    require_real_trees(run_dir, FOLDERS)


@contextmanager
def lock_run(run_dir: Path, *, new: bool = False) -> Iterator[Lock]:
    """Keep every other process out of a run directory, as far as its file system has locks.

    Raises RunError if another process has it, or, for a `new` run, if a run is in it, and DataError
    if a link in it would redirect writes elsewhere.
    """
    require_real(run_dir, (LOCK,), ())
    with owned_folder(run_dir) as lock:
        if lock is None:
            raise RunError(f"{run_dir}: another process is writing this run")
        # Under the lock: two processes may have been given the directory when it was empty.
        if new:
            require_unused(run_dir)
        else:
            require_own(run_dir)
        yield lock


def is_free(run_dir: Path) -> bool:
    """Whether no process writes this run; without locks this is only known of a run that ended."""
    try:
        with owned_folder(run_dir) as lock:
            if lock is None:
                return False
            return lock.is_certain or read_status(run_dir) is not None
    except OSError:
        return False


def written_at_ns(file: Path) -> int:
    """Return when a file was written, in ns; 0 if it was removed meanwhile."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def run_of(folder: Path) -> Path | None:
    """Return the run directory of a path: itself, or the one whose checkpoints it is or is in."""
    for candidate in (folder, folder.parent, folder.parent.parent):
        if (candidate / RECIPE).is_file():
            return candidate
    return None


def read_status(run_dir: Path) -> str | None:
    """Read the status in a run's summary; None without one, or if it can't be read."""
    try:
        status = read_json(run_dir / SUMMARY)["status"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return status if isinstance(status, str) else None


Write = Callable[[], object]


class HeldWrites:
    """Writes that wait for `release`; if nothing is held, each is done at once."""

    def __init__(self, *, held: bool = False) -> None:
        self.is_held = held
        self._waiting: list[Write] = []

    def add(self, write: Write) -> None:
        """Do a write, or let it wait."""
        if self.is_held:
            self._waiting.append(write)
        else:
            write()

    def release(self) -> None:
        """Do the writes that wait, in order; later ones wait no more. Raises what they raise."""
        self.is_held = False
        waiting = self._waiting
        self._waiting = []
        for write in waiting:
            write()


@dataclass(frozen=True)
class RunFolder:
    """A run directory. A resumed run leaves it as it is until it can go on.

    So if the run is refused or its process killed before, the files are those of the run so far.
    """

    path: Path
    accepted: HeldWrites = field(default_factory=HeldWrites)
    """Writes that wait until nothing can refuse the run: its log, its provenance, its lowerings."""
    advanced: HeldWrites = field(default_factory=HeldWrites)
    """Writes that wait for the first new step, or the end of a run without one: they replace
    records of the run so far."""
    resuming: bool = False
    """Whether the run goes on in the directory of an earlier one."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that share the directory; only the first one writes."""


def open_folder(run_dir: Path, ranks: Ranks, *, resuming: bool) -> RunFolder:
    """Return the folder of a run, which holds the writes of one that is resumed."""
    accepted = HeldWrites(held=resuming)
    advanced = HeldWrites(held=resuming)
    return RunFolder(run_dir, accepted, advanced, resuming, ranks)
