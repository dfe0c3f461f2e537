"""Joining the other processes of a run, and leaving them."""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from math import ceil
from pathlib import Path
from threading import Timer

from pipeline.config.recipe import Recipe
from pipeline.core.errors import (
    RecipeError,
    RunError,
    first_line,
    get_exit_status,
    get_system_reason,
)
from pipeline.core.files.atomic_write import format_json
from pipeline.core.files.bounded_read import read_text
from pipeline.core.host.launchers import RankPlace, find_place
from pipeline.core.host.process_start import FLAGS
from pipeline.core.plugins.loading import FLAG, list_loaded_plugins
from pipeline.stages.record.summary import find_version, list_versions
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.parallel.parallel_spec import LaunchSpec
from pipeline.training.parallel.ranks import PeerGoneError, Ranks, is_peer_error

LOCAL = "PIPELINE_LOCAL"
"""Variable of a process that `launch=local` has started."""
CONNECT_S = 60
"""Seconds that JAX has to connect processes that have met."""
AGREEMENTS = count()
"""Numbers of the decisions on which processes agree, in all runs of this process together."""
PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy")
"""Variables that would send the messages between processes to a proxy."""


@contextmanager
def join_processes(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Ranks]:
    """Connect the processes of a run, if a launcher has started several; yield this one's ranks.

    All processes must have the same recipe, but for `launch` and `debug`, plug-ins and versions. If
    a process fails, the exit of its program doesn't wait for the others, which raise PeerGoneError
    when they wait for it. The processes stay connected for further runs of the program; processes
    of Ray Train are connected before. Raises RecipeError for invalid variables and for a recipe
    that trains in one process, RunError if the processes differ or don't meet in time.
    """
    if recipe.launch.name == "none":
        yield Ranks()
        return
    ranks = _find_connection(recipe)
    if ranks is None:
        name = recipe.launch.name
        place = find_place("env" if name == "local" else name, environment)
        if place is None:
            yield Ranks()
            return
        gpus = place.find_local_devices(environment, recipe.parallel.num_devices)
        _require_parallel_mode(recipe, f"{place.launcher} has started {place.size} processes")
        ranks = _connect(place, recipe.launch, gpus)
    try:
        facts = list_shared_facts(recipe)
        ranks.require_same(facts)
        yield ranks
        # All processes wait here until the first has finished writing.
        ranks.agree(lambda: None)
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


def list_shared_facts(recipe: Recipe) -> dict[str, str]:
    """Return the recipe, plug-ins and versions that all processes of a run must share, by name."""
    tree = recipe.model_dump(mode="json", exclude={"launch", "debug"})
    digest = hashlib.sha256(format_json(tree).encode()).hexdigest()[:16]
    plugins = {
        f"{FLAG} {plugin.name}": format_json(plugin.describe()) for plugin in list_loaded_plugins()
    }
    libraries = list_versions({name: find_version(name) for name in ("jax", "jaxlib")})
    return {"recipe": digest, **plugins, **libraries}


def _find_connection(recipe: Recipe) -> Ranks | None:
    """Return the connection that an earlier run or the program has made; None without one."""
    if "jax" not in sys.modules:
        return None
    from pipeline.core.host.jax_private import get_coordination_client, read_joined_process

    joined = read_joined_process()
    if joined is None:
        return None
    rank, size = joined
    _require_parallel_mode(recipe, f"jax.distributed has connected {size} processes")
    return Ranks(rank, size, recipe.launch.stuck_seconds, get_coordination_client(), AGREEMENTS)


def _require_parallel_mode(recipe: Recipe, reason: str) -> None:
    """Raise RecipeError for a recipe without a parallel mode: each process would train a copy."""
    if recipe.parallel.mode == "none":
        raise RecipeError(
            f"parallel.mode = none: must be data, since {reason}; or set launch=none, and each "
            "process trains a copy"
        )


