"""The place of a process among the processes of a run, from the variables that launchers set."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

from pipeline.core.errors import RecipeError, RunError

LaunchName = Literal["env", "jax", "mpi", "skypilot", "slurm"]
MAX_PORT = 65_535
DEFAULT_PORT = 29_500
"""Port for launchers that name a host alone; torchrun and Kubeflow use it too."""
NUM_PORTS = 4_096
"""Number of ports, the highest ones, from which the port of a job is chosen."""
MACHINE_START_S = 60.0
"""Seconds in which processes of one machine must meet."""
CLUSTER_START_S = 1_800.0
"""Seconds in which processes of a cluster must meet, after pulling images and waiting for nodes."""

Environment = Mapping[str, str]


@dataclass(frozen=True)
class RankPlace:
    """Process `rank` of the `size` processes of a run."""

    rank: int
    size: int
    address: str
    """Host and port of the first process."""
    launcher: str
    """The launcher's name, for messages."""
    local_rank: int | None = None
    """Number of the process on its machine; None if the launcher doesn't set it."""

    @property
    def host(self) -> str:
        """The name or address of the first process's machine."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port at which the processes meet."""
        return int(self.address.rpartition(":")[2])

    @property
    def is_on_one_machine(self) -> bool:
        """Whether the address is reached from this machine only."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def start_s(self) -> float:
        """Seconds in which the processes should meet."""
        return MACHINE_START_S if self.is_on_one_machine else CLUSTER_START_S

    def find_local_devices(self, environment: Environment, num_devices: int) -> list[int] | None:
        """Return the numbers of this process's GPUs; None if it uses all visible GPUs.

        `num_devices` are the devices of all processes. Slurm shows a task its GPUs alone with
        `--gpus-per-task`.
        """
        if self.local_rank is None:
            return None
        count = max(num_devices // self.size, 1)
        numbers = list(range(self.local_rank * count, (self.local_rank + 1) * count))
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return numbers
        # An empty text hides all GPUs.
        num_visible = len(visible.split(",")) if visible else 0
        return numbers if numbers[-1] < num_visible else None

    def __str__(self) -> str:
        return f"process {self.rank} of {self.size}"


@dataclass(frozen=True)
class Launcher:
    """A kind of launcher, and the names of its variables."""

    title: str
    name: LaunchName
    """Value of `launch` that reads only these variables."""
    rank: tuple[str, ...]
    """Variables of the rank. The first one that is set is read."""
    size: str
    local_rank: str
    find_address: Callable[[Environment], str]
    """Returns host and port of the first process. Raises KeyError for a variable that isn't set,
    ValueError with the problem."""
    marks: tuple[str, ...] = ()
    """Further variables without which the process wasn't started by this launcher."""

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables of a process's place."""
        return (*self.rank, self.size, self.local_rank)

    def has_started(self, environment: Environment) -> bool:
        """Return whether this launcher has set its variables."""
        return self.size in environment and all(name in environment for name in self.marks)

    def read_rank(self, environment: Environment) -> tuple[int, int]:
        """Return rank and size. Raises RecipeError if a variable is missing or invalid; only a
        single process may lack its rank."""
        rank_name = next((name for name in self.rank if name in environment), self.rank[0])
        required = (rank_name, self.size, *self.marks)
        missing = [name for name in required if name not in environment]
        if missing == [rank_name] and environment[self.size] == "1":
            return 0, 1
        if missing:
            # The variable that was found, which the recipe doesn't have, shows the launcher.
            seen = next((name for name in self.variables if name in environment), None)
            setting = f"launch = {self.name}" if seen is None else f"{seen} = {environment[seen]}"
            raise RecipeError(f"{setting}: {' and '.join(missing)} not set")
        rank = _read_number(environment, rank_name)
        size = _read_number(environment, self.size)
        if size < 1:
            raise RecipeError(f"{self.size} = {size}: must be at least 1")
        if not 0 <= rank < size:
            raise RecipeError(f"{rank_name} = {rank}: must be from 0 to {size - 1}")
        return rank, size

    def read_place(self, environment: Environment) -> RankPlace:
        """Return the place of this process among several. Raises RecipeError."""
        rank, size = self.read_rank(environment)
        try:
            address = self.find_address(environment)
        except KeyError as missing:
            raise RecipeError(
                f"{self.size} = {size}: {missing.args[0]} not set, which the address of the first "
                "process needs"
            ) from None
        except ValueError as problem:
            raise RecipeError(str(problem)) from None
        local_rank = None
        if self.local_rank in environment:
            local_rank = _read_number(environment, self.local_rank)
        return RankPlace(rank, size, address, self.title, local_rank)


