"""Optimizers of whole arrays: LARS, LAMB and Muon scale the update of each array; SOAP and Shampoo
use the covariances of a matrix's rows and columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from pipeline.core.registry import component
from pipeline.training.optimizers.first_order import (
    AdamBase,
    DecayedOptimizer,
    MovingAverageRate,
    add_weight_decay,
)

if TYPE_CHECKING:
    import optax


@component("optimizer")
class Lars(DecayedOptimizer):
    """SGD with momentum and a separate rate for each array (You et al. 2017).

    v <- momentum * v + rate * d, with d = g + weight_decay * p and rate = trust * |p| / (|d| +
    eps). The rate is 1 if |p| or |d| is 0. MindSpore's LARS and the paper divide by |g| +
    weight_decay * |p| + eps; without weight decay this is the same. As in MindSpore, v doesn't
    include the learning rate.
    """

    name: Literal["lars"] = "lars"
    momentum: MovingAverageRate
    nesterov: bool
    trust: PositiveFloat
    eps: NonNegativeFloat

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        import optax

        return (
            optax.scale_by_trust_ratio(trust_coefficient=self.trust, eps=self.eps),
            optax.trace(self.momentum, nesterov=self.nesterov),
        )


@component("optimizer")
class Lamb(AdamBase):
    """AdamW with a separate rate for each array (You et al. 2020): |p| / |d|, for AdamW's direction
    d. The rate is 1 if |p| or |d| is 0."""

    name: Literal["lamb"] = "lamb"

    def build(self) -> optax.GradientTransformation:
        import optax

        return optax.chain(
            optax.scale_by_adam(self.b1, self.b2, self.eps),
            add_weight_decay(self.weight_decay, self.decay_rules),
            optax.scale_by_trust_ratio(),
        )


@component("optimizer")
class Muon(DecayedOptimizer):
    """Orthogonalised momentum for kernels (Jordan 2024), AdamW for other parameters.

    The kernel of a convolution is used as a matrix (height * width * channels, features). Weight
    decay is decoupled. With `rms` the same learning rate suits kernels and other parameters (Liu et
    al. 2025, sec. 2.2).
    """

    decoupled: ClassVar[bool] = True
    name: Literal["muon"] = "muon"
    momentum: MovingAverageRate
    nesterov: bool
    """Whether both optimizers use Nesterov momentum. AdamW then is NAdamW."""
    iterations: PositiveInt
    """Number of Newton-Schulz iterations. After five, the direction's singular values are between
    0.7 and 1.2."""
    rms: PositiveFloat | None
    """The root mean square of a kernel's direction; null: the direction is the orthogonal matrix
    times sqrt(max(1, outputs / inputs))."""
    b1: MovingAverageRate
    b2: MovingAverageRate
    """Shares of Adam's averages that an update keeps, for all parameters except kernels."""
    eps: PositiveFloat

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        import optax

        muon = optax.contrib.muon(
            # optax returns -learning_rate * direction; here the learning rate is applied later.
            learning_rate=-1.0,
            ns_steps=self.iterations,
            beta=self.momentum,
            eps=self.eps,
            nesterov=self.nesterov,
            adam_b1=self.b1,
            adam_b2=self.b2,
            muon_weight_dimension_numbers=_find_matrix_axes,
            consistent_rms=self.rms,
        )
        return (muon,)


def _find_matrix_axes(params: Any) -> Any:
    """Return the input and output axes of each kernel of 2 or 4 axes; None for other parameters."""
    import jax
    from optax.contrib import MuonDimensionNumbers

    def find_axes(path: Any, param: Any) -> MuonDimensionNumbers | None:
        if path[-1] != jax.tree_util.DictKey("kernel") or param.ndim not in (2, 4):
            return None
        *input_axes, output_axis = range(param.ndim)
        return MuonDimensionNumbers(tuple(input_axes), (output_axis,))

    return jax.tree.map_with_path(find_axes, params)


@component("optimizer")
class Soap(DecayedOptimizer):
    """Adam in the eigenbases of Shampoo's factors (Vyas et al. 2024, arXiv 2409.11321).

    Each axis of an array of two or more axes has a factor, the average of G G' with G's rows along
    the axis. The gradient is rotated into the eigenbases of the factors, m and v are Adam's
    averages there, and the direction sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps) is rotated
    back. The first gradient only initialises the bases. Afterwards a step of the power method
    follows every `period` updates. Other arrays have Adam, also without a first update. Weight
    decay is decoupled, of the parameters before the update.
    """

    decoupled: ClassVar[bool] = True
    name: Literal["soap"] = "soap"
    b1: MovingAverageRate
    b2: MovingAverageRate
    factor_share: MovingAverageRate
    """Share of a factor that an update keeps."""
    eps: PositiveFloat
    period: PositiveInt
    """Number of updates between changes of the bases."""
    largest_axis: PositiveInt
    """Axes with more elements keep their basis."""

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        # Imported here, since recipes are checked without jax.
        from pipeline.training.optimizers.kronecker_transforms import scale_by_soap

        return (scale_by_soap(self),)


@component("optimizer")
class Shampoo(DecayedOptimizer):
    """Shampoo with Adam's step sizes (Gupta et al. 2018; in blocks: Shi et al. 2023, arXiv
    2309.06497).

    An array of two or more axes is a matrix, whose columns are its last axis, divided into blocks
    G. Each block keeps averages L of G G' and R of G' G, by `b2`, and the direction is
    (L + eps)^(-1/4) m (R + eps)^(-1/4), with Adam's average m, times the norm of the block's
    direction by Adam over its own. Averages are without their bias towards 0. Roots are computed
    every `period` updates; before the first, and for other arrays, directions are Adam's. Weight
    decay is decoupled.
    """

    decoupled: ClassVar[bool] = True
    name: Literal["shampoo"] = "shampoo"
    b1: MovingAverageRate
    b2: MovingAverageRate
    eps: PositiveFloat
    """Added to eigenvalues of L and R."""
    graft_eps: PositiveFloat
    """Adam's small constant."""
    period: PositiveInt
    """Number of updates between computations of the roots."""
    block: PositiveInt
    """Most rows and columns of a block. Time grows with its cube, so larger is slower."""

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        from pipeline.training.optimizers.kronecker_transforms import scale_by_shampoo

        return (scale_by_shampoo(self),)
