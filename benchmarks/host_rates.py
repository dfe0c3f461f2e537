"""Measure the rates of this host's devices for the planner: pipeline/planner/host_rates.yaml.

    python -m benchmarks.host_rates > pipeline/planner/host_rates.yaml

Devices are those of one process (`jax_num_cpu_devices`), which share the cores. A collective is
timed inside a loop of one program, so dispatch is not counted. `gloo` is two processes on a
loopback, measured apart; its figures are kept in this file.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from pipeline.files.safe_yaml import yaml_text

DEVICES = 8
SIZES = tuple(1 << exponent for exponent in (10, 14, 18, 21, 23))
LOOPS, ROUNDS = 20, 5
GLOO = "2 processes on loopback, 2 shared cores, 1 KiB to 32 MiB: 4 ms + bytes / 0.42 GB/s"


def median_us(run: Callable[[], Any], loops: int) -> float:
    """Median microseconds of one of the `loops` repetitions inside `run`."""
    jax.block_until_ready(run())
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append((time.perf_counter() - began) / loops * 1e6)
    return float(np.median(times))


def all_reduce_us(nbytes: int, group: int) -> float:
    """Microseconds of all-reduces of `nbytes`, in groups that together are all devices."""
    shape = (DEVICES // group, group)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec(("data", "model"))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, LOOPS, lambda _, y: jax.lax.psum(y, "model") / group, x)

    x = jnp.zeros((DEVICES, nbytes // 4), jnp.float32)
    return median_us(lambda: loop(x), LOOPS)


def main() -> None:
    """Print the rates as YAML."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    n = 1024
    a = jnp.ones((n, n), jnp.float32)
    dot = jax.jit(lambda a: jax.lax.fori_loop(0, LOOPS, lambda _, x: (x @ a) / n, a))
    flops = 2 * n**3 / median_us(lambda: dot(a), LOOPS)
    b = jnp.ones((1 << 24,), jnp.float32)
    add = jax.jit(lambda b: jax.lax.fori_loop(0, LOOPS, lambda _, x: x * 0.5 + 1, b))
    rate = 2 * b.nbytes / median_us(lambda: add(b), LOOPS)
    # Devices share the cores, so what all of them do at once is measured, and is one device's time.
    points = [(s, d, all_reduce_us(s, d)) for s in SIZES for d in (2, 4, 8)]
    for point in points:
        print("#", point, file=sys.stderr)
    # us = 2 message + 2 (d - 1) / d bytes / rate, relative errors alike at all sizes
    rows = np.array([(2 / us, 2 * (d - 1) / d * s / us) for s, d, us in points])
    (message, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)
    worst = max(abs(row @ (message, per_byte) - 1) for row in rows)
    where = f"{os.cpu_count()} {platform.machine()} cores shared with others, jax {jax.__version__}"
    command = "python -m benchmarks.host_rates"
    source = f"measured, {command}, {where}"
    fitted = f"{source}; all-reduces of 1 KiB to 8 MiB in groups of 2, 4, 8 of 8 devices"
    fitted += f", worst {worst:.0%} off"

    def figure(value: float, source: str) -> dict[str, Any]:
        return {"value": float(f"{value:.3g}"), "source": source, "confidence": "measured"}

    # Devices share the cores, so a mesh of DEVICES has this rate together.
    one = {
        "flops_per_us": figure(flops / DEVICES, f"{source}; products of 1024 x 1024 float32 / 8"),
        "bytes_per_us": figure(rate / DEVICES, f"{source}; x * 0.5 + 1 over 64 MiB / 8"),
    }
    links = {
        "message_us": figure(message, fitted),
        "bytes_per_us": figure(1 / per_byte, fitted),
    }
    gloo = {
        "message_us": figure(2000.0, f"measured, {GLOO}, halved: an all-reduce is two messages"),
        "bytes_per_us": figure(420.0, f"measured, {GLOO}"),
    }
    print("# Written by python -m benchmarks.host_rates; see rates.py")
    print(yaml_text({"device": one, "in_process": links, "gloo": gloo}), end="")


if __name__ == "__main__":
    main()
