"""Profile of a step, either measured on a device or modelled for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pipeline.inspect.profiler.iterations import Iteration, IterationTimes
from pipeline.inspect.profiler.peaks import Peaks

ITERATIONS_IN_JSON = 200


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
