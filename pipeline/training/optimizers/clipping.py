"""Gradient clipping, before the optimizer sees the gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import PositiveFloat, model_validator

from pipeline.core.registry import Spec

if TYPE_CHECKING:
    import optax


class ClipSpec(Spec):
    """Clip by the global L2 norm of all gradients or element by element; both null: no clipping."""

    norm: PositiveFloat | None
    value: PositiveFloat | None

    @model_validator(mode="after")
    def _norm_or_value(self) -> Self:
        if self.norm is not None and self.value is not None:
            raise ValueError(
                f"norm {self.norm} and value {self.value} are both given; set one of them to null"
            )
        return self

    def build(self) -> optax.GradientTransformation:
        """Gradients -> clipped gradients; a stateless transformation."""
        import optax

        if self.norm is not None:
            return optax.clip_by_global_norm(self.norm)
        if self.value is not None:
            return optax.clip(self.value)
        return optax.identity()
