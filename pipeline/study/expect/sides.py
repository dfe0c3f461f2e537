"""Sides of a test: this checkout, and a commit of it in a folder of its own. A side has learnt if
its loss fell and it answers better than a constant."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.config.overrides import quote_value
from pipeline.config.recipe import Recipe
from pipeline.core.errors import UsageError, first_line
from pipeline.core.files.atomic_write import try_hold_folder
from pipeline.core.files.paths import PACKAGE
from pipeline.engine.monitors.log_lines import METRICS, finite_number, read_lines
from pipeline.stages.data import read_selected
from pipeline.stages.record.member_runs import find_jobs
from pipeline.stages.record.run_directory import read_outcome
from pipeline.study.expect.expectations import MAX_STEP
from pipeline.study.sweep.directory import read_overrides

MIN_STEPS = 20
"""Fewest steps whose losses can tell a fall from noise."""
STANDARD_ERRORS = 3
"""Least distance of an accuracy from the most frequent class's."""


def judge_learning(run_dir: Path, recipe: Recipe) -> tuple[bool | None, str]:
    """Return whether a run has learnt and why; None if that can't be decided.

    A loss that falls isn't enough: a network that learns the share of each class alone lowers it.
    Raises DataError if the log or the data can't be read.
    """
    losses = list(read_series(run_dir, "loss", MAX_STEP).values())
    if len(losses) < MIN_STEPS:
        return None, f"{len(losses)} steps are too few to tell; must be {MIN_STEPS}"
    count = len(losses) // 10
    first, last = np.mean(losses[:count]), np.mean(losses[-count:])
    fall = f"loss {first:.4g} in the first tenth, {last:.4g} in the last"
    if not last < first:
        return False, fall
    accuracy = read_figure(run_dir, "accuracy", None)
    samples = read_figure(run_dir, "count", None)
    if accuracy is not None and samples:
        share = _find_largest_share(recipe)
        if share is not None:
            least = share + STANDARD_ERRORS * math.sqrt(share * (1 - share) / samples)
            text = f"accuracy {accuracy:.4f}, the most frequent class alone {share:.4f}"
            return accuracy > least, f"{fall}; {text}"
    r2 = read_figure(run_dir, "r2", None)
    if r2 is not None:
        return r2 > 0, f"{fall}; r2 {r2:.4f}, a constant 0"
    return True, fall


def _find_largest_share(recipe: Recipe) -> float | None:
    """Return the share of the most frequent class in the evaluation split; None without classes."""
    labels = read_selected(recipe).eval.columns.get("label")
    if labels is None or not isinstance(labels, np.ndarray) or labels.ndim != 1:
        return None
    if not np.issubdtype(labels.dtype, np.integer):
        return None
    counts = np.unique(labels, return_counts=True)[1]
    return float(counts.max() / counts.sum())


QUIET = ("monitor.tensorboard=false", "monitor.sample_images=0", "train.resume=null")
"""Keys of all runs of a test, which change no figure."""
SHORT_STAGES = "stages=[data,build,compile,train,checkpoint]"
"""Stages of a run that ends early. Rollbacks need its checkpoints."""
SCRATCH = "pipeline-test-"
"""Beginning of the names of temporary folders with the checkout of a commit."""
CHECKOUT = "commit"
GIT_S = 120.0
"""Time limit of git in seconds."""
Series = dict[int, float]
"""A figure by step."""


class SideError(Exception):
    """A run of a side has failed; `is_refused` is whether its recipe or data are wrong."""

    def __init__(self, message: str, *, is_refused: bool) -> None:
        super().__init__(message)
        self.is_refused = is_refused


