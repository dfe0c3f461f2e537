"""A network and a loss as a user writes them for eager mode: they choose by values, and print."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import Array

from pipeline.api import component
from pipeline.training.losses import LabelLoss


class Gate(nn.Module):
    """Scales an input whose mean is large by a parameter. Without `reads` it chooses in a trace."""

    reads: bool

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.constant(1.5), ())
        if not self.reads:
            return jnp.where(x.mean() > 0, x * scale, x)
        print("inputs", np.asarray(x).shape, f"{x.mean():.3f}")
        if float(x.mean()) > 0:
            x = x * scale
        return x


class Net(nn.Module):
    """A perceptron with a gate."""

    classes: int
    reads: bool = True

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = nn.Dense(8)(x.reshape(x.shape[0], -1))
        return nn.Dense(self.classes)(Gate(self.reads)(x))


@component("loss")
class Capped(LabelLoss):
    """Cross-entropy whose largest values have no gradient."""

    name: Literal["capped"] = "capped"
    cap: float = 2.0
    reads: bool = True

    def build_each(self) -> Any:
        """A function (logits, targets), both (..., classes) -> loss (...)."""

        def capped(logits: Array, targets: Array) -> Array:
            losses = optax.softmax_cross_entropy(logits, targets)
            if not self.reads:
                return jnp.minimum(losses, self.cap)
            print("losses", np.array(losses).shape)
            return jnp.minimum(losses, self.cap) if max(losses.tolist()) > self.cap else losses

        return capped
