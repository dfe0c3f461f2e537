"""Losses of numbers that are counts or positive, and the choice of a loss by what is predicted.

Their means depend on features by factors rather than sums, and their spread grows with the mean.
Labels and outputs are standardised by the training split; the losses undo it. An output m at or
below 0 counts as a positive number that falls with it: from 1/1000 of the mean on, the logarithm of
m is continued as a line.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

import numpy as np
from pydantic import Field, PrivateAttr

from pipeline.core.registry import component
from pipeline.data.columns import POSITIVE, Distribution, Targets, Task
from pipeline.training.component_specs import LossSpec
from pipeline.training.losses import (
    BinaryCrossEntropy,
    ClassWeights,
    CrossEntropy,
    Huber,
    Mse,
    OutputLoss,
)

if TYPE_CHECKING:
    import jax

LEAST_SHARE = 1e-3
"""Smallest share of the mean whose logarithm isn't continued as a line."""


class PositiveLoss(OutputLoss):
    """Base of the losses of numbers of at least 0."""

    tasks: ClassVar[tuple[Task, ...]] = ("regression",)
    takes_zero: ClassVar[bool] = True
    _mean: tuple[float, ...] = PrivateAttr(default=())
    _std: tuple[float, ...] = PrivateAttr(default=())

    @property
    def needs_targets(self) -> bool:
        return True

    def describe_targets(self, targets: Targets, labels: np.ndarray) -> tuple[Targets, str]:
        """Return the targets as positive numbers. Raises ValueError for a number below 0, or for 0
        if the loss has none, and for targets that aren't numbers."""
        numbers = targets.to_data_units(labels)
        if targets.task == "regression" and numbers.size:
            require_positive(targets, numbers, self.name, takes_zero=self.takes_zero)
            return targets.with_distribution(cast(Distribution, self.name)), ""
        return targets, ""

    def fit_to_targets(self, targets: Targets) -> Self:
        fitted = self.model_copy()
        fitted._mean, fitted._std = targets.mean, targets.std
        return fitted

    @abstractmethod
    def compare_numbers(self, log_mean: Any, mean: Any, numbers: Any) -> Any:
        """Return the loss of each output; all are float32 (B, ..., C), in the data's units."""

    def compare(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        import jax.numpy as jnp

        scale, centre = jnp.array(self._std or (1.0,)), jnp.array(self._mean or (0.0,))
        numbers = jnp.maximum(targets * scale + centre, 0)
        least = jnp.maximum(LEAST_SHARE * abs(centre), 1e-12)
        raw = outputs * scale + centre
        is_large = raw > least
        line = jnp.log(least) + raw / least - 1
        log_mean = jnp.where(is_large, jnp.log(jnp.where(is_large, raw, least)), line)
        log_mean = jnp.maximum(log_mean, jnp.log(least) - 20)
        mean = jnp.where(is_large, raw, jnp.exp(log_mean))
        return self.compare_numbers(log_mean, mean, numbers)


def require_positive(targets: Targets, numbers: np.ndarray, loss: str, *, takes_zero: bool) -> None:
    """Raise ValueError for the first number below 0, or at 0 without `takes_zero`."""
    rounding = 1e-6 * np.asarray(targets.std)
    wrong = numbers < -rounding if takes_zero else numbers <= rounding
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        rule = "of at least 0" if takes_zero else "above 0"
        # Standardised labels are rounded to float32.
        number = 0.0 if abs(numbers[row, column]) <= rounding[column] else numbers[row, column]
        raise ValueError(
            f"{loss} needs numbers {rule}, and {targets.names[column]} has {number:.4g}; choose "
            "another loss, such as mse"
        )


@component("loss")
class Poisson(PositiveLoss):
    """Deviance of Poisson's distribution, 2 (t log(t / m) - t + m) for t and its mean m: counts,
    and other numbers with zeros whose variance grows with the mean (McCullagh and Nelder 1989).
    """

    name: Literal["poisson"] = "poisson"

    def compare_numbers(self, log_mean: Any, mean: Any, numbers: Any) -> Any:
        from jax.scipy.special import xlogy

        return 2 * (xlogy(numbers, numbers) - numbers * log_mean - numbers + mean)


@component("loss")
class Gamma(PositiveLoss):
    """Deviance of the gamma distribution, 2 (log(m / t) + t / m - 1): positive numbers whose
    deviation grows with the mean, such as prices and durations."""

    takes_zero: ClassVar[bool] = False
    name: Literal["gamma"] = "gamma"

    def compare_numbers(self, log_mean: Any, mean: Any, numbers: Any) -> Any:
        import jax.numpy as jnp

        smallest = 1e-7 * jnp.maximum(jnp.array(self._std or (1.0,)), 1e-30)
        log_number = jnp.log(jnp.maximum(numbers, smallest))
        return 2 * (log_mean - log_number + numbers * jnp.exp(-log_mean) - 1)


@component("loss")
class SquaredLog(PositiveLoss):
    """Squared error of log(1 + number): errors count by their ratio. Outputs are near the median
    of skewed numbers, not their mean."""

    name: Literal["squared_log"] = "squared_log"

    def compare_numbers(self, log_mean: Any, mean: Any, numbers: Any) -> Any:
        import jax.numpy as jnp

        return jnp.square(jnp.log1p(mean) - jnp.log1p(numbers))


@component("loss")
class AutoLoss(LossSpec):
    """The loss that suits what is predicted, which the log says.

    Classes: cross_entropy; labels: binary_cross_entropy. Several numbers: mse. One number: poisson
    for counts, of which half are at most 10, and for skewed numbers with zeros; gamma for skewed
    positive ones; huber for tails on both sides; else mse. Skewed is a skewness above 2, tails are
    an excess kurtosis above 10.
    """

    tasks: ClassVar[tuple[Task, ...]] = ("classification", "regression", "multi_label")
    masks_labels: ClassVar[bool] = True
    reads_logits: ClassVar[bool] = False
    name: Literal["auto"] = "auto"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing of classes: 1 - s + s / C for the true one, as in PyTorch."""
    class_weights: ClassWeights = None
    """As in `cross_entropy`."""

    @property
    def needs_class_counts(self) -> bool:
        return self.class_weights == "balanced"

    @property
    def needs_targets(self) -> bool:
        return True

    def describe_targets(self, targets: Targets, labels: np.ndarray) -> tuple[Targets, str]:
        """Return the targets with the distribution of a number, and a line on the choice."""
        if targets.task != "regression":
            return targets, ""
        numbers = targets.to_data_units(labels)
        distribution, reason = choose_distribution(numbers)
        name = LOSSES[distribution]
        line = f"loss: {name}, since {', '.join(targets.names)} {reason}; loss=NAME chooses another"
        return targets.with_distribution(distribution), line

    def fit_to_targets(self, targets: Targets) -> Any:
        """Return the chosen loss, fitted to the targets."""
        common: dict[str, Any] = {
            "reduction": self.reduction,
            "hardest_share": self.hardest_share,
        }
        match targets.task:
            case "classification":
                smoothing = self.smoothing
                loss: LossSpec = CrossEntropy(
                    smoothing=smoothing,
                    smoothing_convention="uniform",
                    class_weights=self.class_weights,
                    **common,
                )
            case "multi_label":
                loss = BinaryCrossEntropy(**common)
            case _:
                losses = {"poisson": Poisson, "gamma": Gamma, "huber": Huber, "mse": Mse}
                loss = losses[LOSSES[targets.distribution]](**common)
        return loss.fit_to_targets(targets)

    def build(self) -> Callable[..., Any]:
        raise ValueError("loss = auto: needs the targets that the loss is fitted to")


LOSSES: dict[str, str] = {"": "mse", "poisson": "poisson", "gamma": "gamma", "tails": "huber"}
"""The loss of each distribution."""


def choose_distribution(numbers: np.ndarray) -> tuple[Distribution, str]:
    """Return the distribution of numbers (n, K), float64, as `AutoLoss` describes, and why."""
    if numbers.shape[1] > 1:
        return "", "are several"
    values = numbers[:, 0]
    spread = values.std() or 1.0
    scaled = (values - values.mean()) / spread
    skewness, kurtosis = float((scaled**3).mean()), float((scaled**4).mean()) - 3
    least = float(values.min())
    rounded = np.rint(values)
    is_count = least > -0.5 and bool((abs(values - rounded) <= 1e-6 * (spread + abs(values))).all())
    if is_count and np.median(values) <= 10:
        return "poisson", "are counts" if len(values) > 1 else "is a count"
    if skewness > 2 and least > 1e-6 * spread:
        return "gamma", f"is positive and skewed (skewness {skewness:.1f})"
    if skewness > 2 and least > -1e-6 * spread:
        return "poisson", f"is at least 0 and skewed (skewness {skewness:.1f})"
    if kurtosis > 10:
        return "tails", f"has heavy tails (excess kurtosis {kurtosis:.1f})"
    return "", f"is neither a count nor skewed (skewness {skewness:.1f})"


assert set(POSITIVE) <= {"poisson", "gamma", "squared_log"}
