"""An emulated chip as a backend: numbers from XLA on the host, times from a model of the chip."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from pipeline.backends.ascend.chip.options import EmulatedDevice
from pipeline.backends.ascend.report.report import name_devices
from pipeline.backends.base import Estimate, StepToPrice
from pipeline.backends.xla import XlaBackend
from pipeline.training.parallel.devices import count_devices, make_host_placement
from pipeline.training.parallel.parallel_spec import ParallelSpec


class AscendBackend(XlaBackend):
    """Emulated devices. Their numbers are, bit for bit, the numbers of the host's processor.

    Lowerings are chosen and programs are compiled for the host, and neither changes the price of a
    step.
    """

    def __init__(self, emulated: EmulatedDevice, parallel: ParallelSpec) -> None:
        super().__init__(make_host_placement(parallel))
        self.emulated = emulated
        self.parallel = parallel

    def describe(self) -> Mapping[str, str]:
        """Return the chips, the processor that computes for them, and the versions."""
        host = super().describe()
        name = self.emulated.chip.name
        if self.parallel.mode != "none":
            name = name_devices(count_devices(self.parallel, jax.process_count()), name)
        return {**host, "device": f"{name}, emulated on {host['device']}"}

    def estimate(self, proposal: StepToPrice) -> Estimate:
        """Price a run on the chip. Raises RunError, RecipeError."""
        from pipeline.backends.ascend.estimate import AscendEstimate

        return AscendEstimate(proposal, self.emulated)
