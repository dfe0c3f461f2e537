"""The optimizer component `thor`."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from pipeline.core.registry import Seq, Spec, component
from pipeline.training.component_specs import OptimizerSpec
from pipeline.training.optimizers.first_order import MovingAverageRate, add_weight_decay

if TYPE_CHECKING:
    import optax

    from pipeline.training.features.curvature import CurvatureRule


class DampingSpec(Spec):
    """Damping of the curvature: initial * decay_rate^(t / decay_steps) after t updates."""

    initial: PositiveFloat
    decay_rate: Annotated[float, Field(gt=0, le=1)]
    decay_steps: PositiveInt

    def compute_damping(self, count: Any) -> Any:
        """Return the damping after `count` updates, a scalar or an array."""
        return self.initial * self.decay_rate ** (count / self.decay_steps)


@component("optimizer")
class Thor(OptimizerSpec):
    """MindSpore's THOR (Chen et al. 2021), for the kernels of dense and convolutional layers.

    A kernel's direction is v <- momentum * v + (F^-1 g + weight_decay * p), with F the damped
    curvature of its layer. For other parameters g replaces F^-1 g.
    """

    observes_layers: ClassVar[bool] = True
    name: Literal["thor"] = "thor"
    momentum: MovingAverageRate
    nesterov: bool
    damping: DampingSpec
    frequency: PositiveInt
    """Period, in updates, of computing and inverting the curvature, beginning with the first."""
    split_dim: PositiveInt
    """The most rows of a block. Larger factors are replaced by blocks along their diagonal."""
    split_indices: Seq[NonNegativeInt]
    """The numbers of the layers that end a group, counted from 0 in the order of the network.
    Devices exchange the curvature of a group at once. Layers after the last number are another
    group."""
    clip_norm: PositiveFloat | None
    """The largest L2 norm of F^-1 g + weight_decay * p for one array; null: no limit."""

    def build(self) -> optax.GradientTransformation:
        """Return a transformation: gradients -> v, or with `nesterov` (F^-1 g + weight_decay * p) +
        momentum * v."""
        import optax

        from pipeline.training.optimizers.thor.thor_transform import (
            clip_each_by_norm,
            scale_by_thor,
        )

        clip = optax.identity() if self.clip_norm is None else clip_each_by_norm(self.clip_norm)
        return optax.chain(
            scale_by_thor(self.damping.compute_damping, self.split_dim),
            add_weight_decay(self.weight_decay, self.decay_rules),
            clip,
            optax.trace(self.momentum, nesterov=self.nesterov),
        )

    def curvature(self) -> CurvatureRule:
        """Return the rule: second moments of each layer's inputs and output gradients."""
        from pipeline.training.features.curvature import CurvatureRule
        from pipeline.training.optimizers.thor.thor_transform import sum_moments

        return CurvatureRule(
            partial(sum_moments, split_dim=self.split_dim),
            period=self.frequency,
            group_ends=self.split_indices,
        )

    @field_validator("split_indices")
    @classmethod
    def _require_increasing(cls, indices: tuple[int, ...]) -> tuple[int, ...]:
        if any(after <= before for before, after in pairwise(indices)):
            raise ValueError("must increase, as in [26, 53]")
        return indices
