"""Execution of one job of a sweep, in the process that a launcher chose.

A launcher may run several jobs on one machine, which share its threads and GPU memory.

The errors of a job aren't raised, so that the sweep continues. They are in its summary.json.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pipeline.config.compose import check_new_run
from pipeline.config.recipe import Recipe
from pipeline.core.errors import (
    RecipeError,
    RunError,
    get_exit_status,
    get_status_after,
    printable,
)
from pipeline.core.files.atomic_write import format_json, write_whole
from pipeline.core.host.cuda import make_memory_share
from pipeline.core.host.launchers import find_place
from pipeline.core.host.signals import Signals
from pipeline.core.report_errors import report_errors
from pipeline.engine.callbacks.callback import Pruner
from pipeline.stages.record.run_directory import RECIPE, SUMMARY, read_status
from pipeline.stages.run import run
from pipeline.stages.runner.context import RunOptions
from pipeline.stages.runner.open_run import convert_os_errors
from pipeline.study.sweep.directory import (
    claim_job,
    format_changed,
    is_finished,
    read_overrides,
    read_values,
    write_overrides,
)
from pipeline.study.sweep.table import update_table
from pipeline.training.parallel.devices import choose_gpus

NO_PRUNER = "optuna.pruners.NopPruner"
ESTIMATE_PRUNER = "pipeline.study.final_value.trial_pruner.EstimatePruner"
"""Classes of the pruners that a grid may name."""
ESTIMATES = "pipeline.study.final_value"
"""Package of the pruner `estimate`, which an installation may lack."""
OnChanged = Literal["refuse", "allow"]
THREADS = "NPROC"
"""Environment variable of the number of processors that XLA uses."""
ALL_AT_ONCE = "submitit_launcher.LocalLauncher"
"""Suffix of the class of a launcher that starts all its jobs at once on this machine."""
BY_PROCESSORS = "ray_launcher.RayLauncher"
"""Suffix of the class of a launcher whose number of processors limits the jobs at once."""


@dataclass(eq=False)
class Job:
    """Task function that Hydra calls for every job of a sweep. It can be pickled."""

    swept: Sequence[str]
    """Keys that the command line varies."""
    failures: Mapping[str, int]
    """Jobs that failed before this command, by `find_failures`."""
    on_changed: OnChanged
    """Whether a job whose data changed may be resumed."""

    def __call__(self, config: DictConfig) -> None:
        """Run or resume the job in the directory that Hydra created for it.

        A job that is finished, or that another process runs, is skipped. Raises KeyboardInterrupt
        if a signal to stop arrived before or after the end of the job, and RunError if its result
        can't be written, as on a full disk.
        """
        signals = Signals()
        sweep_dir = Path(HydraConfig.get().sweep.dir)
        job_dir = sweep_dir / str(HydraConfig.get().sweep.subdir)
        with claim_job(job_dir) as is_claimed:
            if not is_claimed:
                print(f"{_format_job_label(job_dir)} is run by another process", flush=True)
                return
            if is_finished(job_dir, self.failures):
                status = printable(str(read_status(job_dir)))
                print(f"{_format_job_label(job_dir)} {status} already", flush=True)
                return
            self._run_claimed(config, job_dir, signals)
        if signals.stop is not None or read_status(job_dir) == "stopped":
            raise KeyboardInterrupt
        if not (job_dir / SUMMARY).exists():
            raise RunError(f"{job_dir / SUMMARY}: couldn't be written, so the sweep ends")
        with convert_os_errors(sweep_dir):
            update_table(sweep_dir)

    def _run_claimed(self, config: DictConfig, job_dir: Path, signals: Signals) -> None:
        """Run a job that this process has claimed, after removing the summary of an earlier try."""
        hydra_config = HydraConfig.get()
        overrides = list(hydra_config.overrides.task)
        changed = read_overrides(job_dir)
        if changed is None:  # a third-party sweeper doesn't plan its jobs
            changed = read_values(overrides, self.swept)
            write_overrides(job_dir, changed)
        (job_dir / SUMMARY).unlink(missing_ok=True)
        os.environ.update(compute_shares(hydra_config.launcher))
        resumed = ", resumed" if (job_dir / RECIPE).exists() else ""
        label = _format_job_label(job_dir)
        print(f"\n{label} {printable(format_changed(changed))}{resumed}", flush=True)
        debug = bool(config.get("debug"))

        def attempt() -> int:
            recipe = train_in_one_process(check_new_run(config, overrides))
            options = RunOptions(run_dir=job_dir, changed=changed, signals=signals)
            return self.run_recipe(recipe, job_dir, hydra_config.sweeper, options)

        report_errors(partial(run_with_summary, job_dir, attempt), debug=debug)

    def run_recipe(
        self, recipe: Recipe, job_dir: Path, sweeper: Mapping[str, Any], options: RunOptions
    ) -> int:
        """Run a job, or resume the run in its directory, and return the exit status.

        `sweeper` is the job's section `hydra.sweeper`; in a study it has the number of the trial.
        Options that are the same for all jobs are added to `options`.
        """
        pruner: Pruner | None = None
        if sweeper.get("trial") is not None:
            # Imported here, since Optuna is an extra.
            from pipeline.study.sweep.study import open_pruner

            pruner = open_pruner(sweeper, job_dir.parent)
        elif (least_chance := read_least_chance(sweeper)) is not None:
            # Imported here, since few grids prune.
            from pipeline.study.final_value.grid_pruner import open_grid_pruner

            pruner = open_grid_pruner(job_dir, recipe, least_chance)
        options = replace(
            options,
            pruner=pruner,
            # Jobs are resumed with the sweep, whose command is printed at its end.
            how_to_resume=lambda *_: None,
        )
        resume = str(job_dir) if (job_dir / RECIPE).exists() else None
        changes = {"resume": resume, "resume_changed": self.on_changed}
        train = recipe.train.model_copy(update=changes)
        return run(recipe.model_copy(update={"train": train}), options).exit_status


def read_least_chance(sweeper: Mapping[str, Any]) -> float | None:
    """Return the chance below which the pruner of a grid ends a job; None without a pruner.

    Raises RecipeError for another pruner than `estimate`, for an installation without it, or a
    chance that isn't between 0 and 1.
    """
    pruner = sweeper.get("pruner") or {}
    target = str(pruner.get("_target_", NO_PRUNER))
    if target == NO_PRUNER:
        return None
    if target != ESTIMATE_PRUNER:
        problem = "must be estimate or none; others compare trials, with hydra/sweeper=optuna"
        raise RecipeError([f"hydra/sweeper/pruner = {target}: {problem}"])
    require_pruner(pruner)
    chance = pruner.get("chance")
    if isinstance(chance, bool) or not isinstance(chance, int | float) or not 0 < chance < 1:
        problem = "must be a number above 0 and below 1"
        raise RecipeError([f"hydra.sweeper.pruner.chance = {chance}: {problem}"])
    return float(chance)


def require_pruner(pruner: Mapping[str, Any]) -> None:
    """Raise RecipeError if a section is of the pruner `estimate` and this installation lacks it."""
    if pruner.get("_target_") == ESTIMATE_PRUNER and find_spec(ESTIMATES) is None:
        rule = f"needs {ESTIMATES}, which this installation lacks"
        raise RecipeError([f"hydra/sweeper/pruner = estimate: {rule}"])


def _format_job_label(job_dir: Path) -> str:
    return f"job {printable(job_dir.name):<6}"


def train_in_one_process(recipe: Recipe) -> Recipe:
    """Return a job's recipe, changed so that each process of a launcher trains by itself.

    The launcher's processes share the jobs of the sweep, and each uses the GPUs of its local rank.
    Raises RecipeError for a recipe whose processes must train together, or with a time of day at
    which training ends.
    """
    if recipe.train.until is not None:
        rule = "must be train.minutes in a sweep, which is the time of each job"
        raise RecipeError(f"train.{recipe.train.deadline}: {rule}")
    name = recipe.launch.name
    if name not in ("auto", "local", "none"):
        rule = "must be auto, local or none in a sweep: processes share its jobs"
        raise RecipeError(f"launch = {name}: {rule}")
    place = find_place(name, os.environ) if name == "auto" else None
    if place is None:
        return recipe
    if recipe.device.uses_cuda:
        num_devices = place.size * recipe.parallel.num_devices
        choose_gpus(place.find_local_devices(os.environ, num_devices))
    return recipe.model_copy(update={"launch": recipe.launch.model_copy(update={"name": "none"})})


def run_with_summary(job_dir: Path, attempt: Callable[[], int]) -> int:
    """Call `attempt`; if it raises before the job has a summary, write a summary, and raise."""
    try:
        return attempt()
    except (Exception, KeyboardInterrupt) as error:
        if not (job_dir / SUMMARY).exists():
            failure = {
                "status": get_status_after(error),
                "reason": str(error),
                "exit_status": get_exit_status(error),
            }
            with suppress(OSError):
                write_whole(job_dir / SUMMARY, format_json(failure) + "\n")
        raise


@contextmanager
def share_processors(launcher: Mapping[str, Any], jobs: int) -> Iterator[None]:
    """Divide the processors among the processes that a launcher starts in the body for `jobs` jobs.

    The processes inherit the shares in the environment, in which a share that the user has set
    isn't changed. They have no effect on this process if it uses jax already.
    """
    shares = compute_shares(launcher, jobs)
    os.environ.update(shares)
    try:
        yield
    finally:
        for name in shares:
            os.environ.pop(name, None)


def compute_shares(launcher: Mapping[str, Any], jobs: int = 1) -> dict[str, str]:
    """Return the environment variables by which jobs at once share processors and GPU memory.

    They have an effect until jax opens its devices. `launcher` is the section `hydra.launcher`. A
    share that the environment has already is left out.
    """
    at_once = count_jobs_at_once(launcher, jobs)
    shares = make_memory_share(at_once)
    if at_once > 1 and THREADS not in os.environ:
        shares[THREADS] = str(max(1, count_processors() // at_once))
    return shares


def count_jobs_at_once(launcher: Mapping[str, Any], jobs: int = 1) -> int:
    """Return how many of `jobs` jobs a launcher runs at once on one machine.

    - joblib: its `n_jobs`; a negative number -n leaves n - 1 processors unused
    - submitit on this machine: all jobs
    - Ray: what its processors allow; 1 on an existing cluster
    - others: 1
    """
    kind = str(launcher.get("_target_", ""))
    if kind.endswith(ALL_AT_ONCE):
        return max(1, jobs)
    if kind.endswith(BY_PROCESSORS):
        return min(max(1, jobs), _count_ray_slots(launcher.get("ray") or {}))
    n_jobs = launcher.get("n_jobs") or 1
    return n_jobs if n_jobs > 0 else max(1, count_processors() + 1 + n_jobs)


def _count_ray_slots(ray: Mapping[str, Any]) -> int:
    """Return the number of jobs that Ray runs at once; 1 on an existing cluster."""
    init = ray.get("init") or {}
    remote = ray.get("remote") or {}
    if init.get("address"):
        return 1
    cpus_per_job = float(remote.get("num_cpus") or 1)
    return max(1, int((init.get("num_cpus") or count_processors()) / cpus_per_job))


def count_processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))
