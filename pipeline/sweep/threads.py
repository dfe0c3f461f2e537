"""How many threads a job may compute with, where a launcher runs several on one machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

THREADS = "NPROC"
"""The variable by which XLA is told how many processors it may use."""


def limit_threads(launcher: Mapping[str, Any]) -> None:
    """Share out this machine's processors among the jobs that a launcher runs at once on it.

    Must come before jax is asked for its devices. A number that the user has set stays.
    """
    jobs = jobs_at_once(launcher)
    if jobs > 1 and THREADS not in os.environ:
        os.environ[THREADS] = str(max(1, processors() // jobs))


def jobs_at_once(launcher: Mapping[str, Any]) -> int:
    """How many jobs a launcher runs at once on one machine: joblib's `n_jobs`, else one.

    Like joblib, a negative number leaves so many processors, but one, unused.
    """
    asked = launcher.get("n_jobs") or 1
    return asked if asked > 0 else max(1, processors() + 1 + asked)


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))
