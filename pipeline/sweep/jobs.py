"""Running one job of a sweep, in whatever process a launcher has put it.

A job never raises, whatever becomes of it, so the sweep goes on with the next; it says what became
of it in its own summary.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pipeline.config.compose import check
from pipeline.errors import exit_status_of, printable, report_errors, status_after
from pipeline.files.atomic_write import write_whole
from pipeline.files.strict_json import json_text
from pipeline.host.signals import Signals
from pipeline.observe.monitors import Pruner
from pipeline.runner.record.run_directory import RECIPE, SUMMARY, read_status
from pipeline.sweep.directory import (
    claimed,
    is_finished,
    read_overrides,
    values_of,
    write_overrides,
)
from pipeline.sweep.table import write_table
from pipeline.sweep.threads import limit_threads

OnChanged = Literal["refuse", "allow"]


class Job:
    """What Hydra calls for every job of a sweep; a class, so that launchers can pickle it.

    `swept` are the keys that the command line varies, `failures` the jobs that had failed before,
    `on_changed` what becomes of jobs to go on with whose data are not what they were.
    """

    def __init__(
        self, swept: Sequence[str], failures: Mapping[str, int], on_changed: OnChanged = "refuse"
    ) -> None:
        self.swept, self.failures = tuple(swept), dict(failures)
        self.on_changed: OnChanged = on_changed

    def __call__(self, config: DictConfig) -> None:
        """Run the job in the directory that Hydra made for it, or go on with it.

        Nothing is done about a job that is settled or that another process is at. Raises
        KeyboardInterrupt when a signal stopped the job, or came when there was nothing left of it
        to stop: it meant the sweep.
        """
        signals = Signals()
        sweep_dir = Path(HydraConfig.get().sweep.dir)
        job_dir = sweep_dir / str(HydraConfig.get().sweep.subdir)
        with claimed(job_dir) as free:
            if not free:
                print(f"{_of_job(job_dir)} another process is at it", flush=True)
                return
            if is_finished(job_dir, self.failures):
                status = printable(str(read_status(job_dir)))
                print(f"{_of_job(job_dir)} {status} already", flush=True)
                return
            self._run_claimed(config, job_dir, signals)
        if signals.stop is not None or read_status(job_dir) == "stopped":
            raise KeyboardInterrupt
        write_table(sweep_dir)

    def _run_claimed(self, config: DictConfig, job_dir: Path, signals: Signals) -> None:
        """Run a job that this process has claimed. What became of an earlier try goes first."""
        hydra_config = HydraConfig.get()
        overrides = list(hydra_config.overrides.task)
        changed = read_overrides(job_dir)
        if changed is None:  # a sweeper of somebody else's has not planned its jobs
            changed = values_of(overrides, self.swept)
            write_overrides(job_dir, changed)
        (job_dir / SUMMARY).unlink(missing_ok=True)
        limit_threads(hydra_config.launcher)
        varied = printable(", ".join(f"{key}={value}" for key, value in changed.items()))
        resumed = ", going on" if (job_dir / RECIPE).exists() else ""
        print(f"\n{_of_job(job_dir)} {varied}{resumed}", flush=True)
        debug = bool(config.get("debug"))
        on_changed = self.on_changed
        tried = partial(_run_checked, config, overrides, job_dir, changed, signals, on_changed)
        report_errors(tried, debug=debug)


def _of_job(job_dir: Path) -> str:
    return f"job {printable(job_dir.name):<6}"


def _run_checked(
    config: DictConfig,
    overrides: list[str],
    job_dir: Path,
    changed: Mapping[str, Any],
    signals: Signals,
    on_changed: OnChanged,
) -> int:
    """Run a job. What fails before there is a run to write a summary has it written here."""
    try:
        from pipeline.runner.run import run

        recipe = check(config, overrides)
        resume = str(job_dir) if (job_dir / RECIPE).exists() else None
        changing = {"resume": resume, "resume_changed": on_changed}
        train = recipe.train.model_copy(update=changing)
        recipe = recipe.model_copy(update={"train": train})
        pruner = _pruner()
        # The command of the sweep goes on with all of its jobs, and the sweep says it.
        return run(
            recipe, job_dir, changed, pruner=pruner, signals=signals, how_to_resume=lambda *_: None
        ).exit_status
    except (Exception, KeyboardInterrupt) as error:
        if not (job_dir / SUMMARY).exists():
            failure = {
                "status": status_after(error),
                "reason": str(error),
                "exit_status": exit_status_of(error),
            }
            write_whole(job_dir / SUMMARY, json_text(failure) + "\n")
        raise


def _pruner() -> Pruner | None:
    """Who may prune this job: none but in a study."""
    hydra_config = HydraConfig.get()
    if hydra_config.sweeper.get("trial") is None:
        return None
    from pipeline.sweep.pruner import open_pruner

    return open_pruner(hydra_config.sweeper, Path(hydra_config.sweep.dir))
