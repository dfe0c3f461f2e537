"""Explanation of a run's sinks: cost, memory and gain, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.backends.base import MECHANISM_TEXTS
from pipeline.backends.rates import Communication
from pipeline.backends.sink_choice import SHOWN, Bounds, Costs, SinkChoice, predict_ms
from pipeline.core.files.value_text import count_noun, format_bytes
from pipeline.training.state import COLUMNS

TELEMETRY_BYTES = 4 * len(COLUMNS)
"""Bytes of telemetry per step: a float32 for each column of its record."""


@dataclass(frozen=True)
class Dispatch:
    """Time that the host takes to dispatch one step without sinks."""

    median_us: float
    p90_us: float


@dataclass(frozen=True)
class Memory:
    """Memory of batches on the device."""

    resident: bool
    """Whether all samples are on the device. A batch is then a list of indices."""
    data_bytes: int
    """Bytes of the samples on the device."""
    batch_bytes: int
    """Bytes of a batch, or of its list of indices."""
    window_steps: int
    """Batches on the device at once; doesn't depend on the sink."""


@dataclass(frozen=True)
class Calendar:
    """The events of a run, in summary."""

    counts: Mapping[str, int]
    """Number of events by name."""
    first: tuple[tuple[int, str], ...]
    """The first boundaries with an event, each with the names of its events."""
    longest: int
    """The most steps between two events."""
    total: int
    """Steps of the run."""


@dataclass(frozen=True)
class Achieved:
    """Measured gain of sinks. Times are lower quartiles over alternating runs."""

    off_ms: float
    """Time of a step without sinks."""
    step_ms: float
    """Time of a step with sinks."""
    rounds: int
    """Number of alternating runs."""
    error: float
    """Relative error of the gain."""

    @property
    def gain(self) -> float:
        """Speed-up over no sinks."""
        return self.off_ms / self.step_ms


@dataclass(frozen=True)
class ExplainedRun:
    """The run that is explained."""

    recipe: str
    device: str
    batch_size: int
    """Samples of a batch, on all devices together."""
    asked: int | None
    """Steps of a sink in the recipe; None for off and auto."""


