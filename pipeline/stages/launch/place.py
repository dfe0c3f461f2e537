"""This process's place among those that a launcher has started, by environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.core.errors import RecipeError

SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""Variables of a task of a Slurm step; a shell inside a job has only some of them."""
LOCAL = "PIPELINE_LOCAL"
"""Variable of a process that `launch=local` has started."""
MAX_PORT = 65_535


@dataclass(frozen=True)
class RankPlace:
    """Process `rank` of `size`, which meet at `address`; None where JAX knows by the launcher."""

    rank: int
    size: int
    address: str | None
    launcher: Literal["env", "slurm"]


def find_place(launch: str, environment: Mapping[str, str]) -> RankPlace | None:
    """Find the place by the variables of the recipe's launcher; None for a process alone.

    Raises RecipeError where variables are missing or make no sense.
    """
    if launch == "none" or (launch == "local" and LOCAL not in environment):
        return None
    if launch == "slurm" or (launch == "auto" and all(name in environment for name in SLURM)):
        missing = [name for name in SLURM if name not in environment]
        if missing:
            raise RecipeError(
                [f"launch = slurm: {', '.join(missing)} not set; start with srun, or launch=none"]
            )
        rank, size = (_number(environment, f"SLURM_{name}") for name in ("PROCID", "NTASKS"))
        place = RankPlace(rank, size, None, "slurm")
    elif launch in ("env", "local") or "WORLD_SIZE" in environment or "RANK_SIZE" in environment:
        place = _by_rank_and_size(environment, launch)
    else:
        return None
    if not 0 <= place.rank < place.size:
        raise RecipeError(
            [f"launch = {launch}: rank {place.rank} of {place.size} processes; must be below it"]
        )
    return place if place.size > 1 else None


def _by_rank_and_size(environment: Mapping[str, str], launch: str) -> RankPlace:
    """Read RANK and WORLD_SIZE, as torchrun sets them, or RANK_ID and RANK_SIZE (X-06)."""
    rank, size = ("RANK", "WORLD_SIZE") if "WORLD_SIZE" in environment else ("RANK_ID", "RANK_SIZE")
    missing = [name for name in (rank, size) if name not in environment]
    if missing:
        raise RecipeError(
            [
                f"launch = {launch}: {' and '.join(missing)} not set; give RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT"
            ]
        )
    number, count = _number(environment, rank), _number(environment, size)
    if count == 1:
        return RankPlace(number, count, None, "env")
    lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if lacking:
        raise RecipeError(
            [f"launch = {launch}: {size}={count}, and {' and '.join(lacking)} not set"]
        )
    port = _number(environment, "MASTER_PORT")
    if not 0 < port <= MAX_PORT:
        raise RecipeError([f"MASTER_PORT = {port}: must be from 1 to {MAX_PORT:,}"])
    return RankPlace(number, count, f"{environment['MASTER_ADDR']}:{port}", "env")


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise RecipeError([f"{name} = {environment[name]}: must be a whole number"]) from None
