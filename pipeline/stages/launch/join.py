"""Joining the other processes of a run, and leaving them."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Timer
from typing import Any, Literal

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError, RunError, exit_status_of, first_line
from pipeline.stages.record.summary import list_shared_facts
from pipeline.training.parallel.parallel_spec import LaunchSpec
from pipeline.training.parallel.ranks import PeerGoneError, Ranks, is_of_a_peer

SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""Variables of a task of a Slurm step; a shell inside a job has only some of them."""
LOCAL = "PIPELINE_LOCAL"
"""Variable of a process that `launch=local` has started."""
MAX_PORT = 65_535


@dataclass(frozen=True)
class RankPlace:
    """Process `rank` of the `size` processes of a run."""

    rank: int
    size: int
    address: str | None
    """Where the processes meet; None if JAX asks the launcher."""
    launcher: Literal["env", "slurm"]


def find_place(launch: str, environment: Mapping[str, str]) -> RankPlace | None:
    """Find the place by the variables of the recipe's launcher; None for a process alone.

    Raises RecipeError if variables are missing or make no sense.
    """
    if launch == "none" or (launch == "local" and LOCAL not in environment):
        return None
    if launch == "slurm" or (launch == "auto" and all(name in environment for name in SLURM)):
        missing = [name for name in SLURM if name not in environment]
        if missing:
            raise RecipeError(
                f"launch = slurm: {', '.join(missing)} not set; start with srun, or launch=none"
            )
        rank, size = (_read_number(environment, f"SLURM_{name}") for name in ("PROCID", "NTASKS"))
        place = RankPlace(rank, size, None, "slurm")
    elif launch in ("env", "local") or "WORLD_SIZE" in environment or "RANK_SIZE" in environment:
        place = _read_rank_and_size(environment, launch)
    else:
        return None
    if not 0 <= place.rank < place.size:
        raise RecipeError(
            f"launch = {launch}: rank {place.rank} of {place.size} processes; must be below it"
        )
    return place if place.size > 1 else None


def _read_rank_and_size(environment: Mapping[str, str], launch: str) -> RankPlace:
    """Read RANK and WORLD_SIZE, as torchrun sets them, or RANK_ID and RANK_SIZE."""
    rank, size = ("RANK", "WORLD_SIZE") if "WORLD_SIZE" in environment else ("RANK_ID", "RANK_SIZE")
    missing = [name for name in (rank, size) if name not in environment]
    if missing:
        raise RecipeError(
            f"launch = {launch}: {' and '.join(missing)} not set; give RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT"
        )
    place = RankPlace(_read_number(environment, rank), _read_number(environment, size), None, "env")
    if place.size == 1:
        return place
    lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if lacking:
        raise RecipeError(
            f"launch = {launch}: {size}={place.size}, and {' and '.join(lacking)} not set"
        )
    port = _read_number(environment, "MASTER_PORT")
    if not 0 < port <= MAX_PORT:
        raise RecipeError(f"MASTER_PORT = {port}: must be from 1 to {MAX_PORT:,}")
    return replace(place, address=f"{environment['MASTER_ADDR']}:{port}")


def _read_number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise RecipeError(f"{name} = {environment[name]}: must be a whole number") from None


PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy")
"""Variables that lead the processes' messages to each other astray."""


@contextmanager
def join_processes(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Ranks]:
    """Take part in a run of several processes, if `environment` has the variables of a launcher.

    All processes must have the same recipe and versions. An error of one ends all: it leaves at
    once, and the others, waiting for it in a step, raise PeerGoneError. Raises RecipeError for
    variables that make no sense, RunError if the processes don't meet in time.
    """
    launch = recipe.launch
    place = None
    if launch.name != "auto" or recipe.parallel.mode != "none":
        place = find_place(launch.name, environment)
    if place is None:
        yield Ranks()
        return
    ranks = _meet(place, launch)
    try:
        ranks.require_same(list_shared_facts(recipe))
        yield ranks
    except BaseException as error:
        if is_of_a_peer(error):
            gone = PeerGoneError(
                f"process {ranks.own} of {ranks.size}: another one has gone ({first_line(error)})"
            )
            _leave_at_exit(gone)
            raise gone from error
        _leave_at_exit(error)
        raise
    import jax

    # The others wait here for what the first one still has to write: JAX aborts who is late.
    ranks.agree(lambda: None)
    jax.distributed.shutdown()


def _meet(place: RankPlace, launch: LaunchSpec) -> Ranks:
    """Connect to the other processes."""
    proxies = {name: os.environ.pop(name) for name in PROXIES if name in os.environ}
    flag = f"--xla_cpu_collective_timeout_seconds={round(launch.stuck_seconds)}"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    import jax

    from pipeline.core.host.jax_private import coordination_client

    settings: dict[str, Any] = {"cluster_detection_method": place.launcher}
    if place.address is not None:
        settings = {
            "coordinator_address": place.address,
            "num_processes": place.size,
            "process_id": place.rank,
            "cluster_detection_method": "deactivate",
        }
        if place.rank == 0:
            settings["coordinator_bind_address"] = place.address
    limit = Timer(launch.start_seconds, _give_up, (place, launch.start_seconds))
    limit.daemon = True
    limit.start()
    try:
        jax.distributed.initialize(
            **settings,
            # JAX aborts the process at its own limit.
            initialization_timeout=round(launch.start_seconds) + 60,
            heartbeat_timeout_seconds=round(launch.heartbeat_seconds),
            shutdown_timeout_seconds=round(launch.end_seconds),
        )
    except Exception as error:  # of jaxlib, which raises its own types and does not export them
        problem = RunError(
            f"{_name_process(place)}: can't meet the others: {first_line(error)[:300]}"
        )
        _leave_at_exit(problem)
        raise problem from error
    finally:
        limit.cancel()
        os.environ.update(proxies)
    return Ranks(place.rank, place.size, launch.stuck_seconds, coordination_client())


def _give_up(place: RankPlace, limit_s: float) -> None:
    """End the process, which waits for others in C++, where no exception reaches it."""
    address = place.address or "the address that Slurm gives"
    print(
        f"error: {_name_process(place)}: did not meet the others at {address} in {limit_s:g} s; "
        "each of them must be started, with a different rank",
        file=sys.stderr,
        flush=True,
    )
    os._exit(RunError.exit_status)


def _name_process(place: RankPlace) -> str:
    return f"process {place.rank} of {place.size}"


def _leave_at_exit(error: BaseException) -> None:
    """Leave without waiting for the others when Python exits, which JAX otherwise does."""
    status = exit_status_of(error)

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    # Run before those that were registered earlier, as JAX's is.
    atexit.register(leave)
