"""A training step of two products, with sizes that are multiples of 16 and that aren't."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

WEIGHTS = {"up": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((64, 50, 512), jnp.float32)
ALIGNED = jax.ShapeDtypeStruct((64, 48, 512), jnp.float32)


def step(weights: Any, batch: Any) -> Any:
    def loss(weights: Any) -> Any:
        with jax.named_scope("layer"):
            hidden = jax.nn.softmax(batch @ weights["up"], axis=-1)
        return jnp.mean((hidden @ weights["up"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients), value