@dataclass(frozen=True)
class Explanation:
    """The sinks of a run, and why they are these; fields without a measurement are None."""

    run: ExplainedRun
    bounds: Bounds
    calendar: Calendar
    choice: SinkChoice
    costs: Costs | None = None
    dispatch: Dispatch | None = None
    memory: Memory | None = None
    achieved: Achieved | None = None
    modelled: bool = False
    """Whether the times come from the model of an emulated device."""
    track_record: str = ""
    """How far published steps were from modelled ones; "" if the times are measured."""
    time_range: str = ""
    """How long the step takes in tuned code and in other code; "" if the times are measured."""
    communication: Communication | None = None
    """All-reduces between emulated devices; None for a single device."""

    def predictions(self) -> dict[int, float]:
        """Return milliseconds a step by sink size: `SHOWN`, the recipe's size, the chosen size."""
        if self.costs is None:
            return {}
        cost = self.costs.find(self.choice.mechanism)
        sizes = {size for size in (*SHOWN, self.run.asked, self.choice.size) if size}
        return {size: predict_ms(cost, size, self.bounds) for size in sorted(sizes)}

    def to_dict(self) -> dict[str, Any]:
        """Return explain.json. Keys of expected times begin with `modelled_` or `predicted_`."""
        expected = "modelled" if self.modelled else "predicted"
        return {
            **vars(self.run),
            "sink": {"size": self.choice.size, "mechanism": self.choice.mechanism},
            "why": self.choice.reason,
            **({"track_record": self.track_record} if self.track_record else {}),
            **({"time_range": self.time_range} if self.time_range else {}),
            f"{expected}_off_ms": self.choice.off_ms,
            f"{expected}_ms": self.predictions(),
            f"{expected}_gain": self.choice.gain,
            "achieved_gain": self.achieved.gain if self.achieved else None,
            "dispatch_us": vars(self.dispatch) if self.dispatch else None,
            f"{expected}_costs": {
                cost.mechanism: {"dispatch_ms": cost.dispatch_ms, "step_ms": cost.step_ms}
                for cost in (self.costs.sinks if self.costs else ())
            },
            "communication": vars(self.communication) if self.communication else None,
            "memory": vars(self.memory) if self.memory else None,
            "events": {**vars(self.calendar), "first": dict(self.calendar.first)},
            "achieved": vars(self.achieved) if self.achieved else None,
        }

    def __str__(self) -> str:
        run = self.run
        origin = "MODELLED, not measured: " if self.modelled else ""
        head = f"{origin}{run.recipe} on {run.device}, batch {run.batch_size:,}"
        if self.communication is not None:
            head += f" ({run.batch_size // self.communication.devices:,} a device)"
        lines = [f"  {name:<11} {text}" for name, text in self._list_facts()]
        return "\n".join([head, *lines, "", *self._format_table(), *self._format_conclusions()])

    def _list_facts(self) -> Iterator[tuple[str, str]]:
        """Yield a heading and a text for each known part."""
        if self.costs is None:
            yield "step", f"{self.choice.off_ms:.4g} ms without sinks"
        else:
            sinks = self.costs.sinks
            steps = ", ".join(
                f"{cost.step_ms:.4g} ms {MECHANISM_TEXTS[cost.mechanism]}" for cost in sinks
            )
            yield "step", f"{steps}, in a long sink"
            if self.time_range:
                yield "range", self.time_range
            if self.track_record:
                yield "so far", self.track_record
            costs = ", ".join(
                f"{1000 * cost.dispatch_ms:.0f} us {MECHANISM_TEXTS[cost.mechanism]}"
                for cost in sinks
            )
            single = ""
            if self.dispatch is not None:
                single = (
                    f"{self.dispatch.median_us:.0f} us on the host for each step without sinks "
                    f"(90 % are below {self.dispatch.p90_us:.0f} us), "
                )
            yield "to start", f"{single}for each sink {costs}"
        if self.communication is not None:
            yield "all-reduce", str(self.communication)
        if self.memory is not None:
            yield "memory", _format_memory(self.memory, self.choice.size)
        calendar = self.calendar
        counts = [f"{name} {count:,} times" for name, count in calendar.counts.items() if count]
        text = f"{', '.join(counts) or 'none'} in {count_noun(calendar.total, 'step')}"
        yield "events", f"{text}; at most {count_noun(calendar.longest, 'step')} between two"
        if calendar.first:
            yield "", "; ".join(f"step {step:,}: {names}" for step, names in calendar.first)

    def _format_table(self) -> Iterator[str]:
        predicted = self.predictions()
        if not predicted:
            return
        off_ms = self.choice.off_ms
        yield f"  {'sink':<11} {'ms/step':>9}  {'gain':>6}"
        yield f"  {'none':<11} {off_ms:>9.4f}   1.00x{self._format_mark(None)}"
        for size, ms in predicted.items():
            yield f"  {size:<11,} {ms:>9.4f}  {off_ms / ms:>5.2f}x{self._format_mark(size)}"
        yield ""

    def _format_mark(self, size: int | None) -> str:
        marks = ["chosen"] if size == self.choice.size else []
        marks += ["the recipe's"] if size is not None and size == self.run.asked else []
        return f"  <- {', '.join(marks)}" if marks else ""

    def _format_conclusions(self) -> Iterator[str]:
        choice = self.choice
        achieved = self.achieved
        sinks = "no sinks"
        if choice.size is not None:
            steps = count_noun(choice.size, "step")
            sinks = f"sinks of {steps} {MECHANISM_TEXTS[choice.mechanism]}"
        yield f"  {'chosen':<11} {sinks}: {choice.reason}"
        if choice.size is not None:
            error = self.costs.error if self.costs is not None else 0.0
            name = "modelled" if self.modelled else "predicted"
            yield f"  {name:<11} {choice.gain:.3f}x{_format_error(error)}"
        if achieved is not None:
            off_by = 100 * (choice.gain / achieved.gain - 1)
            yield (
                f"  {'achieved':<11} {achieved.gain:.3f}x{_format_error(achieved.error)}: "
                f"{achieved.step_ms:.4g} ms a step, {achieved.off_ms:.4g} without sinks, in "
                f"{achieved.rounds} rounds; the prediction is off by {off_by:+.1f} %"
            )


def _format_error(error: float) -> str:
    return f", give or take {100 * error:.1f} %" if error else ""


def _format_memory(memory: Memory, sink_steps: int | None) -> str:
    batches = count_noun(memory.window_steps, "batch", "batches")
    window_bytes = format_bytes(memory.window_steps * memory.batch_bytes)
    text = f"{batches} of samples, {window_bytes}"
    if memory.resident:
        samples = f"all samples, {format_bytes(memory.data_bytes)}"
        text = f"{samples}, and {batches} as lists of their numbers, {window_bytes}"
    logs = ""
    if sink_steps is not None:
        logged_bytes = format_bytes(sink_steps * TELEMETRY_BYTES)
        logs = f"; logs of a sink take {logged_bytes} more"
    return f"the device holds {text}, whatever the sink{logs}"
