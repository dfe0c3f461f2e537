"""Peaks of this machine, measured in a few seconds: products by role and type, memory, launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pipeline.host.shortest_time import shortest_s

BUDGET_S = 0.15
"""Time of each probe after it is compiled."""
EDGE = 512
IMAGES = (32, 16, 16, 64)
STREAM_ELEMENTS, CACHED_ELEMENTS = 1 << 22, 1 << 16
CACHED_BYTES = 4 << 20
"""Kernels that move less than this find it in a cache, as the smaller stream does."""
CHAIN = 64
ROLES = ("forward", "images_gradient", "kernel_gradient")


@dataclass(frozen=True)
class HostPeaks:
    """Rates that a device reached: FLOP/s of products, bytes/s of a stream, times of launches.

    `flops` is by kind and role of a problem: 3 x 3 convolutions of 64 channels, and square products
    of matrices. `op_us` is the time of one small operation in a program, `dispatch_us` that of a
    program that does next to nothing; the streams are of memory, and of a cache.
    """

    flops: Mapping[tuple[str, str], float]
    bytes_per_s: float
    cached_bytes_per_s: float
    op_us: float
    dispatch_us: float

    def stream_us(self, nbytes: float) -> float:
        """Return the time to move bytes in one kernel."""
        cached = nbytes < CACHED_BYTES
        return 1e6 * nbytes / (self.cached_bytes_per_s if cached else self.bytes_per_s)


def measure_host_peaks(device: jax.Device, dtype: str) -> HostPeaks:
    """Measure the peaks of a device in a type; the shortest run of each probe counts.

    So others that use the machine lower them little; a checked step is its shortest, too.
    """
    with jax.default_device(device):
        flops = {("conv2d", role): rate for role, rate in _of_convolutions(dtype).items()}
        dense = _of_matrices(dtype)
        flops |= {("dense", role): dense for role in ROLES}
        streams = _stream(STREAM_ELEMENTS), _stream(CACHED_ELEMENTS)
        return HostPeaks(flops, *streams, _op_us(), _dispatch_us())


def _of_convolutions(dtype: str) -> dict[str, float]:
    features = IMAGES[-1]
    images = jnp.ones(IMAGES, dtype)
    kernel = jnp.ones((3, 3, features, features), dtype)
    numbers = lax.conv_dimension_numbers(IMAGES, kernel.shape, ("NHWC", "HWIO", "NHWC"))

    def forward(images: Array, kernel: Array) -> Array:
        return lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    def gradient(of: int) -> Callable[[Array, Array], Any]:
        return lambda images, kernel: jax.vjp(forward, images, kernel)[1](images)[of]

    count = 2.0 * np.prod(IMAGES) * 9 * features
    calls = dict(zip(ROLES, (forward, gradient(0), gradient(1)), strict=True))
    return {
        role: count / shortest_s(jax.jit(call), images, kernel, budget_s=BUDGET_S)
        for role, call in calls.items()
    }


def _of_matrices(dtype: str) -> float:
    matrix = jnp.ones((EDGE, EDGE), dtype)
    return 2.0 * EDGE**3 / shortest_s(jax.jit(jnp.dot), matrix, matrix, budget_s=BUDGET_S)


def _stream(elements: int) -> float:
    one, two = jnp.ones(elements), jnp.ones(elements)
    return (
        3.0
        * one.nbytes
        / shortest_s(jax.jit(lambda a, b: a + 3.0 * b), one, two, budget_s=BUDGET_S)
    )


def _op_us() -> float:
    """Return the time of one of a chain of small sums, which no fusion joins."""
    small = jnp.ones((32, 32))

    def chain(x: Array) -> Array:
        for _ in range(CHAIN):
            x = jnp.cumsum(x, 0) / 32
        return x

    return 1e6 * shortest_s(jax.jit(chain), small, budget_s=BUDGET_S) / CHAIN


def _dispatch_us() -> float:
    many = [jnp.ones(8) for _ in range(32)]
    return 1e6 * shortest_s(jax.jit(lambda xs: [x + 1 for x in xs]), many, budget_s=BUDGET_S)
