"""An emulated chip as a backend: numbers from XLA on the host, times from a model of the chip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import jax

from pipeline.backends.ascend.report.text import several
from pipeline.backends.base import (
    CompileInputs,
    Estimate,
    Executable,
    Mechanism,
    ProgressClock,
    StepToPrice,
)
from pipeline.backends.xla import XlaBackend
from pipeline.models.lowerings.problem.lowering import Problem
from pipeline.models.lowerings.tune.tuner import LoweringChoice, Tuning
from pipeline.training.parallel.devices import num_devices, place_host
from pipeline.training.parallel.parallel_spec import ParallelSpec

if TYPE_CHECKING:
    from pipeline.backends.devices.ascend import Ascend


class AscendBackend:
    """Emulated devices. Their numbers are, bit for bit, those of the host's processor."""

    def __init__(self, spec: Ascend, parallel: ParallelSpec) -> None:
        self.spec, self.parallel = spec, parallel
        self._host = XlaBackend(place_host(parallel))
        self.placement, self.device = self._host.placement, self._host.device

    def describe(self) -> Mapping[str, str]:
        """Return the chips, the processor that computes in its place, and the versions."""
        host = self._host.describe()
        return {**host, "device": f"{self._emulated}, emulated on {host['device']}"}

    @property
    def _emulated(self) -> str:
        if self.parallel.mode == "none":
            return self.spec.chip
        return several(num_devices(self.parallel, jax.process_count()), self.spec.chip)

    def mechanism(
        self, requested: Literal["auto", "loop", "soft"], *, sink: bool
    ) -> tuple[Mechanism, str]:
        """Return how the host runs steps; `spec.mode` is how the chip would launch them."""
        return self._host.mechanism(requested, sink=sink)

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
