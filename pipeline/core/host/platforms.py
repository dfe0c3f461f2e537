"""Facts about platforms, which code that differs between devices reads.

To add a device, write its component in `pipeline/backends/devices`. Add its platform here if JAX
has a new one for it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Platform:
    """Facts about the devices of a platform. The defaults are for an unknown platform."""

    name: str
    """JAX's name, `jax.Device.platform`."""
    lowering_name: str = ""
    """Name for `jax.lax.platform_dependent`, if it differs."""
    is_host: bool = False
    """Whether a device is the host's processor, which can act as several devices."""
    is_cuda: bool = False
    """Whether a device needs NVIDIA's driver and reports its free memory, and JAX takes most of it
    at once."""
    is_traceable: bool = False
    """Whether JAX's profiler records a device's operations."""
    chooses_lowerings: bool = False
    """Whether this package chooses lowerings and layouts; otherwise XLA's are the fastest."""
    has_slow_loops: bool = False
    """Whether XLA's convolutions are slow inside a loop."""
    keeps_programs: bool = False
    """Whether compiled programs are found by a key, without tracing."""
    optimizes_slowly: bool = False
    """Whether optimizing a program that runs once takes longer than it saves."""
    removes_recomputation: bool = False
    """Whether XLA undoes recomputation unless an option forbids it."""
    widens_bfloat16_products: bool = False
    """Whether XLA computes products of bfloat16 in float32 (its pass float-normalization)."""
    product_size: int = 8192
    """Rows and columns of the matrix product by which the peak of a device is measured."""


CPU = Platform(
    name="cpu",
    is_host=True,
    is_traceable=True,
    chooses_lowerings=True,
    has_slow_loops=True,
    keeps_programs=True,
    optimizes_slowly=True,
    removes_recomputation=True,
    widens_bfloat16_products=True,
    product_size=1024,
)
GPU = Platform(
    name="gpu",
    lowering_name="cuda",
    is_cuda=True,
    is_traceable=True,
)
PLATFORMS = (
    CPU,
    GPU,
    Platform("cuda", is_traceable=True),
    Platform("rocm", is_traceable=True),
    Platform("tpu", is_traceable=True),
)


def get_platform(name: str) -> Platform:
    """Return the facts about a platform by JAX's name; the defaults for an unknown name."""
    return next((platform for platform in PLATFORMS if platform.name == name), Platform(name))
