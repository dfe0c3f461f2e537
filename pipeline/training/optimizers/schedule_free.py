"""Schedule-free SGD and AdamW (Defazio et al. 2024, arXiv 2405.15682).

With the direction d at y, z <- z - lr * d, x <- x + c * (z - x) and y <- z + b1 * (x - z). Update k
has the weight w = k^step_power * (largest lr so far)^rate_power, and c = w / (sum of the weights).
Evaluations and exports use x; `features/averages.py` has the sequences.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from pipeline.core.registry import component
from pipeline.training.component_specs import IterateAverage
from pipeline.training.optimizers.first_order import DecayedOptimizer, MovingAverageRate

if TYPE_CHECKING:
    import optax


class ScheduleFreeOptimizer(DecayedOptimizer):
    """Base of the schedule-free optimizers. Weight decay is of y, as in the authors' code."""

    decoupled: ClassVar[bool] = True
    averages_iterates: ClassVar[bool] = True
    rate_power: NonNegativeFloat
    step_power: NonNegativeFloat

    @property
    @abstractmethod
    def average_share(self) -> float:
        """The share of x in y."""

    def iterate_average(self) -> IterateAverage:
        return IterateAverage(
            b1=self.average_share, rate_power=self.rate_power, step_power=self.step_power
        )


@component("optimizer")
class ScheduleFreeSgd(ScheduleFreeOptimizer):
    """Schedule-free gradient descent: d = g + weight_decay * y. Its learning rate is 10 to 50 times
    SGD's with a schedule."""

    name: Literal["schedule_free_sgd"] = "schedule_free_sgd"
    momentum: MovingAverageRate

    @property
    def average_share(self) -> float:
        return self.momentum

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        return ()


@component("optimizer")
class ScheduleFreeAdamW(ScheduleFreeOptimizer):
    """Schedule-free AdamW: d = g / (sqrt(v_hat) + eps) + weight_decay * y, without an average of
    the gradient. Its learning rate is 1 to 10 times AdamW's with a schedule."""

    name: Literal["schedule_free_adamw"] = "schedule_free_adamw"
    b1: MovingAverageRate
    b2: MovingAverageRate
    eps: PositiveFloat

    @property
    def average_share(self) -> float:
        return self.b1

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        import optax

        scale = optax.scale_by_rms(self.b2, self.eps, eps_in_sqrt=False, bias_correction=True)
        return (scale,)
