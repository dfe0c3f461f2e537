"""Joining the other processes of a run, and leaving them."""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Timer
from typing import Any, Literal

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError, RunError, exit_status_of, first_line
from pipeline.core.files.strict_json import json_text
from pipeline.core.plugins.loading import FLAG, loaded_plugins
from pipeline.stages.record.summary import find_version, list_versions
from pipeline.training.parallel.parallel_spec import LaunchSpec
from pipeline.training.parallel.ranks import PeerGoneError, Ranks, is_peer_error

SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""Variables of a task in a Slurm step. A shell inside a job has only some of them."""
LOCAL = "PIPELINE_LOCAL"
"""Variable of a process that `launch=local` has started."""
MAX_PORT = 65_535


@dataclass(frozen=True)
class RankPlace:
    """Process `rank` of the `size` processes of a run."""

    rank: int
    size: int
    address: str | None
    """Address at which the processes meet; None if JAX asks the launcher."""
    launcher: Literal["env", "slurm"]


def find_place(launch: str, environment: Mapping[str, str]) -> RankPlace | None:
    """Return the place of this process by the launcher's variables; None for a single process.

    Raises RecipeError if variables are missing or invalid.
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
    if place.size < 1:
        raise RecipeError(f"launch = {launch}: {place.size} processes: must be at least 1")
    if not 0 <= place.rank < place.size:
        raise RecipeError(
            f"launch = {launch}: rank = {place.rank}: must be from 0 to {place.size - 1}"
        )
    return place if place.size > 1 else None


def _read_rank_and_size(environment: Mapping[str, str], launch: str) -> RankPlace:
    """Read RANK and WORLD_SIZE (torchrun's variables), or RANK_ID and RANK_SIZE."""
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
"""Variables that would send the messages between processes to a proxy."""


@contextmanager
def join_processes(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Ranks]:
    """Join the processes of a run, if `environment` has the variables of a launcher.

    All processes must have the same recipe and versions. An error of one process ends all: that
    process ends at once, and the others, which wait for it in a step, raise PeerGoneError. Raises
    RecipeError for invalid variables, RunError if the processes don't meet in time.
    """
    launch = recipe.launch
    place = None
    if launch.name != "auto" or recipe.parallel.mode != "none":
        place = find_place(launch.name, environment)
    if place is None:
        yield Ranks()
        return
    _meet(place, launch)
    from pipeline.core.host.jax_private import coordination_client

    ranks = Ranks(place.rank, place.size, launch.stuck_seconds, coordination_client())
    try:
        facts = list_shared_facts(recipe)
        ranks.require_same(facts)
        yield ranks
    except BaseException as error:
        if is_peer_error(error):
            gone = PeerGoneError(
                f"process {ranks.rank} of {ranks.size}: another process has ended "
                f"({first_line(error)})"
            )
            _leave_at_exit(gone)
            raise gone from error
        _leave_at_exit(error)
        raise
    import jax

    # The others wait for the first process to finish writing, since JAX aborts late processes.
    ranks.agree(lambda: None)
    jax.distributed.shutdown()


def list_shared_facts(recipe: Recipe) -> dict[str, str]:
    """Return the recipe, plug-ins and versions that all processes of a run must share, by name."""
    tree = recipe.model_dump(mode="json", exclude={"launch", "debug"})
    digest = hashlib.sha256(json_text(tree).encode()).hexdigest()[:16]
    plugins = {f"{FLAG} {plugin.name}": json_text(plugin.describe()) for plugin in loaded_plugins()}
    libraries = list_versions({name: find_version(name) for name in ("jax", "jaxlib")})
    return {"recipe": digest, **plugins, **libraries}


def _meet(place: RankPlace, launch: LaunchSpec) -> None:
    """Connect to the other processes. Raises RunError if that fails."""
    proxies = {name: os.environ.pop(name) for name in PROXIES if name in os.environ}
    flag = f"--xla_cpu_collective_timeout_seconds={round(launch.stuck_seconds)}"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    import jax

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
            # At its own limit JAX would abort the process, so `_give_up` comes first.
            initialization_timeout=round(launch.start_seconds) + 60,
            heartbeat_timeout_seconds=round(launch.heartbeat_seconds),
            shutdown_timeout_seconds=round(launch.end_seconds),
        )
    except Exception as error:  # jaxlib doesn't export the types of its errors
        problem = RunError(
            f"{_name_process(place)}: can't meet the others: {first_line(error)[:300]}"
        )
        _leave_at_exit(problem)
        raise problem from error
    finally:
        limit.cancel()
        os.environ.update(proxies)


def _give_up(place: RankPlace, limit_s: float) -> None:
    """End the process, which waits for others in C++ and can't get an exception."""
    address = place.address or "Slurm's address"
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
    """Let the process end without JAX's wait for the others when Python exits."""
    status = exit_status_of(error)

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    # It runs before functions that were registered earlier, such as JAX's.
    atexit.register(leave)
