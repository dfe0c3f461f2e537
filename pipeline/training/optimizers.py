"""Optimizers: how gradients become a descent direction (L-03)."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from pipeline.registry import part
from pipeline.training.spec import DecayRule, OptimizerSpec

if TYPE_CHECKING:
    import optax

MovingAverageRate = Annotated[float, Field(ge=0, lt=1)]


@part("optimizer")
class Sgd(OptimizerSpec):
    """Plain gradient descent: p <- p - lr * (g + weight_decay * p)."""

    name: Literal["sgd"] = "sgd"

    def build(self) -> optax.GradientTransformation:
        """The direction g + weight_decay * p."""
        return add_weight_decay(self.weight_decay, self.decay_rules)


@part("optimizer")
class Momentum(OptimizerSpec):
    """MindSpore's Momentum: v <- momentum * v + (g + weight_decay * p); p <- p - lr * v."""

    name: Literal["momentum"] = "momentum"
    momentum: MovingAverageRate
    nesterov: bool

    def build(self) -> optax.GradientTransformation:
        """The direction v or, with nesterov, (g + weight_decay * p) + momentum * v."""
        import optax

        return optax.chain(
            add_weight_decay(self.weight_decay, self.decay_rules),
            optax.trace(self.momentum, nesterov=self.nesterov),
        )


@part("optimizer")
class Adam(OptimizerSpec):
    """Adam (Kingma & Ba 2015, algorithm 1), weight decay added to the gradient as an L2 penalty.

    `eps` is added to the bias-corrected root sqrt(v / (1 - b2^t)), as in optax and PyTorch.
    MindSpore adds it to the uncorrected sqrt(v), which is eps / sqrt(1 - b2^t) here: for
    b2 = 0.999, 32 times larger at step 1, 26 % larger at step 1000.
    """

    name: Literal["adam"] = "adam"
    b1: MovingAverageRate
    b2: MovingAverageRate
    eps: PositiveFloat

    def build(self) -> optax.GradientTransformation:
        """The direction m_hat / (sqrt(v_hat) + eps), moments of g + weight_decay * p."""
        import optax

        return optax.chain(
            add_weight_decay(self.weight_decay, self.decay_rules),
            optax.scale_by_adam(self.b1, self.b2, self.eps),
        )


@part("optimizer")
class AdamW(OptimizerSpec):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019).

    MindSpore's AdamWeightDecay differs: it leaves out the bias corrections.
    """

    name: Literal["adamw"] = "adamw"
    b1: MovingAverageRate
    b2: MovingAverageRate
    eps: PositiveFloat

    def build(self) -> optax.GradientTransformation:
        """The direction m_hat / (sqrt(v_hat) + eps) + weight_decay * p, moments of g."""
        import optax

        return optax.chain(
            optax.scale_by_adam(self.b1, self.b2, self.eps),
            add_weight_decay(self.weight_decay, self.decay_rules),
        )


def add_weight_decay(default: float, rules: Sequence[DecayRule]) -> optax.GradientTransformation:
    """Add rate * parameter to updates; the rate is the last matching rule's, or else `default`.

    A rule's glob must match the whole path, such as "conv_0/kernel", and its * crosses slashes.
    `init` raises ValueError when a pattern matches no parameter, `update` when it lacks `params`.
    """
    import jax
    import optax

    def init(params: optax.Params) -> optax.EmptyState:
        _require_matches(
            rules, [joined_path(path) for path, _ in jax.tree.leaves_with_path(params)]
        )
        return optax.EmptyState()

    def decayed(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
        rate = _decay_rate(joined_path(path), default, rules)
        return update + rate * param if rate else update

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        if params is None:
            raise ValueError("weight decay needs the parameters: call update(grads, state, params)")
        return jax.tree.map_with_path(decayed, updates, params), state

    return optax.GradientTransformation(init, update)


def joined_path(path: Any) -> str:
    """The path of a leaf as jax gives it, as text: "conv_0/kernel"."""
    import jax

    return jax.tree_util.keystr(path, simple=True, separator="/")


def _decay_rate(path: str, default: float, rules: Sequence[DecayRule]) -> float:
    matching = [rule.weight_decay for rule in rules if fnmatchcase(path, rule.pattern)]
    return matching[-1] if matching else default


def _require_matches(rules: Sequence[DecayRule], paths: Sequence[str]) -> None:
    for rule in rules:
        if not any(fnmatchcase(path, rule.pattern) for path in paths):
            shown = ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")
            raise ValueError(
                f"decay rule {rule.pattern!r} matches none of the {len(paths)} parameters: {shown}"
            )
