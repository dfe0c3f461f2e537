"""A process finds its place by the variables that launchers set."""

from __future__ import annotations

import pytest

from pipeline.core.errors import RecipeError
from pipeline.stages.launch.join import RankPlace, find_place

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def test_ranks_of_torchrun() -> None:
    assert find_place("auto", TORCHRUN) == RankPlace(1, 4, "node7:29500", "env")
    assert find_place("none", TORCHRUN) is None


def test_ranks_of_the_documents() -> None:
    """X-06: RANK_ID and RANK_SIZE, where the names of torchrun are not set."""
    named = {"RANK_ID": "1", "RANK_SIZE": "4", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
    assert find_place("env", named) == find_place("env", TORCHRUN)


def test_tasks_of_slurm_come_first() -> None:
    assert find_place("auto", {**TORCHRUN, **SLURM}) == RankPlace(3, 8, None, "slurm")


def test_a_shell_inside_a_slurm_job_is_alone() -> None:
    """It has half of the variables; waiting for others would have no end."""
    assert find_place("auto", {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}) is None
    assert find_place("auto", {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize(
    ("launch", "changed", "problem"),
    [
        ("slurm", {}, "launch = slurm: SLURM_JOB_ID, SLURM_STEP_NODELIST, SLURM_NTASKS"),
        ("env", {}, "launch = env: RANK_ID and RANK_SIZE not set; give RANK, WORLD_SIZE"),
        ("auto", {**TORCHRUN, "RANK": "4"}, "launch = auto: rank = 4: must be from 0 to 3"),
        ("auto", {**TORCHRUN, "RANK": "-1"}, "launch = auto: rank = -1: must be from 0 to 3"),
        ("auto", {**TORCHRUN, "RANK": "one"}, "RANK = one: must be a whole number"),
        ("auto", {**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT = 99999: must be from 1 to"),
        ("auto", {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not set"),
    ],
)
def test_variables_that_make_no_sense(launch: str, changed: dict[str, str], problem: str) -> None:
    with pytest.raises(RecipeError) as refused:
        find_place(launch, changed)
    assert problem in str(refused.value)
