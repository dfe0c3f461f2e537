"""The noise of a run, the epsilon that it spends, by dp-accounting, and a lower bound on it.

The bound follows from guesses about canaries, samples that are trained on with probability 1/2.
Epsilon limits how often guesses about this choice are right (Steinke, Nasr and Jagielski 2023,
arXiv 2305.08846).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from pipeline.core.errors import RecipeError
from pipeline.data.order import SampleOrder
from pipeline.data.poisson_order import PoissonOrder
from pipeline.training.privacy.privacy_spec import AdaptiveClip, PrivacySpec
from pipeline.training.privacy.private_gradients import (
    COUNTED_SHARE,
    PrivacyRule,
    round_up_to_float32,
    split_noise,
)

Accountant = Literal["pld", "rdp"]
MAX_EPSILON = 100.0
"""A larger epsilon protects nothing, and its computation takes minutes."""
NOISE_RANGE = (0.01, 1e4)
"""The least and the largest noise that are tried: standard deviations divided by the clip."""
TOLERANCE = 1e-4
"""Relative tolerance of a noise that is computed from epsilon."""
CONFIDENCE = 0.95
SHARES = (0.04, 0.1, 0.2, 0.5, 1.0)
"""Shares of the canaries about which guesses are made, those with the most certain guesses. Each
share has an equal part of the error probability, so the best of the bounds holds."""
LARGEST_BOUND = 50.0
"""The largest bound that is searched for."""


@dataclass(frozen=True)
class Budget:
    """The privacy of a run of `steps` steps."""

    spec: PrivacySpec
    order: SampleOrder
    steps: int

    @cached_property
    def rule(self) -> PrivacyRule:
        """Settings of the private gradients of a step."""
        drawn = self._drawn
        expected = self.order.batch_size if drawn is None else drawn.expected_batch_size
        clip = self.spec.clip
        if isinstance(clip, AdaptiveClip):
            return PrivacyRule(expected, clip.initial, clip)
        return PrivacyRule(expected, clip)

    @cached_property
    def noise(self) -> float:
        """Standard deviation of the noise divided by the clip, a float32. Raises RecipeError if no
        noise reaches epsilon, if epsilon or delta would protect nothing, and without
        dp-accounting."""
        spec = self.spec
        if spec.delta >= 1 / self.order.samples:
            raise RecipeError(
                f"privacy.delta = {spec.delta:g}: must be below {1 / self.order.samples:.2g}, one "
                f"in {self.order.samples:,} samples, or it allows to publish a sample"
            )
        try:
            noise = spec.noise
            if spec.epsilon is not None:
                noise = self._accounting.find_noise(spec.epsilon, self.steps)
            assert noise is not None, "a recipe has epsilon or noise"
            noise = round_up_to_float32(noise)
            if spec.epsilon is None:
                self._accounting.require_meaningful(noise, self.steps)
            if self.rule.adaptive is not None:
                split_noise(noise, COUNTED_SHARE * self.rule.expected_batch_size)
        except ValueError as error:
            key = "noise" if spec.epsilon is None else "epsilon"
            raise RecipeError(f"privacy.{key} = {getattr(spec, key):g}: {error}") from error
        return noise

    def compute_epsilon(self, steps: int) -> float:
        """Return the epsilon that a number of steps has spent."""
        return self._accounting.compute_epsilon(self.noise, steps)

    def summarize(self, steps: int) -> Mapping[str, Any]:
        """Return the figures of a run after a number of steps, for summary.json."""
        spec = self.spec
        return {
            "epsilon": self.compute_epsilon(steps),
            "delta": spec.delta,
            "noise": self.noise,
            "expected_batch_size": self.rule.expected_batch_size,
            "sampling": spec.sampling,
            "accountant": spec.accountant,
            "neighbours": spec.neighbours,
            "private": spec.seed == "secret",
        }

    def __str__(self) -> str:
        spec = self.spec
        size = self.order.batch_size
        batch_text = f"batches of {size:,} samples in a fixed order"
        if self._drawn is not None:
            expected = self.rule.expected_batch_size
            batch_text = f"{expected:,} samples a step expected, at most {size:,}"
        return (
            f"epsilon {self.compute_epsilon(self.steps):.4f} at delta {spec.delta:g} after "
            f"{self.steps:,} steps ({spec.accountant}, {spec.neighbours}); noise {self.noise:.4f} "
            f"times the clip; {batch_text}"
        )

    @property
    def _drawn(self) -> PoissonOrder | None:
        """The order if its steps draw samples; None for fixed batches."""
        return self.order if isinstance(self.order, PoissonOrder) else None

    @cached_property
    def _accounting(self) -> Accounting:
        """The accounting of the order's sampling. Raises RecipeError without dp-accounting."""
        spec = self.spec
        rate = None if self._drawn is None else self._drawn.rate
        try:
            return Accounting(spec.accountant, spec.delta, rate, self.order.steps_per_epoch)
        except ValueError as error:
            raise RecipeError(f"privacy: {error}") from error


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

    accountant: Accountant
    delta: float
    rate: float | None
    """The probability to draw a sample in a step, with Poisson sampling; None: fixed batches."""
    steps_per_epoch: int
    """Number of steps in which a sample of fixed batches is used once."""

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
        ValueError if no noise does, and for more than `MAX_EPSILON`."""
        if epsilon > MAX_EPSILON:
            raise ValueError(f"protects nothing; must be at most {MAX_EPSILON:g}")
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

        if self.rate is not None:
            event = dp_accounting.PoissonSampledDpEvent(
                self.rate, dp_accounting.GaussianDpEvent(noise)
            )
            return dp_accounting.SelfComposedDpEvent(event, steps)
        # In each epoch a replaced sample changes one clipped sum, by at most twice the clip.
        epochs = -(-steps // self.steps_per_epoch)
        return dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(noise / 2), epochs)


def bound_epsilon(scores: np.ndarray, are_members: np.ndarray, delta: float) -> float:
    """Return a lower bound on a run's epsilon, which holds with probability `CONFIDENCE`. The
    higher the score (n,), the more probably a canary was trained on. `are_members`, bool (n,), is
    whether it was. A score of NaN is the lowest."""
    order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")
    are_members = are_members[order]
    num_canaries = len(scores)
    error = (1 - CONFIDENCE) / len(SHARES)
    best = 0.0
    for share in SHARES:
        # Guess that the canaries with the highest scores are members, and that the lowest, of
        # the same number, aren't. None is guessed twice.
        half = max(1, int(share * num_canaries / 2))
        num_right = int(are_members[:half].sum() + (~are_members[-half:]).sum())
        best = max(best, _find_bound(num_right, 2 * half, num_canaries, delta, error))
    return best


def _find_bound(num_right: int, num_guesses: int, count: int, delta: float, error: float) -> float:
    """Return the largest epsilon that is refuted with an error probability of at most `error`."""
    low = 0.0
    high = LARGEST_BOUND
    if compute_p_value(num_right, num_guesses, count, low, delta) > error:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        if compute_p_value(num_right, num_guesses, count, middle, delta) > error:
            high = middle
        else:
            low = middle
    return low


def compute_p_value(
    num_right: int, num_guesses: int, count: int, epsilon: float, delta: float
) -> float:
    """Return a bound on the probability that at least `num_right` of `num_guesses` guesses about
    `count` canaries are right, if the run has this epsilon and delta (theorem 5.2)."""
    from scipy.stats import binom

    share = 1 / (1 + np.exp(-epsilon))
    fewer = binom.pmf(np.arange(num_right - 1, -1, -1), num_guesses, share).cumsum()
    weight = (fewer / np.arange(1, num_right + 1)).max(initial=0.0)
    probability = binom.sf(num_right - 1, num_guesses, share) + 2 * count * delta * weight
    return float(min(probability, 1.0))
