"""The part of a recipe that starts several processes, and ends them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from pipeline.core.registry import Spec

DEFAULT_PROCESSES = 2
"""Processes that `local` starts where the recipe does not say."""
Timeout = Annotated[float, Field(gt=0, le=24 * 3600)]
"""A time in seconds, at most a day."""


class LaunchSpec(Spec):
    """Processes of one run: who starts them, and how long they wait for each other.

    `local` starts `processes` on this machine. `slurm` and `env` take the place that a launcher
    gave this process: Slurm's variables, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. `auto`
    takes what it finds, `none` nothing.
    """

    name: Literal["auto", "local", "slurm", "env", "none"]
    processes: PositiveInt | None
    """Processes that `local` starts; null: 2."""
    start_seconds: Timeout
    """How long processes wait for each other to start."""
    heartbeat_seconds: Timeout
    """After how long without a sign of life a process counts as gone."""
    stuck_seconds: Timeout
    """How long processes wait for one that lives but does not answer."""
    end_seconds: Timeout
    """How long the other processes may take to end once the first of them has."""
