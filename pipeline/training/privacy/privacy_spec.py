"""The section `privacy` of a recipe: differential privacy of the training samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from pipeline.core.registry import Expected, Spec
from pipeline.data.random import MAX_SEED

Share = Annotated[float, Field(gt=0, lt=1)]


class AdaptiveClip(Spec):
    """A clip that follows a quantile of the norms (Andrew et al. 2021, arXiv 1905.03871)."""

    quantile: Share
    """Share of the samples whose gradients have a norm of at most the clip."""
    initial: PositiveFloat = 1.0
    rate: PositiveFloat = 0.2
    """A step multiplies the clip by exp(-rate * (share within the clip - quantile))."""


class AuditSpec(Spec):
    """An audit by one run (Steinke et al. 2023, arXiv 2305.08846)."""

    canaries: Annotated[PositiveInt, Field(ge=10, le=1_000_000)]
    """Number of training samples that get a wrong label. Each is left out with probability 1/2."""


class PrivacySpec(Spec):
    """Differential privacy: each sample's gradient is clipped, and noise is added to their sum."""

    epsilon: PositiveFloat | None = None
    """The epsilon at the end of the run; the noise is computed from it."""
    noise: PositiveFloat | None = None
    """Standard deviation of the noise divided by the clip; epsilon is computed from it."""
    delta: Share
    clip: Annotated[
        PositiveFloat | AdaptiveClip, Expected("a number above 0, or {quantile: SHARE}")
    ] = 1.0
    """The largest norm of a sample's gradient."""
    sampling: Literal["poisson", "fixed"] = "poisson"
    """poisson: each sample is drawn with the same probability in each step; fixed: shuffled batches
    of one size, for which epsilon is larger."""
    expected_batch_size: PositiveInt | None = None
    """Mean number of samples that Poisson sampling draws, and divisor of the gradients. null: the
    largest number for which a step rarely draws more than `train.batch_size`, its most samples."""
    accountant: Literal["pld", "rdp"] = "pld"
    """Privacy loss distributions, or Renyi differential privacy, whose bound is looser."""
    neighbours: Literal["add_remove", "replace_one"] = "add_remove"
    """The two data sets that epsilon compares. add_remove: with and without a sample; replace_one:
    with one sample or another in its place."""
    seed: Annotated[
        Literal["secret"] | Annotated[int, Field(ge=0, le=MAX_SEED)],
        Expected("secret, or a whole number for tests"),
    ] = "secret"
    """secret: the operating system draws it, and it is stored only in checkpoints. With a number,
    for repeatable tests, the run isn't private."""
    audit: AuditSpec | None = None

    @model_validator(mode="after")
    def _require_one_budget(self) -> PrivacySpec:
        if (self.epsilon is None) == (self.noise is None):
            raise ValueError("set exactly one of epsilon and noise")
        poisson = self.sampling == "poisson"
        if poisson != (self.neighbours == "add_remove"):
            relation = "add_remove" if poisson else "replace_one"
            raise ValueError(
                f"neighbours = {self.neighbours}: must be {relation} with sampling = "
                f"{self.sampling}"
            )
        if not poisson and self.expected_batch_size is not None:
            raise ValueError("expected_batch_size: must be null with sampling = fixed")
        if not poisson and self.audit is not None:
            raise ValueError("audit: must be null with sampling = fixed")
        return self
