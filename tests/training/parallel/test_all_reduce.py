"""Sums over processes."""

from __future__ import annotations

import socket
import subprocess
import sys

import numpy as np
import pytest

from pipeline.training.parallel.all_reduce import all_reduce

SCRIPT = """
import sys
import jax
import numpy as np

rank, port = map(int, sys.argv[1:])
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
from pipeline.training.parallel.all_reduce import all_reduce

values = {"hits": np.int64(2**40 + rank), "loss": np.array([0.1, 2.0]) * (rank + 1)}
for operation in ("sum", "mean", "max"):
    found = all_reduce(values, operation)
    print(operation, int(found["hits"]), found["loss"].tolist(), found["loss"].dtype)
"""


def test_values_of_one_process_are_unchanged() -> None:
    found = all_reduce({"loss": 0.1, "hits": np.array([[2**40]])}, "mean")
    assert found["loss"] == 0.1
    assert found["loss"].shape == ()
    assert found["hits"].tolist() == [[2**40]]


def test_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="operation = 'prod': must be one of sum, mean, max, min"):
        all_reduce(1.0, "prod")  # type: ignore[arg-type]


@pytest.mark.slow
def test_processes_get_the_same_exact_sums() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SCRIPT]
    processes = [
        subprocess.Popen([*command, str(rank), str(port)], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    # Gloo prints its connections.
    first, second = ([r for r in text.splitlines() if "Gloo" not in r] for text in printed)
    assert first == second
    assert first == [
        f"sum {2**41 + 1} {[0.1 + 0.2, 6.0]} float64",
        f"mean {2**40} {[(0.1 + 0.2) / 2, 3.0]} float64",
        f"max {2**40 + 1} {[0.2, 4.0]} float64",
    ]
