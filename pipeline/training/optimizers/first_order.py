"""Gradient clipping, weight decay, and optimizers: SGD, momentum, Adam and AdamW."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from pipeline.core.host.tree_paths import format_path, list_leaf_paths
from pipeline.core.registry import Spec, component
from pipeline.models.layers.path_patterns import covers, require_covered
from pipeline.training.component_specs import DecayRule, OptimizerSpec

if TYPE_CHECKING:
    import optax

MovingAverageRate = Annotated[float, Field(ge=0, lt=1)]
"""The share of a moving average, or of a momentum, that an update keeps."""


class DecayedOptimizer(OptimizerSpec):
    """Base of the optimizers that are a chain of weight decay and optax's transformations."""

    decoupled: ClassVar[bool] = False
    """Whether weight decay comes after the transformations, as in AdamW. Else it is an L2 penalty,
    added to the gradient."""

    @abstractmethod
    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        """Return the transformations of the chain, without weight decay."""

    def build(self) -> optax.GradientTransformation:
        import optax

        decay = add_weight_decay(self.weight_decay, self.decay_rules)
        if self.decoupled:
            return optax.chain(*self.transformations(), decay)
        return optax.chain(decay, *self.transformations())


class AdamBase(DecayedOptimizer):
    """Base of the variants of Adam. m is the moving average of the gradient g, v of g^2 or of
    another size of g; `b1` and `b2` are the shares that they keep, `eps` is the constant in the
    denominator. m_hat and v_hat are m and v without their bias towards 0."""

    b1: MovingAverageRate
    b2: MovingAverageRate
    eps: PositiveFloat

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        import optax

        return (optax.scale_by_adam(self.b1, self.b2, self.eps),)


@component("optimizer")
class Sgd(OptimizerSpec):
    """Plain gradient descent: p <- p - lr * (g + weight_decay * p)."""

    name: Literal["sgd"] = "sgd"

    def build(self) -> optax.GradientTransformation:
        return add_weight_decay(self.weight_decay, self.decay_rules)


@component("optimizer")
class Momentum(DecayedOptimizer):
    """MindSpore's Momentum: v <- momentum * v + (g + weight_decay * p); p <- p - lr * v. With
    `nesterov` the direction is (g + weight_decay * p) + momentum * v."""

    name: Literal["momentum"] = "momentum"
    momentum: MovingAverageRate
    nesterov: bool

    def transformations(self) -> tuple[optax.GradientTransformation, ...]:
        import optax

        return (optax.trace(self.momentum, nesterov=self.nesterov),)


@component("optimizer")
class Adam(AdamBase):
    """Adam (Kingma & Ba 2015, algorithm 1): m_hat / (sqrt(v_hat) + eps); weight decay is L2.

    `eps` is added to the bias-corrected root sqrt(v / (1 - b2^t)), as in optax and PyTorch.
    MindSpore adds eps to the uncorrected sqrt(v). That has the effect of eps / sqrt(1 - b2^t) here:
    for b2 = 0.999 it is 32 times larger at step 1, and 26 % larger at step 1000.
    """

    name: Literal["adam"] = "adam"


@component("optimizer")
class AdamW(AdamBase):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019).

    The direction is m_hat / (sqrt(v_hat) + eps) + weight_decay * p. MindSpore's AdamWeightDecay
    differs: it has no bias corrections.
    """

    decoupled: ClassVar[bool] = True
    name: Literal["adamw"] = "adamw"


def add_weight_decay(default: float, rules: Sequence[DecayRule]) -> optax.GradientTransformation:
    """Return a transformation that adds rate * parameter to updates. The rate comes from the last
    rule that covers the parameter, else `default`.

    A rule's pattern covers a parameter, such as "conv_0/kernel", or a scope around it. A * matches
    slashes too. `init` raises ValueError for a rule that covers nothing, and `update` if it is
    called without `params`.
    """
    import jax
    import optax

    def init(params: optax.Params) -> optax.EmptyState:
        paths = [tuple(path.split("/")) for path in list_leaf_paths(params)]
        require_covered([rule.pattern for rule in rules], paths, "parameters", "decay_rules: ")
        return optax.EmptyState()

    def add_decay(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
        scopes = tuple(format_path(path).split("/"))
        rates = [rule.weight_decay for rule in rules if covers(rule.pattern, scopes)]
        rate = rates[-1] if rates else default
        return update + rate * param if rate else update

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        if params is None:
            raise ValueError("weight decay needs the parameters: call update(grads, state, params)")
        return jax.tree.map_with_path(add_decay, updates, params), state

    return optax.GradientTransformation(init, update)


class ClipSpec(Spec):
    """Clipping by the L2 norm of all gradients, or of each value; both null: no clipping."""

    norm: PositiveFloat | None
    value: PositiveFloat | None

    @model_validator(mode="after")
    def _require_one_limit(self) -> Self:
        if self.norm is not None and self.value is not None:
            raise ValueError(
                f"norm = {self.norm} and value = {self.value}: at least one must be null"
            )
        return self

    def build(self) -> optax.GradientTransformation:
        """Return a stateless transformation: gradients -> clipped gradients."""
        import optax

        if self.norm is not None:
            return optax.clip_by_global_norm(self.norm)
        if self.value is not None:
            return optax.clip(self.value)
        return optax.identity()
