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
from pipeline.core.errors import RunError

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
    """Measured sizes as in `layouts.Collective`, ascending."""
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
def load_host_rates(path: Path = HOST_RATES_FILE) -> MeasuredRates:
    """Read a host's rates. Raises RunError for an invalid file."""
    try:
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        device = tree["device"]
        return MeasuredRates(
            flops_per_us=float(device["flops_per_us"]["value"]),
            bytes_per_us=float(device["bytes_per_us"]["value"]),
            links=_parse_links(tree["in_process"]),
            cores=int(device["cores_count"]["value"]),
        )
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path}: not a file of a host's rates: {error!r}") from error


def _parse_links(tree: Any) -> LinkCurves:
    nbytes = tuple(float(size) for size in tree["nbytes"])
    curves = {
        kind: {int(size): tuple(map(float, us)) for size, us in sorted(rows.items())}
        for kind, rows in tree["us"].items()
    }
    if any(len(us) != len(nbytes) for rows in curves.values() for us in rows.values()):
        raise ValueError(f"each list of times must have {len(nbytes)} entries, like nbytes")
    return LinkCurves(nbytes, curves)
