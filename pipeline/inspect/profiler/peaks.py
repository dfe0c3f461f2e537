"""Peak rates of a device, measured by matrix products and a stream triad."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.core.files.atomic_write import format_json, write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.host.limits import read_limits
from pipeline.core.host.platforms import get_platform
from pipeline.core.host.shortest_time import measure_shortest_s

FILE = "peaks.json"
MEASUREMENT_S = 0.5
TRIAD_BYTES = 1 << 26
"""Size of each array of the triad, larger than any cache."""


@dataclass(frozen=True)
class Peaks:
    """Highest measured rates of a device."""

    flops: float
    """FLOP/s in float32."""
    bytes_per_s: float
    """Bandwidth of the memory."""

    @property
    def ridge(self) -> float:
        """FLOP per byte below which memory limits float32."""
        return self.flops / self.bytes_per_s


def peaks_of(device: jax.Device, folder: Path | None, *, again: bool = False) -> Peaks:
    """Return the peaks of a device, from the cache folder if they were measured before.

    With `again` they are measured in any case, and the larger values are stored, since the machine
    may have been busy. Without a readable folder they are measured.
    """
    if folder is None:
        return measure_peaks(device)
    file = folder / FILE
    key = f"{device.platform} {device.device_kind}, {read_limits().cores:g} cores"
    key += f", jax {version('jax')}"
    entries: dict[str, Any] = {}
    cached = None
    # An unreadable file, or an entry that isn't valid, is replaced.
    with suppress(OSError, ValueError, TypeError, KeyError):
        entries = dict(read_json(file))
        entry = Peaks(**entries[key])
        cached = entry if all(value > 0 for value in astuple(entry)) else None
    if cached is not None and not again:
        return cached
    measured = measure_peaks(device)
    if cached is not None:
        measured = Peaks(*map(max, astuple(measured), astuple(cached)))
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, format_json({**entries, key: asdict(measured)}, indent=2) + "\n")
    return measured


def measure_peaks(device: jax.Device) -> Peaks:
    """Measure the peaks of a device in about half a second, each by the fastest of several runs."""
    size = get_platform(device.platform).product_size
    with jax.default_device(device):
        matrix = jnp.asarray(np.random.default_rng(0).standard_normal((size, size), np.float32))
        left = jnp.ones(TRIAD_BYTES // 4, jnp.float32)
        right = jnp.ones_like(left)
        product = jax.jit(jnp.dot)
        triad = jax.jit(lambda a, b: a + 3.0 * b)
        budget_s = MEASUREMENT_S / 2
        product_s = measure_shortest_s(product, matrix, matrix, budget_s=budget_s)
        triad_s = measure_shortest_s(triad, left, right, budget_s=budget_s)
        return Peaks(flops=2.0 * size**3 / product_s, bytes_per_s=3.0 * left.nbytes / triad_s)
