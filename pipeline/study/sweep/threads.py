"""Threads and GPU memory of a job, if a launcher runs several jobs on one machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pipeline.core.host.cuda import make_memory_share

THREADS = "NPROC"
"""Environment variable of the number of processors that XLA uses."""
ALL_AT_ONCE = "submitit_launcher.LocalLauncher"
"""Suffix of the class of a launcher that starts all its jobs at once on this machine."""
BY_PROCESSORS = "ray_launcher.RayLauncher"
"""Suffix of the class of a launcher whose number of processors limits the jobs at once."""


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
