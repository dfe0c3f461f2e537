"""Trains a recipe under each engine's variables, one run after the other in this process.

`python -m tests.stages.launch.engine_runs RANK SIZE PORT CACHE` is one of several such processes.
A run's directory has the name of its engine; the first process writes it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from pipeline import load_recipe
from pipeline.stages.run import run
from pipeline.stages.runner.context import RunOptions

TINY = (
    "model=mlp",
    "model.hidden=[12]",
    "monitor.tensorboard=false",
    "eval.every_passes=null",
    "train.sink_size=10",
    "train.steps=20",
    "parallel.mode=data",
    "parallel.shards=2",
)
Variables = Callable[[int, int, int], dict[str, str]]
"""Returns the variables of a process by rank, number of processes and port."""

ENGINES: dict[str, Variables] = {
    "torchrun": lambda rank, size, port: {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    },
    "mindspore": lambda rank, size, port: {
        "RANK_ID": str(rank),
        "RANK_SIZE": str(size),
        "DEVICE_ID": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    },
    "kubeflow": lambda rank, size, port: {
        "JAX_PROCESS_ID": str(rank),
        "JAX_NUM_PROCESSES": str(size),
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
    },
    "job": lambda rank, size, port: {
        "JOB_COMPLETION_INDEX": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    },
    "mpi": lambda rank, size, port: {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
        "PMIX_NAMESPACE": f"prterun-node-{port}@1",
    },
    "skypilot": lambda rank, size, port: {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": str(size),
        "SKYPILOT_NODE_IPS": "127.0.0.1\n" * size,
        "MASTER_PORT": str(port),
    },
    "slurm": lambda rank, size, port: {
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(size),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    },
}


def main(rank: int, size: int, port: int, cache: Path) -> None:
    recipe = load_recipe("lenet5_digits", [*TINY, f"cache.root={cache}"])
    original = dict(os.environ)
    for name, variables in ENGINES.items():
        os.environ |= variables(rank, size, port)
        run(recipe, RunOptions(run_dir=Path(name)))
        os.environ.clear()
        os.environ |= original


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
