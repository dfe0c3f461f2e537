"""A process finds its place by the variables that launchers set."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from pipeline import api
from pipeline.core.errors import RecipeError, RunError
from pipeline.core.host.launchers import (
    LAUNCHERS,
    RankPlace,
    find_place,
    record_group,
    require_one_process,
)
from tests.stages.launch.engines import ENGINES

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_NODELIST": "node[01,07-15],host2",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
KUBEFLOW = {
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "2",
    "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1785135105",
}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (TORCHRUN, RankPlace(1, 4, "node7:29500", "torchrun", 0)),
        (KUBEFLOW, RankPlace(2, 4, "job-node-0-0.job:29500", "Kubeflow or Kubernetes", None)),
        (SKYPILOT, RankPlace(1, 2, "10.0.0.4:29500", "SkyPilot", None)),
        (SLURM, RankPlace(3, 8, f"node01:{61_440 + 1234}", "Slurm", 1)),
    ],
    ids=["torchrun", "kubeflow", "skypilot", "slurm"],
)
def test_place_is_read_for_each_launcher(variables: dict[str, str], place: RankPlace) -> None:
    assert find_place("auto", variables) == place
    (name,) = {row.name for row in LAUNCHERS if row.title == place.launcher}
    assert find_place(name, variables) == place


def test_place_is_read_for_mindspore() -> None:
    """X-01, X-06: RANK_ID, RANK_SIZE and DEVICE_ID, if torchrun's names aren't set."""
    variables = {**TORCHRUN, "RANK_ID": "1", "RANK_SIZE": "4", "DEVICE_ID": "5"}
    del variables["RANK"], variables["WORLD_SIZE"]
    place = find_place("env", variables)
    assert place == RankPlace(1, 4, "node7:29500", "MindSpore's launcher", 5)


def test_rank_is_read_from_the_job_index() -> None:
    job = {**TORCHRUN, "JOB_COMPLETION_INDEX": "3"}
    del job["RANK"]
    place = find_place("auto", job)
    assert place is not None
    assert place.rank == 3


def test_jobs_of_open_mpi_on_one_machine_have_different_ports() -> None:
    places = [find_place("auto", {**OPEN_MPI, "PMIX_NAMESPACE": name}) for name in ("71", "72")]
    assert all(place is not None and place.is_on_one_machine for place in places)
    assert len({place.port for place in places if place is not None}) == 2


def test_open_mpi_on_several_machines_needs_an_address() -> None:
    with pytest.raises(RecipeError, match="mpirun -x MASTER_ADDR"):
        find_place("auto", {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    address = {"MASTER_ADDR": "a", "MASTER_PORT": "7"}
    place = find_place("auto", {**OPEN_MPI, **address, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    assert place is not None
    assert place.address == "a:7"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node1", "node1"), ("a2,b3", "a2"), ("n[1-4]", "n1"), ("n[007,9],m", "n007")],
)
def test_host_is_the_first_slurm_node(nodes: str, first: str) -> None:
    place = find_place("slurm", {**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert place is not None
    assert place.host == first


@pytest.mark.parametrize(
    ("launcher", "size"),
    [
        (TORCHRUN, "WORLD_SIZE"),
        (KUBEFLOW, "JAX_NUM_PROCESSES"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
        (SKYPILOT, "SKYPILOT_NUM_NODES"),
        (SLURM, "SLURM_NTASKS"),
    ],
    ids=["torchrun", "kubeflow", "open mpi", "skypilot", "slurm"],
)
def test_single_process_has_no_place(launcher: dict[str, str], size: str) -> None:
    ranks = {name: "0" for name in launcher if "RANK" in name or "PROC" in name}
    assert find_place("auto", {**launcher, **ranks, size: "1"}) is None
    # An image may set the size alone.
    assert find_place("auto", {size: "1"}) is None


@pytest.mark.parametrize("engine", ENGINES)
def test_single_process_of_an_engine_has_no_place(engine: str) -> None:
    assert find_place("auto", ENGINES[engine](0, 1, 29_501)) is None


def test_shell_inside_a_slurm_job_has_no_place() -> None:
    """It has half of the variables; waiting for others would have no end."""
    assert find_place("auto", {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}) is None


def test_launchers_must_agree() -> None:
    same = {**TORCHRUN, **SLURM, "SLURM_NTASKS": "4", "SLURM_PROCID": "1"}
    assert find_place("auto", same) == find_place("auto", TORCHRUN)
    with pytest.raises(RecipeError) as refused:
        find_place("auto", {**TORCHRUN, **SLURM})
    assert (
        "launch = auto: the process has several ranks: 1 of 4 (torchrun), 3 of 8 (Slurm); "
        "set launch=env or launch=slurm" in str(refused.value)
    )
    assert find_place("slurm", {**TORCHRUN, **SLURM}) == find_place("auto", SLURM)


def test_two_launchers_of_one_name_must_agree() -> None:
    mindspore = {"RANK_ID": "0", "RANK_SIZE": "8"}
    for launch in ("auto", "env"):
        with pytest.raises(RecipeError) as refused:
            find_place(launch, {**TORCHRUN, **mindspore})
        assert (
            f"launch = {launch}: the process has several ranks: 1 of 4 (torchrun), "
            "0 of 8 (MindSpore's launcher); unset the variables of one" in str(refused.value)
        )


@pytest.mark.parametrize("host", ["fd00::7", "[fd00::7]"])
def test_ipv6_address_is_bracketed(host: str) -> None:
    kubeflow = {**KUBEFLOW, "JAX_COORDINATOR_ADDRESS": f"{host}:29500"}
    for variables in ({**TORCHRUN, "MASTER_ADDR": host}, kubeflow):
        place = find_place("auto", variables)
        assert place is not None
        assert (place.address, place.host) == ("[fd00::7]:29500", "fd00::7")


@pytest.mark.parametrize(
    ("launch", "variables", "problem"),
    [
        ("slurm", {}, "SLURM_PROCID and SLURM_NTASKS and SLURM_JOB_ID"),
        ("env", {}, "launch = env: RANK and WORLD_SIZE not set"),
        ("auto", {"WORLD_SIZE": "2"}, "WORLD_SIZE = 2: RANK not set"),
        ("env", {"RANK": "1"}, "RANK = 1: WORLD_SIZE not set"),
        ("env", {"RANK_ID": "1"}, "RANK_ID = 1: RANK_SIZE not set"),
        ("auto", {**TORCHRUN, "RANK": "4"}, "RANK = 4: must be from 0 to 3"),
        ("auto", {**TORCHRUN, "RANK": "-1"}, "RANK = -1: must be from 0 to 3"),
        ("auto", {**TORCHRUN, "RANK": "one"}, "RANK = one: must be a whole number"),
        ("auto", {**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE = 0: must be at least 1"),
        ("auto", {**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT = 99999: must be from 1 to"),
        ("auto", {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not set"),
        ("auto", {**KUBEFLOW, "JAX_COORDINATOR_ADDRESS": "host"}, "host: must be HOST:PORT"),
        ("auto", {"JOB_COMPLETION_INDEX": "2"}, "JOB_COMPLETION_INDEX = 2: there are other"),
        ("slurm", {**SLURM, "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID = x: must be a whole number"),
    ],
)
def test_invalid_variables_are_refused(
    launch: str, variables: dict[str, str], problem: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        find_place(launch, variables)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("localhost", True),
        ("127.0.0.3", True),
        ("[::1]", True),
        ("node", False),
        ("10.0.0.1", False),
    ],
)
def test_start_timeout_depends_on_single_machine(host: str, is_local: bool) -> None:
    place = RankPlace(0, 2, f"{host}:80", "torchrun")
    assert (place.is_on_one_machine, place.start_s) == (is_local, 60.0 if is_local else 1_800.0)


def test_local_devices_are_assigned_to_a_process() -> None:
    place = RankPlace(1, 2, "a:1", "torchrun", 1)
    assert place.find_local_devices({}, 1) == [1]
    assert place.find_local_devices({}, 8) == [4, 5, 6, 7]
    assert place.find_local_devices({"CUDA_VISIBLE_DEVICES": "4,5"}, 2) == [1]
    assert place.find_local_devices({"CUDA_VISIBLE_DEVICES": "4"}, 2) is None
    assert place.find_local_devices({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 8) is None
    first = RankPlace(0, 2, "a:1", "torchrun", 0)
    assert first.find_local_devices({"CUDA_VISIBLE_DEVICES": "0"}, 2) == [0]
    assert first.find_local_devices({"CUDA_VISIBLE_DEVICES": ""}, 2) is None
    assert RankPlace(1, 2, "a:1", "torchrun").find_local_devices({}, 1) is None


def test_one_process_is_required() -> None:
    require_one_process({})
    with pytest.raises(RunError, match="torchrun has started 4 processes, and each would train"):
        require_one_process(TORCHRUN)


def test_ray_train_worker_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sets no variables; its workers agree on the first one's address."""
    context = SimpleNamespace(
        get_world_size=lambda: 3, get_world_rank=lambda: 2, get_local_rank=lambda: 0
    )
    answers = SimpleNamespace(broadcast_from_rank_zero=lambda address: "10.0.0.1:7000")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda: context))
    monkeypatch.setitem(sys.modules, "ray.train.collective", answers)
    node = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.3")
    monkeypatch.setitem(sys.modules, "ray.util", node)
    assert find_place("auto", {}) == RankPlace(2, 3, "10.0.0.1:7000", "Ray", 0)
    context.get_world_size = lambda: 1
    assert find_place("auto", {}) is None


