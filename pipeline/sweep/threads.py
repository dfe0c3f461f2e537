"""Number of threads for a job, where a launcher runs several jobs on one machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

THREADS = "NPROC"
"""The variable that tells XLA how many processors to use."""


def limit_threads(launcher: Mapping[str, Any]) -> None:
    """Divide this machine's processors among the jobs that a launcher runs on it at once.

    Call before jax is asked for its devices. A number that the user has set is kept.
    """
    jobs = jobs_at_once(launcher)
    if jobs > 1 and THREADS not in os.environ:
        os.environ[THREADS] = str(max(1, processors() // jobs))


def jobs_at_once(launcher: Mapping[str, Any]) -> int:
    """The number of jobs that a launcher runs at once on one machine: joblib's `n_jobs`, else 1.

    As in joblib, a negative number -n leaves n - 1 processors unused.
    """
    jobs = launcher.get("n_jobs") or 1
    return jobs if jobs > 0 else max(1, processors() + 1 + jobs)


def processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0))
