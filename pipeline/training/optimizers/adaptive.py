"""Optimizers that scale each value of a gradient by its own history: variants of Adam (L-03).

Weight decay is decoupled where the paper has it so, as it is in AdamW; else it is an L2 penalty,
added to the gradient. Each class says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from pipeline.core.registry import part
from pipeline.training.optimizers.first_order import Moments, MovingAverageRate, add_weight_decay
from pipeline.training.part_specs import OptimizerSpec

if TYPE_CHECKING:
    import optax


@part("optimizer")
class NAdam(Moments):
    """Adam with Nesterov momentum (Dozat 2016), its momentum constant; weight decay is L2.

    PyTorch's NAdam also warms the momentum up (`momentum_decay`), which this does not.
    """

    name: Literal["nadam"] = "nadam"

    def build(self) -> optax.GradientTransformation:
        """(b1 * m / (1 - b1^(t+1)) + (1 - b1) * g / (1 - b1^t)) / (sqrt(v_hat) + eps)."""
        import optax

        return optax.chain(
            add_weight_decay(self.weight_decay, self.decay_rules),
            optax.scale_by_adam(self.b1, self.b2, self.eps, nesterov=True),
        )


@part("optimizer")
class RAdam(Moments):
    """Adam with a rectified variance (Liu et al. 2020), as PyTorch's; weight decay is L2.

    While the length rho of the average of squares is below 5, the direction is m_hat alone.
    """

    name: Literal["radam"] = "radam"

    def build(self) -> optax.GradientTransformation:
        """r * m_hat / (sqrt(v_hat) + eps), where r grows from 0 to 1."""
        import optax

        return optax.chain(
            add_weight_decay(self.weight_decay, self.decay_rules),
            optax.scale_by_radam(self.b1, self.b2, self.eps),
        )


@part("optimizer")
class AdaMax(Moments):
    """Adam with the largest gradient in place of the mean square (Kingma & Ba 2015, algorithm 2).

    As PyTorch's Adamax and MindSpore's AdaMax; weight decay is L2.
    """

    name: Literal["adamax"] = "adamax"

    def build(self) -> optax.GradientTransformation:
        """m_hat / u, u <- max(b2 * u, |g| + eps)."""
        import optax

        return optax.chain(
            add_weight_decay(self.weight_decay, self.decay_rules),
            optax.scale_by_adamax(self.b1, self.b2, self.eps),
        )


@part("optimizer")
class AmsGrad(Moments):
    """Adam whose mean square never falls (Reddi et al. 2018); weight decay is L2.

    The maximum is that of the bias-corrected mean square. PyTorch and MindSpore take the maximum
    first, and correct or do not correct it afterwards.
    """

    name: Literal["amsgrad"] = "amsgrad"

    def build(self) -> optax.GradientTransformation:
        """m_hat / (sqrt(max over time of v_hat) + eps)."""
        import optax

        return optax.chain(
            add_weight_decay(self.weight_decay, self.decay_rules),
            optax.scale_by_amsgrad(self.b1, self.b2, self.eps),
        )


@part("optimizer")
class AdaBelief(Moments):
    """Adam by the squared deviation of the gradient from its average (Zhuang et al. 2020).

    Weight decay is decoupled. `eps` is added to each new mean square and again to its root.
    """

    name: Literal["adabelief"] = "adabelief"

    def build(self) -> optax.GradientTransformation:
        """m_hat / (sqrt(s_hat) + eps) + weight_decay * p, s the mean of (g - m)^2 + eps."""
        import optax

        return optax.chain(
            optax.scale_by_belief(self.b1, self.b2, self.eps, self.eps),
            add_weight_decay(self.weight_decay, self.decay_rules),
        )


@part("optimizer")
class Lion(OptimizerSpec):
    """The sign of an average (Chen et al. 2023); weight decay is decoupled.

    Every value moves by lr, so take a learning rate 3 to 10 times smaller than Adam's, and a
    weight decay as much larger.
    """

    name: Literal["lion"] = "lion"
    b1: MovingAverageRate
    b2: MovingAverageRate

    def build(self) -> optax.GradientTransformation:
        """sign(b1 * m + (1 - b1) * g) + weight_decay * p, m <- b2 * m + (1 - b2) * g afterwards."""
        import optax

        return optax.chain(
            optax.scale_by_lion(self.b1, self.b2),
            add_weight_decay(self.weight_decay, self.decay_rules),
        )


@part("optimizer")
class Adagrad(OptimizerSpec):
    """By the root of the sum of all squares so far (Duchi et al. 2011); weight decay is L2."""

    name: Literal["adagrad"] = "adagrad"
    initial_accumulator: NonNegativeFloat
    """The initial value of the sum."""
    eps: PositiveFloat

    def build(self) -> optax.GradientTransformation:
        """g / sqrt(initial_accumulator + sum of g^2 + eps)."""
        import optax

        return optax.chain(
            add_weight_decay(self.weight_decay, self.decay_rules),
            optax.scale_by_rss(self.initial_accumulator, self.eps),
        )


@part("optimizer")
class RmsProp(OptimizerSpec):
    """By the root of the mean square (Tieleman & Hinton 2012) as MindSpore's; weight decay is L2.

    PyTorch adds `eps` to the root instead of under it. The learning rate stays outside of the
    momentum, where MindSpore has it inside: the same as long as it is constant.
    """

    name: Literal["rmsprop"] = "rmsprop"
    decay: Annotated[float, Field(gt=0, lt=1)]
    momentum: MovingAverageRate
    eps: PositiveFloat
    initial_mean_square: NonNegativeFloat
    """1 in MindSpore, which makes the first steps shorter; 0 in PyTorch."""
    centered: bool
    """Subtract the squared mean from the mean square."""

    def build(self) -> optax.GradientTransformation:
        """v <- momentum * v + g / sqrt(mean square + eps)."""
        import optax

        scale = optax.scale_by_stddev if self.centered else optax.scale_by_rms
        return optax.chain(
            add_weight_decay(self.weight_decay, self.decay_rules),
            scale(self.decay, self.eps, self.initial_mean_square),
            optax.trace(self.momentum) if self.momentum else optax.identity(),
        )
