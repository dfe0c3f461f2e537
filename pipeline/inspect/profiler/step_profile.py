"""The profile of a step, measured on a device or modelled for one: the same figures of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pipeline.inspect.profiler.iterations import Iteration, IterationTimes
from pipeline.inspect.profiler.peaks import Peaks

ITERATIONS_IN_JSON = 200


@dataclass(frozen=True)
class PhaseTime:
    """Milliseconds of a step by phase: `ms` by the clock, `busy_ms` in which its operations ran."""

    phase: str
    ms: float
    share: float
    busy_ms: float


@dataclass(frozen=True)
class LayerTime:
    """Milliseconds of a step in one layer by the clock, forward and backward, with its FLOP and
    bytes; outside of the network its name is a phase, in parentheses."""

    layer: str
    ms: float
    share: float
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    flops: float = 0.0
    nbytes: float = 0.0


@dataclass(frozen=True)
class OperatorTime:
    """Time of an operator in a step: `ms` by the clock, `busy_ms` that it ran.

    `of_flops` and `of_bytes` are shares of the peaks while it ran, None if they are unknown.
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
    """Milliseconds of an untraced step, by what it waits for: `device`, `wait` and `between` add up
    to `step`."""

    step: float
    device: float
    """Calls of the program, without waits for data."""
    wait: float
    """Waits for data."""
    between: float
    """The host between two dispatches: telemetry, monitors, callbacks."""
    events: float = 0.0
    """Evaluations, divided among the steps of the run; not counted in `step`."""
    dispatches: int = 0
    steps: int = 0
    """The untraced steps that were timed."""
    compile_s: float = 0.0
    """Seconds of compilations after the first dispatch."""

    def share(self, ms: float) -> float:
        """The share of the step that some of its milliseconds are."""
        return ms / self.step if self.step else 0.0


@dataclass(frozen=True)
class Coverage:
    """How much of the trace is explained."""

    named: float
    """Share of the time of operators that has a layer or a named phase."""
    parts_of_step: float
    """Sum of all parts, gaps included, as a share of the traced steps by the host's clock."""
    overlap: float
    """Time that operators were busy over the time of the clock: above 1 if some run at once."""


@dataclass(frozen=True)
class PredictedChange:
    """A change that would help: an override, or words, with the step that is predicted of it."""

    what: str
    step_ms: float
    gain: float
    basis: str
    """How the prediction was made: tried, measured, or counted from the trace."""

    def __str__(self) -> str:
        return f"{self.what}: {self.gain:.2f}x predicted, {self.step_ms:.4g} ms ({self.basis})"


@dataclass(frozen=True)
class StepVerdict:
    """Limit of a step: one word, the share of the step, the evidence, and what would help."""

    name: str
    share: float
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
    """Traced steps; 0 if it is modelled."""
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
    """Bytes by what holds them."""
    host: HostTime | None = None
    feed: Mapping[str, Any] = field(default_factory=dict)
    """The report of the loader, by column."""
    coverage: Coverage | None = None
    flops: float = 0.0
    """FLOP of a step."""
    nbytes: float = 0.0
    """Bytes that operators of a step read and write, also from and to a cache."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Shares of the step by the part of a device that is busy, as AI Core or AI CPU."""

    def to_dict(self) -> dict[str, Any]:
        """Return an object for JSON; points are ns from the first one."""
        tree = asdict(self)
        zero = self.points[0].begin if self.points else 0.0
        tree["points"] = [
            {
                name: None if at is None else round(at - zero, 1)
                for name, at in asdict(point).items()
            }
            for point in self.points[:ITERATIONS_IN_JSON]
        ]
        return tree
