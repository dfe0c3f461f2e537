"""The runs below a folder: the jobs of a sweep, and the members of an ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.stages.record.run_directory import OVERRIDES, RECIPE, read_status


def find_jobs(sweep_dir: Path) -> list[Path]:
    """Return the directories of all jobs, in the order of their numbers."""
    folders = (file.parent for file in sweep_dir.glob(f"*/{OVERRIDES}"))
    return sorted(folders, key=lambda folder: (len(folder.name), folder.name))


def is_run_or_sweep(folder: Path) -> bool:
    """Return whether a folder is the directory of a run, or of a sweep with jobs."""
    return (folder / RECIPE).is_file() or bool(find_jobs(folder))


def list_members(sources: Sequence[Path]) -> list[Path]:
    """Return the runs of an ensemble: each source that is a run, and the done jobs of a sweep.

    Raises DataError for a sweep without such a job.
    """
    members = []
    for source in sources:
        # A run's folder .hydra also has a file overrides.yaml, but isn't a job.
        jobs = [] if (source / RECIPE).is_file() else find_jobs(source)
        if not jobs:
            members.append(source)
            continue
        done = [job for job in jobs if read_status(job) == "done"]
        if not done:
            raise DataError(f"{source}: no job of this sweep is done")
        members += done
    return members
