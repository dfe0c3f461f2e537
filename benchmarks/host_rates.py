"""Measure the rates of this host's devices for pipeline/backends/planner/host_rates.yaml.

    python -m benchmarks.host_rates > pipeline/backends/planner/host_rates.yaml

Devices are those of one process (`jax_num_cpu_devices`), which share the cores. All of them do
the same in a loop of one program, so dispatch is not counted. What is kept is processor time, not
time on the clock: neighbours on the machine double the one and hardly change the other. A device's
share of it is its time on a core of its own; the planner multiplies it by the devices for each
core.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax.sharding import AxisType, PartitionSpec

from benchmarks.measure import usable_cores

DEVICES = 8
GROUPS = (2, 4, 8)
SIZES = tuple(1 << exponent for exponent in (10, 14, 16, 18, 20, 21, 23, 25))
BYTES_A_ROUND = 1 << 27
MOST_LOOPS = 100
LEAST_LOOPS = 3
ROUNDS = 5
Body = Callable[..., jax.Array]


def device_us(body: Body, group: int, loops: int, *arrays: jax.Array) -> float:
    """Microseconds of processor time of one device for one `body`, the median of all rounds.

    `body` maps a device's rows of the first array to rows of the same shape, with its rows of the
    others as further arguments. Devices form groups of neighbours along the axis `model`.
    """
    shape = (DEVICES // group, group)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec(("data", "model"))

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(spec,) * len(arrays), out_specs=spec, check_vma=False
    )
    def loop(x: jax.Array, *operands: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, loops, lambda _, y: body(y, *operands), x)

    jax.block_until_ready(loop(*arrays))
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        jax.block_until_ready(loop(*arrays))
        times.append((time.process_time() - began) / loops / DEVICES * 1e6)
    return float(np.median(times))


def collectives(group: int, values: int) -> Mapping[str, Body]:
    """Collectives of rows of so many values that leave rows of as many, by kind."""
    part = values // group
    return {
        "all_reduce": lambda y: jax.lax.psum(y, "model"),
        "all_gather": lambda y: jax.lax.all_gather(y[:, :part], "model", axis=1, tiled=True),
        "all_to_all": lambda y: jax.lax.all_to_all(
            y.reshape(1, group, part), "model", 1, 1
        ).reshape(1, values),
    }


def collective_curves() -> dict[str, dict[int, list[float]]]:
    """Return microseconds by kind and number of devices, for each size; they never fall."""
    times_by_kind: dict[str, dict[int, list[float]]] = {}
    for group in GROUPS:
        for nbytes in SIZES:
            x = jnp.zeros((DEVICES, nbytes // 4), jnp.float32)
            loops = max(LEAST_LOOPS, min(MOST_LOOPS, BYTES_A_ROUND // (DEVICES * nbytes)))
            for kind, body in collectives(group, nbytes // 4).items():
                us = device_us(body, group, loops, x)
                print("#", kind, group, nbytes, f"{us:.1f}", file=sys.stderr)
                times_by_kind.setdefault(kind, {}).setdefault(group, []).append(us)
    return {
        kind: {
            group: [float(f"{us:.3g}") for us in np.maximum.accumulate(times)]
            for group, times in by_group.items()
        }
        for kind, by_group in times_by_kind.items()
    }


def main() -> None:
    """Print the rates as YAML."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    n = 1024
    cores = usable_cores()
    a = jnp.full((DEVICES * n, n), 1 / n, jnp.float32)
    flops = 2 * n**3 / device_us(lambda x, y: x @ y, 1, LEAST_LOOPS, a, a)
    b = jnp.ones((DEVICES, 1 << 22), jnp.float32)
    rate = 2 * b.nbytes / DEVICES / device_us(lambda x: x * 0.5 + 1, 1, LEAST_LOOPS, b)
    command = "python -m benchmarks.host_rates"
    where = f"{cores} {platform.machine()} cores shared with others, jax {jax.__version__}"
    source = f"measured, {command}, processor time of {DEVICES} devices at once, {where}"

    def figure(value: float, source: str) -> dict[str, Any]:
        return {"value": float(f"{value:.3g}"), "source": source, "confidence": "measured"}

    device = {
        "cores_count": {"value": cores, "source": source, "confidence": "measured"},
        "flops_per_us": figure(flops, f"{source}; products of 1024 x 1024 float32"),
        "bytes_per_us": figure(rate, f"{source}; x * 0.5 + 1 over 16 MiB a device"),
    }
    links = {
        "source": f"{source}; microseconds of a device by kind, devices of a group, and nbytes",
        "confidence": "measured",
        "nbytes": list(SIZES),
        "us": collective_curves(),
    }
    print("# Written by python -m benchmarks.host_rates; see rates.py")
    rates = {"device": device, "in_process": links}
    # Lists in one line each.
    print(yaml.safe_dump(rates, sort_keys=False, default_flow_style=None, width=99), end="")


if __name__ == "__main__":
    main()