def _read_number(environment: Environment, name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise RecipeError(f"{name} = {environment[name]}: must be a whole number") from None


def _read_port(environment: Environment, default: int | None = None) -> int:
    """Return MASTER_PORT, or `default` if it isn't set. Raises KeyError if both are missing, and
    ValueError if the text isn't a port."""
    if "MASTER_PORT" not in environment and default is not None:
        return default
    text = environment["MASTER_PORT"]
    if not text.isdecimal() or not 0 < int(text) <= MAX_PORT:
        raise ValueError(f"MASTER_PORT = {text}: must be from 1 to {MAX_PORT:,}")
    return int(text)


def _find_master(environment: Environment) -> str:
    """Return MASTER_ADDR and MASTER_PORT as HOST:PORT. Raises KeyError if one is missing."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise KeyError(" and ".join(missing))
    return _join_address(environment["MASTER_ADDR"], _read_port(environment))


def _join_address(host: str, port: int) -> str:
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _find_coordinator(environment: Environment) -> str:
    """Return the host and port that Kubeflow's runtime `jax-distributed` sets."""
    address = environment["JAX_COORDINATOR_ADDRESS"]
    match = re.fullmatch(r"(.+):(\d+)", address)
    if match is None or not 0 < int(match[2]) <= MAX_PORT:
        raise ValueError(f"JAX_COORDINATOR_ADDRESS = {address}: must be HOST:PORT")
    return _join_address(match[1], int(match[2]))


def _find_mpi_host(environment: Environment) -> str:
    """Return MASTER_ADDR and MASTER_PORT, or else this machine if it has all processes.

    The machine of mpirun isn't used, since it may not have the first process.
    """
    if "MASTER_ADDR" in environment:
        return _find_master(environment)
    if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") != environment["OMPI_COMM_WORLD_SIZE"]:
        raise KeyError("MASTER_ADDR and MASTER_PORT (mpirun -x MASTER_ADDR=... -x MASTER_PORT=...)")
    # Jobs on one machine have different names, so they have different ports.
    job_name = environment.get("PMIX_NAMESPACE", "")
    return f"127.0.0.1:{_choose_port(crc32(job_name.encode()))}"


def _find_first_node(environment: Environment) -> str:
    """Return the address of SkyPilot's first node, and MASTER_PORT or the default port."""
    host = environment["SKYPILOT_NODE_IPS"].split()[0]
    return _join_address(host, _read_port(environment, DEFAULT_PORT))


def _find_slurm_node(environment: Environment) -> str:
    """Return the first node of a list such as `node[001,007-015],host2`, and the job's port."""
    nodes = environment["SLURM_STEP_NODELIST"]
    prefix, _, ranges = re.split(r",(?![^\[]*\])", nodes)[0].partition("[")
    number = re.split(r"[-,\]]", ranges)[0]
    job = environment["SLURM_JOB_ID"]
    if not job.isdecimal():
        raise ValueError(f"SLURM_JOB_ID = {job}: must be a whole number")
    return f"{prefix}{number}:{_choose_port(int(job))}"


def _choose_port(number: int) -> int:
    """Return the port for the number of a job: one of the highest `NUM_PORTS`."""
    return MAX_PORT + 1 - NUM_PORTS + number % NUM_PORTS


LAUNCHERS = (
    Launcher(
        title="torchrun",
        name="env",
        rank=("RANK", "JOB_COMPLETION_INDEX"),
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        find_address=_find_master,
    ),
    Launcher(
        title="MindSpore's launcher",
        name="env",
        rank=("RANK_ID",),
        size="RANK_SIZE",
        local_rank="DEVICE_ID",
        find_address=_find_master,
    ),
    Launcher(
        title="Kubeflow or Kubernetes",
        name="jax",
        rank=("JAX_PROCESS_ID", "JOB_COMPLETION_INDEX"),
        size="JAX_NUM_PROCESSES",
        local_rank="LOCAL_RANK",
        find_address=_find_coordinator,
    ),
    Launcher(
        title="Open MPI",
        name="mpi",
        rank=("OMPI_COMM_WORLD_RANK",),
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        find_address=_find_mpi_host,
    ),
    Launcher(
        title="SkyPilot",
        name="skypilot",
        rank=("SKYPILOT_NODE_RANK",),
        size="SKYPILOT_NUM_NODES",
        local_rank="LOCAL_RANK",
        find_address=_find_first_node,
    ),
    Launcher(
        title="Slurm",
        name="slurm",
        rank=("SLURM_PROCID",),
        size="SLURM_NTASKS",
        local_rank="SLURM_LOCALID",
        find_address=_find_slurm_node,
        # A shell inside a job has only some of them.
        marks=("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_LOCALID"),
    ),
)
"""All launchers. If several have set their variables, the first one gives the address."""


def find_place(launch: str, environment: Environment) -> RankPlace | None:
    """Return the place of this process by a launcher's variables; None for a single process.

    `launch` is "auto" or a launcher's name. Raises RecipeError if its variables are missing or
    invalid, or if two launchers have set different places.
    """
    named = [launcher for launcher in LAUNCHERS if launch in ("auto", launcher.name)]
    started = [launcher for launcher in named if launcher.has_started(environment)]
    if not started and launch != "auto":
        # Reading it raises with its missing variables.
        begun = [launcher for launcher in named if environment.keys() & set(launcher.variables)]
        started = (begun or named)[:1]
    launchers = [launcher for launcher in started if launcher.read_rank(environment)[1] > 1]
    if not launchers:
        _require_size(environment)
        return _find_ray_worker()
    _require_one_place(launch, launchers, environment)
    return launchers[0].read_place(environment)


def get_rank() -> int:
    """Return the rank of this process in a run; 0 for a single process.

    All processes of the run must call it. Raises RecipeError for invalid variables of a launcher.
    """
    return _read_group()[0]


def get_group_size() -> int:
    """Return the number of processes of a run; 1 for a single process. All must call it."""
    return _read_group()[1]


_groups: list[tuple[int, int]] = []
"""Rank and number of processes of each run that is open in this process, the newest last. Threads
that read samples ask too, so this isn't a context variable."""


@contextmanager
def record_group(rank: int, size: int) -> Iterator[None]:
    """Let `get_rank` and `get_group_size` return a run's in the body, whatever a launcher has set:
    a run with launch=none has one process."""
    _groups.append((rank, size))
    try:
        yield
    finally:
        _groups.remove((rank, size))


def _read_group() -> tuple[int, int]:
    if _groups:
        return _groups[-1]
    if "jax" in sys.modules:
        from pipeline.core.host.jax_private import read_joined_process

        joined = read_joined_process()
        if joined is not None:
            return joined
    place = find_place("auto", os.environ)
    return (0, 1) if place is None else (place.rank, place.size)


def require_one_process(environment: Environment) -> None:
    """Raise RunError if a launcher has started this process among others."""
    place = find_place("auto", environment)
    if place is not None:
        raise RunError(
            f"{place.launcher} has started {place.size} processes, and each would train a copy; "
            "train in one, or remove the launcher's variables from os.environ"
        )


def _require_one_place(
    launch: str, launchers: Sequence[Launcher], environment: Environment
) -> None:
    places = {launcher.title: launcher.read_rank(environment) for launcher in launchers}
    if len(set(places.values())) > 1:
        seen = ", ".join(f"{rank} of {size} ({title})" for title, (rank, size) in places.items())
        names = list(dict.fromkeys(f"launch={launcher.name}" for launcher in launchers))
        advice = f"set {' or '.join(names)}" if len(names) > 1 else "unset the variables of one"
        raise RecipeError(f"launch = {launch}: the process has several ranks: {seen}; {advice}")


def _find_ray_worker() -> RankPlace | None:
    """Return the place of a worker of Ray Train, which sets no variables on CPUs.

    All workers must call this, since the first one broadcasts its address to the others.
    """
    train = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        context = train.get_context()
    except RuntimeError:  # not in a worker
        return None
    size = context.get_world_size()
    if size < 2:
        return None
    from ray.train.collective import broadcast_from_rank_zero
    from ray.util import get_node_ip_address

    with socket.socket() as probe:
        probe.bind(("", 0))
        address = _join_address(get_node_ip_address(), probe.getsockname()[1])
    rank = context.get_world_rank()
    return RankPlace(rank, size, broadcast_from_rank_zero(address), "Ray", context.get_local_rank())


def _require_size(environment: Environment) -> None:
    """Raise RecipeError in an indexed Job of Kubernetes, which sets no number of processes."""
    index = environment.get("JOB_COMPLETION_INDEX", "0")
    sizes = ("WORLD_SIZE", "JAX_NUM_PROCESSES")
    if index != "0" and not any(name in environment for name in sizes):
        raise RecipeError(
            f"JOB_COMPLETION_INDEX = {index}: there are other processes; set WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT, or launch=none for a run of one process"
        )
