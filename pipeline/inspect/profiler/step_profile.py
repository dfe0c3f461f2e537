"""Profile of a step, measured on a device or modelled for one, and peak rates of a device.

Rates are measured by matrix products and a stream triad.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.core.files.atomic_write import format_json, write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.host.limits import read_limits
from pipeline.core.host.measured_time import measure_shortest_s
from pipeline.core.host.platforms import get_platform
from pipeline.inspect.profiler.trace import Iteration, IterationTimes

ITERATIONS_IN_JSON = 200
PEAKS_FILE = "peaks.json"
MEASUREMENT_S = 0.5
TRIAD_BYTES = 1 << 26
"""Size of each array of the triad, larger than any cache."""


@dataclass(frozen=True)
class PhaseTime:
    """Time of a phase in a step: `ms` of the elapsed time; its operations ran for `busy_ms`."""

    phase: str
    ms: float
    share: float
    busy_ms: float


@dataclass(frozen=True)
class LayerTime:
    """Time of a layer in a step, with its FLOP and bytes."""

    layer: str
    """Path of the layer; outside of the network a phase, in parentheses."""
    ms: float
    share: float
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    flops: float = 0.0
    nbytes: float = 0.0


@dataclass(frozen=True)
class OperatorTime:
    """Time of an operator in a step: `ms` of the elapsed time; it ran for `busy_ms`.

    `of_flops` and `of_bytes` are its rates as shares of the device's peaks, None if unknown.
    """

    name: str
    kind: str
    layer: str
    phase: str
    calls: float
    ms: float
    share: float
    busy_ms: float
    flops: float = 0.0
    nbytes: float = 0.0
    of_flops: float | None = None
    of_bytes: float | None = None


@dataclass(frozen=True)
class HostTime:
    """Parts of an untraced step in ms: `device`, `wait` and `between` add up to `step`."""

    step: float
    device: float
    """Calls of the program, without waits for data."""
    wait: float
    between: float
    """Work of the host between two dispatches: telemetry, monitors, callbacks."""
    events: float = 0.0
    """Evaluations, divided among the steps of the run; not counted in `step`."""
    dispatches: int = 0
    steps: int = 0
    """Number of timed untraced steps."""
    compile_s: float = 0.0
    """Seconds of compilations after the first dispatch."""

    def share(self, ms: float) -> float:
        return ms / self.step if self.step else 0.0


@dataclass(frozen=True)
class Coverage:
    """Shares of a trace that its profile explains."""

    named: float
    """Share of the operators' time that has a layer or a phase."""
    parts_of_step: float
    """Sum of all parts and gaps, as a share of the traced steps by the host's clock."""
    overlap: float
    """Busy time of operators over elapsed time; above 1 if operators run at once."""


@dataclass(frozen=True)
class PredictedChange:
    """A change that makes steps faster."""

    what: str
    """An override, or a description."""
    step_ms: float
    gain: float
    basis: str
    """Origin of the prediction: tried, measured, or counted from the trace."""

    def __str__(self) -> str:
        return f"{self.what}: {self.gain:.2f}x predicted, {self.step_ms:.4g} ms ({self.basis})"


@dataclass(frozen=True)
class StepVerdict:
    """The limit of a step, and a change that would help."""

    name: str
    """Limit, such as `data-bound`."""
    share: float
    """Share of a step, or of the run, that the limit takes."""
    why: str
    change: PredictedChange | None = None
    tried: tuple[PredictedChange, ...] = ()
    """Changes that were tried and don't help."""
    layer: str | None = None
    """Path of the layer that the change is about."""

    def __str__(self) -> str:
        text = f"{self.name}: {self.why}"
        if self.change is not None:
            return f"{text}; {self.change}"
        tried = ", ".join(f"{change.what} {change.gain:.2f}x" for change in self.tried)
        return f"{text}; tried without gain: {tried}" if tried else text


@dataclass(frozen=True)
class StepProfile:
    """The time of a step on one device, by phase, layer and operator."""

    source: Literal["measured", "modelled"]
    device: str
    recipe: str
    batch_size: int
    steps: int
    """Number of traced steps; 0 in a modelled profile."""
    step_ms: float
    """Milliseconds of an untraced step, the host's work included."""
    traced_step_ms: float | None
    phases: tuple[PhaseTime, ...]
    layers: tuple[LayerTime, ...]
    operators: tuple[OperatorTime, ...]
    iteration: IterationTimes | None
    points: tuple[Iteration, ...] = ()
    peaks: Peaks | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes by use, such as parameters or temporaries."""
    host: HostTime | None = None
    feed: Mapping[str, Any] = field(default_factory=dict)
    """The loader's report."""
    coverage: Coverage | None = None
    flops: float = 0.0
    nbytes: float = 0.0
    """Bytes that the operators of a step read and write, including cache accesses."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Modelled: shares of the step by the busy part of a device, such as AI Core or AI CPU.
    Measured: use of the process's processors, and of the peak bandwidth of the memory."""
    doubts: tuple[str, ...] = ()
    """Reasons why the times, and so the verdict, may be wrong."""

    def to_dict(self) -> dict[str, Any]:
        """Return a tree for JSON; points are in ns from the first point."""
        tree = asdict(self)
        first_ns = self.points[0].begin if self.points else 0.0
        tree["points"] = [
            {
                name: None if time_ns is None else round(time_ns - first_ns, 1)
                for name, time_ns in asdict(point).items()
            }
            for point in self.points[:ITERATIONS_IN_JSON]
        ]
        return tree


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
    file = folder / PEAKS_FILE
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
