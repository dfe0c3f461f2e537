"""Optimizers by a matrix's row and column covariances: SOAP, which runs Adam in their eigenbases,
and Shampoo, which multiplies by their inverse roots."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from pipeline.core.registry import component
from pipeline.training.optimizers.first_order import DecayedOptimizer, MovingAverageRate

if TYPE_CHECKING:
    import optax


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
