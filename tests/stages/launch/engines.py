"""The variables that each engine sets in a process, by rank, number of processes and port."""

from __future__ import annotations

from collections.abc import Callable

Variables = Callable[[int, int, int], dict[str, str]]

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
    "indexed_job": lambda rank, size, port: {
        "JOB_COMPLETION_INDEX": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    },
    "open_mpi": lambda rank, size, port: {
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
