"""The noise of a run, and the epsilon that it spends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipeline.core.errors import RecipeError
from pipeline.data.order import SampleOrder
from pipeline.data.order_kinds import PoissonOrder
from pipeline.training.privacy.accounting import Accounting
from pipeline.training.privacy.add_noise import (
    COUNTED_SHARE,
    PrivacyRule,
    round_up_to_float32,
    split_noise,
)
from pipeline.training.privacy.privacy_spec import AdaptiveClip, PrivacySpec


@dataclass(frozen=True)
class Budget:
    """The privacy of a run of `steps` steps."""

    spec: PrivacySpec
    order: SampleOrder
    steps: int

    @cached_property
    def rule(self) -> PrivacyRule:
        """Settings of the private gradients of a step."""
        expected = self.order.batch_size
        if isinstance(self.order, PoissonOrder):
            expected = self.order.expected_batch_size
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
        batch_text = f"batches of {self.order.batch_size:,} samples in a fixed order"
        if spec.sampling == "poisson":
            batch_text = (
                f"{self.rule.expected_batch_size:,} samples a step expected, at most "
                f"{self.order.batch_size:,}"
            )
        return (
            f"epsilon {self.compute_epsilon(self.steps):.4f} at delta {spec.delta:g} after "
            f"{self.steps:,} steps ({spec.accountant}, {spec.neighbours}); noise {self.noise:.4f} "
            f"times the clip; {batch_text}"
        )

    @cached_property
    def _accounting(self) -> Accounting:
        """The accounting of the order's sampling. Raises RecipeError without dp-accounting."""
        order = self.order
        rate = order.rate if isinstance(order, PoissonOrder) else 1.0
        spec = self.spec
        try:
            return Accounting(
                spec.sampling, spec.accountant, spec.delta, rate, order.steps_per_epoch
            )
        except ValueError as error:
            raise RecipeError(f"privacy: {error}") from error
