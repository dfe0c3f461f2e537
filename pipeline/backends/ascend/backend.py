"""An emulated chip as a backend: numbers from XLA on the host, times from a model of the chip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pipeline.backends.base import (
    CompileInputs,
    Estimate,
    Executable,
    Mechanism,
    ProgressClock,
    StepToPrice,
)
from pipeline.backends.xla import XlaBackend
from pipeline.lowerings.problem.lowering import Problem
from pipeline.lowerings.tune.tuner import LoweringChoice, Tuning
from pipeline.parallel.devices import find_device
from pipeline.parallel.placement import Placement

if TYPE_CHECKING:
    from pipeline.backends.devices.ascend import Ascend


class AscendBackend:
    """One emulated device. Its numbers are, bit for bit, those of the host's processor."""

    def __init__(self, spec: Ascend) -> None:
        self.spec = spec
        self._host = XlaBackend(Placement((find_device("cpu", 0),)))
        self.placement, self.device = self._host.placement, self._host.device

    def describe(self) -> Mapping[str, str]:
        """Return the chip, the processor that computes in its place, and the versions."""
        host = self._host.describe()
        return {**host, "device": f"{self.spec.chip}, emulated on {host['device']}"}

    def mechanism(
        self, asked: Literal["auto", "loop", "soft"], *, sink: bool
    ) -> tuple[Mechanism, str]:
        """Return how the host runs steps; `spec.mode` is how the chip would launch them."""
        return self._host.mechanism(asked, sink=sink)

    def choose_lowerings(
        self, problems: Sequence[Problem], tuning: Tuning, watch: ProgressClock
    ) -> LoweringChoice:
        """Choose the host's lowerings: the step is priced without them."""
        return self._host.choose_lowerings(problems, tuning, watch)

    def compile(self, work: CompileInputs, watch: ProgressClock) -> Executable:
        """Compile a run for the host. Raises RunError when XLA refuses."""
        return self._host.compile(work, watch)

    def estimate(self, proposal: StepToPrice) -> Estimate:
        """Price a run on the chip. Raises RunError, RecipeError."""
        from pipeline.backends.ascend.estimate import AscendEstimate

        return AscendEstimate(proposal, self.spec)
