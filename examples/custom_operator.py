"""The layer `own_swish`, x * sigmoid(x), whose backward pass is written by hand: docs/losses.md."""

from typing import Literal

import jax
from jax import Array

from pipeline.core.registry import component
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.modules.apply_layers import computes


@jax.custom_vjp
def swish(x: Array) -> Array:
    return x * jax.nn.sigmoid(x)


def forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    gate = jax.nn.sigmoid(x)
    return x * gate, (x, gate)


def backward(kept: tuple[Array, Array], dout: Array) -> tuple[Array]:
    x, gate = kept
    return (dout * gate * (1 + x * (1 - gate)),)


swish.defvjp(forward, backward)


@component("layer")
class OwnSwish(LayerSpec):
    name: Literal["own_swish"] = "own_swish"


computes(OwnSwish)(lambda layer, x, context: swish(x))
