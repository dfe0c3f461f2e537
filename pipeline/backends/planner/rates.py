"""Measured rates of a host's devices and of the links between them, read from host_rates.yaml."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.backends.rates import CollectiveKind, DeviceGroup

HOST_RATES_FILE = Path(__file__).with_name("host_rates.yaml")


@dataclass(frozen=True)
class LinkCurves:
    """Measured times of collectives, by kind, number of devices and bytes.

    Between two measurements, the logarithm of the time is interpolated linearly over the logarithm
    of the bytes, and of the number of devices. Above the largest measured size the time is
    proportional to the bytes. Below the smallest size and outside the measured numbers of devices
    it is constant. A single rate isn't enough: small arrays are copied from cache to cache, large
    arrays through memory.
    """

    nbytes: tuple[float, ...]
    """Measured sizes as in `dimension_groups.Collective`, ascending."""
    us_by_kind: Mapping[str, Mapping[int, tuple[float, ...]]]
    """Times of all `nbytes` by kind and number of devices; ascending numbers."""

    def collective_us(self, kind: CollectiveKind, nbytes: float, size: int) -> float:
        """Return the microseconds of a collective; a reduce-scatter is priced as an all-reduce."""
        if size == 1:
            return 0.0
        rows = self.us_by_kind["all_reduce" if kind == "reduce_scatter" else kind]
        max_nbytes = self.nbytes[-1]
        clipped = min(max(nbytes, self.nbytes[0]), max_nbytes)
        times = [_interpolate(self.nbytes, row, clipped) for row in rows.values()]
        sizes = list(rows)
        us = _interpolate(sizes, times, min(max(size, sizes[0]), sizes[-1]))
        return us * max(1.0, nbytes / max_nbytes)


def _interpolate(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """Return the value at a place, interpolated in logarithms between the nearest `places`."""
    right = min(max(bisect_right(places, place), 1), len(places) - 1)
    left = right - 1
    if len(places) == 1 or values[left] == values[right]:
        return values[left]
    share = math.log(place / places[left]) / math.log(places[right] / places[left])
    return values[left] * (values[right] / values[left]) ** share


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Two measured rates of one of the `cores` that all devices share, and rates of their links.

    A kernel takes the longer of the times of its operations and of its bytes (the roofline).
    """

    flops_per_us: float
    bytes_per_us: float
    links: LinkCurves
    cores: int
    exposed_share: float = 1.0
    scatters_sums: bool = False
    memory_bytes: float = math.inf

    def slowdown(self, devices: int) -> float:
        return devices / self.cores

    def compute_us(self, flops: float, nbytes: float) -> float:
        return max(flops / self.flops_per_us, nbytes / self.bytes_per_us)

    def collective_us(self, kind: CollectiveKind, nbytes: float, group: DeviceGroup) -> float:
        return self.links.collective_us(kind, nbytes, group.size)


@cache
def load_host_rates() -> MeasuredRates:
    """Read the host's rates, which `python -m benchmarks.host_rates` writes."""
    tree: Any = yaml.safe_load(HOST_RATES_FILE.read_text(encoding="utf-8"))
    links = tree["in_process"]
    us_by_kind = {
        kind: {size: tuple(map(float, us)) for size, us in sorted(rows.items())}
        for kind, rows in links["us"].items()
    }
    figures = {name: figure["value"] for name, figure in tree["device"].items()}
    return MeasuredRates(
        flops_per_us=figures["flops_per_us"],
        bytes_per_us=figures["bytes_per_us"],
        links=LinkCurves(tuple(map(float, links["nbytes"])), us_by_kind),
        cores=figures["cores_count"],
    )
