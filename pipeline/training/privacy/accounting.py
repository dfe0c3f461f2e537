"""Computation of a run's epsilon by dp-accounting, and of the noise that an epsilon needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

Accountant = Literal["pld", "rdp"]
MAX_EPSILON = 100.0
"""A larger epsilon protects nothing, and its computation takes minutes."""
NOISE_RANGE = (0.01, 1e4)
"""The least and the largest noise that are tried: standard deviations divided by the clip."""
TOLERANCE = 1e-4
"""Relative tolerance of a noise that is computed from epsilon."""


@contextmanager
def _hide_orders() -> Iterator[None]:
    """Hide the warnings of dp-accounting during the body. They list orders of the Renyi divergence
    that it leaves out, which makes epsilon no smaller, dozens of them for each noise."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(max(level, logging.ERROR))
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True)
class Accounting:
    """The sampling of a run and its accountant. Raises ValueError without dp-accounting."""

    sampling: Literal["poisson", "fixed"]
    accountant: Accountant
    delta: float
    rate: float
    """The probability to draw a sample in a step, with Poisson sampling."""
    steps_per_epoch: int
    """Number of steps in which a sample is used once, with fixed batches."""

    def __post_init__(self) -> None:
        try:
            import dp_accounting  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"needs dp-accounting: pip install 'recipe-pipeline[privacy]' ({error})"
            ) from error

    def compute_epsilon(
        self, noise: float, steps: int, accountant: Accountant | None = None
    ) -> float:
        """Return epsilon after a number of steps with this noise."""
        if steps == 0:
            return 0.0
        from dp_accounting import pld, rdp

        uses_pld = (accountant or self.accountant) == "pld"
        composed: Any = pld.PLDAccountant() if uses_pld else rdp.RdpAccountant()
        with _hide_orders():
            composed.compose(self._make_event(noise, steps))
            return float(composed.get_epsilon(self.delta))

    def require_meaningful(self, noise: float, steps: int) -> None:
        """Raise ValueError if epsilon would be above `MAX_EPSILON`."""
        epsilon = self.compute_epsilon(noise, steps, "rdp")
        if not epsilon <= MAX_EPSILON:
            raise ValueError(
                f"epsilon would be {epsilon:,.0f} after {steps:,} steps, which protects nothing; "
                f"must be at most {MAX_EPSILON:g}, by more noise or fewer steps"
            )

    def find_noise(self, epsilon: float, steps: int) -> float:
        """Return the least noise that spends at most `epsilon` in a number of steps. Raises
        ValueError if no noise does."""
        _, largest = NOISE_RANGE
        least_epsilon = self.compute_epsilon(largest, steps)
        if least_epsilon > epsilon:
            raise ValueError(
                f"no noise up to {largest:,.0f} reaches it in {steps:,} steps at delta "
                f"{self.delta:g}; must be at least {least_epsilon:.2g}"
            )
        # The bound of rdp is computed fast. It is looser, so pld needs about this noise or less.
        rdp_noise = self._calibrate("rdp", epsilon, steps, NOISE_RANGE)
        if self.accountant == "rdp":
            return rdp_noise
        noise_range = (rdp_noise / 2, min(2 * rdp_noise, largest))
        return self._calibrate("pld", epsilon, steps, noise_range)

    def _calibrate(
        self, accountant: Accountant, epsilon: float, steps: int, noise_range: tuple[float, float]
    ) -> float:
        """Return the least noise of a range that spends at most `epsilon`, within TOLERANCE; the
        largest noise if none does."""
        low, high = noise_range
        if self.compute_epsilon(high, steps, accountant) > epsilon:
            return high
        while high - low > TOLERANCE * high:
            middle = (low * high) ** 0.5
            if self.compute_epsilon(middle, steps, accountant) > epsilon:
                low = middle
            else:
                high = middle
        return high

    def _make_event(self, noise: float, steps: int) -> Any:
        """Return the run as an event of dp-accounting."""
        import dp_accounting

        if self.sampling == "poisson":
            event = dp_accounting.PoissonSampledDpEvent(
                self.rate, dp_accounting.GaussianDpEvent(noise)
            )
            return dp_accounting.SelfComposedDpEvent(event, steps)
        # In each epoch a replaced sample changes one clipped sum, by at most twice the clip.
        epochs = -(-steps // self.steps_per_epoch)
        return dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(noise / 2), epochs)