def test_ray_train_import_without_training_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("not in a training function")

    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=refuse))
    assert find_place("auto", {}) is None


def test_rank_is_of_the_open_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with record_group(0, 1):
        assert (api.get_rank(), api.get_group_size()) == (0, 1)
        with record_group(2, 3):
            assert (api.get_rank(), api.get_group_size()) == (2, 3)
        assert (api.get_rank(), api.get_group_size()) == (0, 1)
    assert (api.get_rank(), api.get_group_size()) == (1, 4)


def test_rank_and_group_size_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """X-01: for code that all processes call, such as a custom dataset."""
    assert (api.get_rank(), api.get_group_size()) == (0, 1)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert (api.get_rank(), api.get_group_size()) == (1, 4)
    # MindSpore's names, with the device, if torchrun's aren't set.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    for name, value in {"RANK_ID": "2", "RANK_SIZE": "3", "DEVICE_ID": "5"}.items():
        monkeypatch.setenv(name, value)
    assert (api.get_rank(), api.get_group_size()) == (2, 3)
    place = find_place("env", os.environ)
    assert place is not None
    assert place.local_rank == 5
    # The connection counts, if there is one.
    monkeypatch.setattr("pipeline.core.host.jax_private.read_joined_process", lambda: (6, 7))
    assert (api.get_rank(), api.get_group_size()) == (6, 7)
