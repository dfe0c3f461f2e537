"""Optimizers that scale each value of a gradient by its earlier values, and schedule-free SGD and
AdamW (Defazio et al. 2024, arXiv 2405.15682)."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from pipeline.core.registry import component
from pipeline.training.component_specs import IterateAverage
from pipeline.training.optimizers.first_order import AdamBase, DecayedOptimizer, MovingAverageRate

if TYPE_CHECKING:
    import optax


@component("optimizer")
class NAdam(AdamBase):
    """Adam with Nesterov momentum (Dozat 2016) at a constant b1; weight decay is L2.

    (b1 * m / (1 - b1^(t+1)) + (1 - b1) * g / (1 - b1^t)) / (sqrt(v_hat) + eps). PyTorch's NAdam
    also warms up the momentum (`momentum_decay`).
    """

    name: Literal["nadam"] = "nadam"

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        import optax

        return (optax.scale_by_adam(self.b1, self.b2, self.eps, nesterov=True),)


@component("optimizer")
class RAdam(AdamBase):
    """Adam with a rectified variance (Liu et al. 2020); weight decay is L2.

    r * m_hat / (sqrt(v_hat) + eps), with r growing from 0 to 1. The direction is m_hat alone while
    rho, the length of an average of these squares, is below 5. PyTorch adds eps to sqrt(v), before
    the bias of v is corrected.
    """

    name: Literal["radam"] = "radam"

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        import optax

        return (optax.scale_by_radam(self.b1, self.b2, self.eps),)


@component("optimizer")
class AdaMax(AdamBase):
    """Adam with the largest gradient in place of the mean square (Kingma & Ba 2015, algorithm 2).
    m_hat / u, u <- max(b2 * u, |g| + eps), as in PyTorch. MindSpore adds eps to u at the division.
    Weight decay is L2."""

    name: Literal["adamax"] = "adamax"

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        import optax

        return (optax.scale_by_adamax(self.b1, self.b2, self.eps),)


@component("optimizer")
class AmsGrad(AdamBase):
    """Adam whose mean square never falls (Reddi et al. 2018); weight decay is L2.

    m_hat / (sqrt(max over time of v_hat) + eps): the maximum of the bias-corrected mean square.
    PyTorch corrects the bias of the maximum instead, and MindSpore doesn't correct it.
    """

    name: Literal["amsgrad"] = "amsgrad"

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        import optax

        return (optax.scale_by_amsgrad(self.b1, self.b2, self.eps),)


@component("optimizer")
class AdaBelief(AdamBase):
    """Adam with the squared deviation of the gradient from its average (Zhuang et al. 2020).

    m_hat / (sqrt(s_hat) + eps) + weight_decay * p, with s <- b2 * s + (1 - b2) * (g - m)^2 + eps.
    Weight decay is decoupled.
    """

    decoupled: ClassVar[bool] = True
    name: Literal["adabelief"] = "adabelief"

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        import optax

        return (optax.scale_by_belief(self.b1, self.b2, self.eps, self.eps),)


@component("optimizer")
class Lion(DecayedOptimizer):
    """The sign of an average of gradients (Chen et al. 2023); weight decay is decoupled.

    sign(b1 * m + (1 - b1) * g) + weight_decay * p, and then m <- b2 * m + (1 - b2) * g. Every
    parameter moves by lr. So a suitable learning rate is 3 to 10 times smaller than Adam's, and a
    suitable weight decay is larger by the same factor.
    """

    decoupled: ClassVar[bool] = True
    name: Literal["lion"] = "lion"
    b1: MovingAverageRate
    b2: MovingAverageRate

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        import optax

        return (optax.scale_by_lion(self.b1, self.b2),)


@component("optimizer")
class Adagrad(DecayedOptimizer):
    """Gradients divided by the root of the sum of all squares so far (Duchi et al. 2011); weight
    decay is L2. g / sqrt(initial_accumulator + sum of g^2 + eps)."""

    name: Literal["adagrad"] = "adagrad"
    initial_accumulator: NonNegativeFloat
    """The initial value of the sum."""
    eps: PositiveFloat

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        import optax

        return (optax.scale_by_rss(self.initial_accumulator, self.eps),)


@component("optimizer")
class RmsProp(DecayedOptimizer):
    """Gradients divided by the root of the mean square (Tieleman & Hinton 2012), as in MindSpore.

    v <- momentum * v + g / sqrt(mean square + eps). PyTorch adds `eps` to the root. MindSpore's v
    includes the learning rate; with a constant rate, results are the same. Weight decay is L2.
    """

    name: Literal["rmsprop"] = "rmsprop"
    decay: Annotated[float, Field(gt=0, lt=1)]
    momentum: MovingAverageRate
    eps: PositiveFloat
    initial_mean_square: NonNegativeFloat
    """The mean square before the first update: 1 in MindSpore, 0 in PyTorch. With 1 the first steps
    are shorter."""
    centered: bool
    """Whether the square of the mean gradient is subtracted from the mean square."""

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        import optax

        scale = optax.scale_by_stddev if self.centered else optax.scale_by_rms
        return (
            scale(self.decay, self.eps, self.initial_mean_square),
            optax.trace(self.momentum) if self.momentum else optax.identity(),
        )


@component("optimizer")
class Adafactor(DecayedOptimizer):
    """Adam without momentum, whose mean squares of a matrix are stored by its rows and
    columns (Shazeer & Stern 2018). Weight decay is decoupled.

    With u = g / sqrt(v), the direction is u / max(1, rms(u) / clip_rms), times max(min_scale,
    rms(p)). v averages g^2 + eps with the share 1 - t^-decay_power of the old average at update t,
    or is R C / mean(R) with such averages of the means over columns and over rows. An array of more
    axes is factored along its two largest. The paper's rate is min(0.01, 1 / sqrt(t)).
    """

    decoupled: ClassVar[bool] = True
    name: Literal["adafactor"] = "adafactor"
    decay_power: Annotated[float, Field(gt=0, le=1)]
    eps: PositiveFloat
    clip_rms: PositiveFloat | None
    """Limit of the root mean square of u; null: none."""
    min_scale: NonNegativeFloat | None
    """Least scale of a parameter; null: directions don't depend on the parameters."""
    factored_size: PositiveInt
    """Smallest size of the two axes of an array that is factored."""

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        import optax

        scale, clip = self.min_scale, self.clip_rms
        return (
            optax.scale_by_factored_rms(
                decay_rate=self.decay_power,
                min_dim_size_to_factor=self.factored_size,
                epsilon=self.eps,
            ),
            optax.identity() if clip is None else optax.clip_by_block_rms(clip),
            optax.identity() if scale is None else optax.scale_by_param_block_rms(scale),
        )


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