@dataclass(frozen=True)
class CodeSide:
    """Code and recipes of a side."""

    label: str
    folder: Path
    """The working folder, in which recipes are found."""
    package_parent: Path
    """The folder that has the package."""

    def train(self, name: str, keys: Sequence[str], run_dir: Path) -> None:
        """Train a recipe. Raises SideError if the run fails."""
        self._run([f"+recipe={name}", *keys, _set_folder("hydra.run.dir", run_dir)], name)

    def train_seeds(
        self, name: str, keys: Sequence[str], seeds: Sequence[int], folder: Path
    ) -> dict[int, Path]:
        """Train a recipe with several seeds by one process; return the runs by seed.

        Raises SideError if a run fails.
        """
        # With one seed there would be no sweep.
        values = ",".join(map(str, seeds))
        sweep = ["-m", f"+recipe={name}", *keys, f"seed={values}"]
        self._run([*sweep, _set_folder("hydra.sweep.dir", folder)], name)
        runs: dict[int, Path] = {}
        for job_dir in find_jobs(folder):
            seed = (read_overrides(job_dir) or {}).get("seed")
            if isinstance(seed, int):
                runs[seed] = job_dir
        return runs

    def _run(self, words: Sequence[str], name: str) -> None:
        paths = [str(self.package_parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        # -P: modules of the working folder must not be imported, such as another checkout.
        result = subprocess.run(
            [sys.executable, "-P", "-m", "pipeline", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
        )
        if result.returncode:
            lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
            problem = "; ".join(lines[:3]) or "without a message"
            raise SideError(
                f"{name} ended with status {result.returncode} in {self.label}: {problem}",
                is_refused=result.returncode == 2,
            )


def _set_folder(key: str, folder: Path) -> str:
    return f"{key}={quote_value(str(folder.absolute()))}"


def make_here() -> CodeSide:
    """Return the side of this code and the working folder."""
    return CodeSide("this checkout", Path.cwd(), PACKAGE.parent)


@contextmanager
def open_commit(ref: str) -> Iterator[CodeSide]:
    """Check out a commit of the working folder's repository during the block.

    If the repository has the package, its code is that of the commit, else this code. Raises
    UsageError if the folder isn't in a repository or `ref` isn't a commit.
    """
    root = Path(_run_git(Path.cwd(), ref, "rev-parse", "--show-toplevel"))
    commit = _run_git(root, ref, "rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}")
    _remove_stale_checkouts(root, ref)
    with tempfile.TemporaryDirectory(prefix=SCRATCH) as scratch, try_hold_folder(Path(scratch)):
        folder = Path(scratch) / CHECKOUT
        _run_git(root, ref, "worktree", "add", "--detach", str(folder), commit)
        try:
            has_package = (folder / "pipeline" / "__main__.py").is_file()
            parent = folder if has_package else PACKAGE.parent
            working_folder = folder / Path.cwd().resolve().relative_to(root.resolve())
            if not working_folder.is_dir():
                raise UsageError([f"--against {ref}"], "that commit lacks the working folder")
            yield CodeSide(f"{ref} ({commit[:10]})", working_folder, parent)
        finally:
            _run_git(root, ref, "worktree", "remove", "--force", str(folder))


def _remove_stale_checkouts(root: Path, ref: str) -> None:
    """Remove the checkouts of killed processes, which don't hold the lock on their folder."""
    for line in _run_git(root, ref, "worktree", "list", "--porcelain").splitlines():
        folder = Path(line.removeprefix("worktree "))
        scratch = folder.parent
        is_temporary = scratch.parent == Path(tempfile.gettempdir()).resolve()
        if folder.name != CHECKOUT or not scratch.name.startswith(SCRATCH) or not is_temporary:
            continue
        with suppress(OSError, UsageError), try_hold_folder(scratch) as is_free:
            if is_free:
                _run_git(root, ref, "worktree", "remove", "--force", str(folder))
                scratch.rmdir()


def _run_git(folder: Path, ref: str, *words: str) -> str:
    """Return what git prints. Raises UsageError if it fails."""
    try:
        result = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=GIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", None)
        reason = first_line(error) if not isinstance(stderr, str) else stderr.strip()
        rule = f"must be a run or a commit of the folder's repository: {reason.splitlines()[0]}"
        raise UsageError([f"--against {ref}"], rule) from error
    return result.stdout.strip()


def make_keys(steps: int | None) -> tuple[str, ...]:
    """Return the keys of a run that ends after `steps`; None: at its end."""
    if steps is None:
        return QUIET
    return (*QUIET, f"train.end_step={steps}", SHORT_STAGES)


def read_series(run_dir: Path, name: str, last: int) -> Series:
    """Return a figure of each step up to the step `last`. Raises DataError for a damaged log."""
    series: Series = {}
    log = run_dir / METRICS
    for line in read_lines(log) if log.exists() else ():
        if line.step > last:
            break
        value = line.numbers().get(name)
        if value is not None:
            series[line.step] = value
    return series


def read_figure(run_dir: Path, name: str, step: int | None) -> float | None:
    """Return a figure of a step, or of the summary; None if the run lacks it or it isn't finite.

    Raises DataError for a damaged log.
    """
    if step is not None:
        return read_series(run_dir, name, step).get(step)
    outcome = read_outcome(run_dir)
    sections = [outcome.get("metrics"), outcome.get("time")]
    figures = [section.get(name) for section in sections if isinstance(section, dict)]
    return next((value for value in map(finite_number, figures) if value is not None), None)
