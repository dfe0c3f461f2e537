"""Constants of the cost model that are fitted to kernels, and the slowdown of populations of code.

Each class of kernels has its spread and source. A population is how much slower steps run than
modelled, in code tuned for benchmarks or in the community's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.backends.ascend.chip.tasks import CostClass, Provenance
from pipeline.core.files.safe_yaml import parse_written_yaml

EFFICIENCY_FILE = Path(__file__).with_name("efficiency.yaml")
RATE_BOUNDS = (0.05, 4.0)
"""Smallest and largest plausible rate of a class."""
CALIBRATION_FILE = Path(__file__).with_name("calibration.yaml")
GROUPS: Mapping[str, tuple[CostClass, ...]] = {
    "products": ("conv", "conv_input_grad", "conv_kernel_grad", "matmul"),
    "windows": ("max_pool", "max_pool_grad", "avg_pool"),
    "normalisation": ("bn_reduce", "bn_update"),
    "depthwise": ("depthwise", "depthwise_input_grad", "depthwise_kernel_grad"),
}
"""Classes that share a multiplier. Other classes keep the rates fitted to kernels."""
POPULATIONS_FILE = Path(__file__).with_name("populations.yaml")
NORMAL_90 = 1.2816
"""The 90th percentile of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class ClassEfficiency:
    """Rate of a class of kernels, relative to the time of its work at the hardware's rates.

    `log_sd` is the spread of log(measured / modelled) from kernel to kernel.
    """

    rate: float
    log_sd: float
    provenance: Provenance
    source: str


@dataclass(frozen=True, slots=True)
class Constants:
    """Numbers that all classes share. Numbers in `_cycles` are for one core."""

    hbm_read: float
    """Rate of reads that miss the L2, relative to the sustained rate."""
    hbm_write: float
    """Rate of writes, relative to the sustained rate."""
    l2_full: float
    """Most traffic since a buffer's last use with all of it in the L2, in sizes of the L2."""
    l2_none: float
    """Least traffic since a buffer's last use with none of it in the L2, in sizes of the L2."""
    cube_overlap: float
    """Exponent of the p-norm of a product's stages: 1 adds them, infinity overlaps them."""
    few_channels: float
    """Factor of the rate of a weight gradient whose input has fewer channels than a block."""
    vector_overlap: float
    """As `cube_overlap`, for the lanes and the traffic of a vector kernel."""
    vector_rate: float
    """Lanes in use, relative to all lanes."""
    heavy_operations: float
    """Simple operations that one division, root or exponential takes."""
    core_bytes: float
    """Bytes per core in use: a vector kernel uses bytes / core_bytes cores."""
    gather_row_cycles: float
    scatter_row_cycles: float
    minor_row_cycles: float
    """Times of a row: of a gather, of a scatter, and of each operation along a minor axis."""
    pad_row_cycles: float
    """Time of a row that isn't whole blocks, and is padded for FRACTAL_NZ."""
    slice_row_cycles: float
    """Time of a row of a matrix whose columns are sliced."""
    resize_row_cycles: float
    """Time of a block of 16 channels of a position that a resize makes."""
    transpose_element_cycles: float
    transpose_square_cycles: float
    """Time to transpose one square of 16 x 16 numbers of 16 bits."""
    bias_segment_cycles: float
    bias_bytes_per_cycle: float
    """Time to start a segment of a bias gradient, and the rate of its bytes."""
    pool_block_cycles: float
    pool_tap_cycles: float
    pool_grad_block_cycles: float
    pool_grad_tap_cycles: float
    """Times of a pooling and its gradient: of 16 channels of an image, and of each tap of them."""


@dataclass(frozen=True)
class Efficiency:
    """The fitted part of the cost model."""

    constants: Constants
    classes: Mapping[str, ClassEfficiency]

    def scale_rates(self, multipliers: Mapping[str, float]) -> Efficiency:
        """Return the model with the rates of some classes multiplied, within `RATE_BOUNDS`."""
        classes = dict(self.classes)
        low, high = RATE_BOUNDS
        for name, multiplier in multipliers.items():
            rate = min(max(classes[name].rate * multiplier, low), high)
            classes[name] = replace(classes[name], rate=rate)
        return replace(self, classes=classes)


