"""Running one job of a sweep, in whatever process a launcher has put it.

A job never raises, whatever becomes of it, so the sweep goes on with the next; it says what became
of it in its own summary.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pipeline.config.compose import check, value_of
from pipeline.errors import PipelineError, report_errors
from pipeline.observe.monitors import Judge
from pipeline.observe.strict_json import json_text
from pipeline.run_directory import RECIPE, SUMMARY, read_status
from pipeline.sweep.directory import claimed, is_settled, read_overrides, write_overrides
from pipeline.sweep.table import write_table
from pipeline.sweep.threads import limit_threads
from pipeline.whole_file import write_whole


class Job:
    """What Hydra calls for every job of a sweep; a class, so that launchers can pickle it.

    `swept` are the keys that the command line varies, `failures` the jobs that had failed before.
    """

    def __init__(self, swept: Sequence[str], failures: Mapping[str, int]) -> None:
        self.swept, self.failures = tuple(swept), dict(failures)

    def __call__(self, config: DictConfig) -> None:
        """Run the job in the directory that Hydra made for it, or go on with it.

        Nothing is done about a job that is settled or that another process is at. Raises
        KeyboardInterrupt when a signal stopped the job: it meant the sweep.
        """
        sweep_dir = Path(HydraConfig.get().sweep.dir)
        job_dir = sweep_dir / str(HydraConfig.get().sweep.subdir)
        with claimed(job_dir) as free:
            if not free:
                print(f"job {job_dir.name:<6} another process is at it", flush=True)
                return
            if is_settled(job_dir, self.failures):
                print(f"job {job_dir.name:<6} {read_status(job_dir)} already", flush=True)
                return
            self._run_claimed(config, job_dir)
        write_table(sweep_dir)
        if read_status(job_dir) == "stopped":
            raise KeyboardInterrupt

    def _run_claimed(self, config: DictConfig, job_dir: Path) -> None:
        """Run a job that this process has claimed. What became of an earlier try goes first."""
        hydra_config = HydraConfig.get()
        overrides = list(hydra_config.overrides.task)
        changed = read_overrides(job_dir)
        if changed is None:  # a sweeper of somebody else's has not planned its jobs
            changed = values_of(overrides, self.swept)
            write_overrides(job_dir, changed)
        (job_dir / SUMMARY).unlink(missing_ok=True)
        limit_threads(hydra_config.launcher)
        shown = ", ".join(f"{key}={value}" for key, value in changed.items())
        resumed = ", going on" if (job_dir / RECIPE).exists() else ""
        print(f"\njob {job_dir.name:<6} {shown}{resumed}", flush=True)
        debug = bool(config.get("debug"))
        report_errors(lambda: _run_checked(config, overrides, job_dir, changed), debug=debug)


def values_of(overrides: Sequence[str], keys: Sequence[str]) -> dict[str, Any]:
    """What overrides make of keys, as YAML reads it."""
    return {key: yaml.safe_load(value_of(overrides, key) or "null") for key in keys}


def _run_checked(
    config: DictConfig, overrides: list[str], job_dir: Path, changed: Mapping[str, Any]
) -> int:
    """Run a job. What fails before there is a run to write a summary has it written here."""
    try:
        from pipeline.job import run

        recipe = check(config, overrides)
        resume = str(job_dir) if (job_dir / RECIPE).exists() else None
        train = recipe.train.model_copy(update={"resume": resume})
        recipe = recipe.model_copy(update={"train": train})
        return run(recipe, job_dir, changed, judge=_judge()).exit_status
    except (Exception, KeyboardInterrupt) as error:
        if not (job_dir / SUMMARY).exists():
            status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            exit_status = error.exit_status if isinstance(error, PipelineError) else 1
            failure = {"status": status, "reason": str(error), "exit_status": exit_status}
            write_whole(job_dir / SUMMARY, json_text(failure) + "\n")
        raise


def _judge() -> Judge | None:
    """Who may prune this job: none but in a study."""
    hydra_config = HydraConfig.get()
    if hydra_config.sweeper.get("trial") is None:
        return None
    from pipeline.sweep.judge import open_judge

    return open_judge(hydra_config.sweeper, Path(hydra_config.sweep.dir))