def _connect(place: RankPlace, launch: LaunchSpec, gpus: Sequence[int] | None) -> Ranks:
    """Connect to the other processes, with `gpus` or all GPUs.

    Raises RunError if JAX refuses; after `CONNECT_S` ends this process with a message.
    """
    # Imported here, since few runs have several processes.
    from pipeline.stages.launch.meeting import meet

    meet(place, launch.start_seconds or place.start_s)
    proxies = {name: os.environ.pop(name) for name in PROXIES if name in os.environ}
    # JAX takes whole seconds. The last of equal flags counts.
    add_xla_flag(f"--xla_cpu_collective_timeout_seconds={ceil(launch.stuck_seconds)}")
    import jax
    from jax.extend.backend import clear_backends

    from pipeline.core.host.jax_private import get_coordination_client, has_open_devices

    if has_open_devices():
        clear_backends()
    # JAX would abort the process at `initialization_timeout`, without a message.
    timer = Timer(CONNECT_S, _give_up, [place])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            place.address,
            place.size,
            place.rank,
            gpus,
            cluster_detection_method="deactivate",
            # By default the first process listens at all addresses of the machine.
            coordinator_bind_address=place.address if place.is_on_one_machine else None,
            initialization_timeout=CONNECT_S + 60,
            heartbeat_timeout_seconds=ceil(launch.heartbeat_seconds),
            shutdown_timeout_seconds=ceil(launch.end_seconds),
        )
    except Exception as error:  # jaxlib doesn't export the types of its errors
        problem = RunError(f"{place}: can't connect to the others: {first_line(error)[:300]}")
        _leave_at_exit(problem)
        raise problem from error
    finally:
        timer.cancel()
        os.environ.update(proxies)
    # Another run may follow, so JAX disconnects at the exit, after waiting for the others.
    atexit.register(jax.distributed.shutdown)
    return Ranks(
        place.rank, place.size, launch.stuck_seconds, get_coordination_client(), AGREEMENTS
    )


def add_xla_flag(flag: str) -> None:
    """Add a flag for XLA to the flags of the environment, or of the file that XLA_FLAGS names.

    XLA reads a text that doesn't begin with -- as the name of a file, and aborts the process
    without one. Raises RunError if the file can't be read.
    """
    flags = os.environ.get(FLAGS, "").strip()
    if flags and not flags.startswith("--"):
        try:
            flags = read_text(Path(flags)).strip()
        except (OSError, ValueError) as error:
            reason = get_system_reason(error)
            raise RunError(f"{FLAGS} = {flags}: can't be read: {reason}") from error
    os.environ[FLAGS] = f"{flags} {flag}".strip()


def _give_up(place: RankPlace) -> None:
    """End this process, which waits for others in C++ code that no exception can interrupt."""
    print(
        f"error: {place}: can't connect to the others at {place.address} in {CONNECT_S:g} s; one "
        "of them has ended, or another program has taken the port",
        file=sys.stderr,
        flush=True,
    )
    os._exit(RunError.exit_status)


def _leave_at_exit(error: BaseException) -> None:
    """Let this process end without waiting for the others, with the exit status of `error`."""
    status = get_exit_status(error)

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    # This function runs before those that were registered earlier, such as JAX's.
    atexit.register(leave)


class JoinedProcesses(RunFeature):
    """The processes of a run, unless `launch = none`."""

    @contextmanager
    def join(self, recipe: Recipe) -> Iterator[Ranks]:
        """Connect them, if a launcher has started several."""
        with join_processes(recipe, os.environ) as ranks:
            yield ranks

    def fit(self, recipe: Recipe, processes: int) -> Recipe:
        """Return the recipe for several processes. Raises RecipeError if it doesn't fit them."""
        if processes == 1:
            return recipe
        # Imported here, since it checks the recipe again by all rules.
        from pipeline.config.checks import fit_to_processes

        return fit_to_processes(recipe, processes)