@cache
def load_efficiency(path: Path = EFFICIENCY_FILE) -> Efficiency:
    """Return the fitted constants of a file that `benchmarks.ascend_fit.fit_kernels` wrote."""
    document: Any = parse_written_yaml(path.read_text(encoding="utf-8"))
    return Efficiency(
        Constants(**document["constants"]),
        {name: ClassEfficiency(**entry) for name, entry in document["classes"].items()},
    )


@dataclass(frozen=True, eq=False)
class Calibration:
    """Parameters fitted to published steps, in addition to the efficiency fitted to kernels.

    `multipliers` scale the rates of groups. `task_us` is the time between tasks of a graph that
    single kernels don't show. `log_sd` is the spread of log(published / modelled) over held-out
    families. `interval_scale` scales the 80 % interval so that it covers 80 % of them.
    """

    efficiency: Efficiency
    multipliers: Mapping[str, float]
    task_us: float
    log_sd: float
    interval_scale: float


def calibrate_with(
    multipliers: Mapping[str, float],
    task_us: float,
    log_sd: float = 0.2,
    interval_scale: float = 1.0,
) -> Calibration:
    """Return a calibration from its parameters, with the package's kernel constants."""
    by_class: dict[str, float] = {
        name: multipliers[group] for group in GROUPS for name in GROUPS[group]
    }
    efficiency = load_efficiency().scale_rates(by_class)
    return Calibration(efficiency, dict(multipliers), task_us, log_sd, interval_scale)


@cache
def load_calibration() -> Calibration:
    """Return the package's calibration."""
    fitted: Any = parse_written_yaml(CALIBRATION_FILE.read_text(encoding="utf-8"))
    return calibrate_with(
        fitted["multipliers"], fitted["task_us"], fitted["log_sd"], fitted["interval_scale"]
    )


@dataclass(frozen=True)
class Population:
    """Published over modelled times of a population: its factor, and its mechanisms' factors.

    The `_log_sd` are spreads of the log from mechanism to mechanism, from network to network, and
    from row to row of a network. `rows` and `networks` count what the fit read. `interval_scale`
    scales the log of the 80 % interval so that it covers 80 % of these rows, each by a fit without
    its network. `fixed_ms` is added to the modelled time of a graph's step before the factor: steps
    of small networks take it whatever their work.
    """

    factor: float
    mechanism_graph: float
    mechanism_eager: float
    mechanism_log_sd: float
    network_log_sd: float
    row_log_sd: float
    rows: int
    networks: int
    interval_scale: float = 1.0
    fixed_ms: float = 0.0

    def get_mechanism(self, *, eager: bool) -> float:
        """Return the factor of eager or graph mode beyond the population's."""
        return self.mechanism_eager if eager else self.mechanism_graph

    def centre_ms(self, step_ms: float, *, eager: bool) -> float:
        """Return the median of the times in ms of a new network's step."""
        fixed_ms = 0.0 if eager else self.fixed_ms
        return (step_ms + fixed_ms) * self.factor * self.get_mechanism(eager=eager)

    def expected_ms(self, step_ms: float, *, eager: bool) -> float:
        """Return the time in ms whose expected relative error is the smallest.

        The relative error |t / x - 1| of a log-normal x is the smallest at exp(mean - variance) of
        its log, the median of the distribution that is weighted by 1 / x.
        """
        variance = self.network_log_sd**2 + self.row_log_sd**2
        return self.centre_ms(step_ms, eager=eager) * math.exp(-variance)

    def interval_ms(
        self, step_ms: float, *, eager: bool, chip_log_sd: float = 0.0
    ) -> tuple[float, float]:
        """Return the 80 % interval of the time in ms of a new network's step.

        `chip_log_sd` is the spread of the log on a chip that the fit doesn't have.
        """
        centre = self.centre_ms(step_ms, eager=eager)
        log_sd = math.hypot(self.network_log_sd, self.row_log_sd) * self.interval_scale
        spread = math.exp(NORMAL_90 * math.hypot(log_sd, chip_log_sd))
        return centre / spread, centre * spread


@dataclass(frozen=True)
class FittedPopulations:
    """The fitted populations by name, and the number of fits that were tried to get them."""

    fits_tried: int
    by_name: Mapping[str, Population]


@cache
def load_populations(path: Path = POPULATIONS_FILE) -> FittedPopulations:
    """Return the populations of a file that `benchmarks.ascend_fit.populations` wrote."""
    document: Any = parse_written_yaml(path.read_text(encoding="utf-8"))
    by_name = {name: Population(**entry) for name, entry in document["populations"].items()}
    return FittedPopulations(document["fits_tried"], by_name)
