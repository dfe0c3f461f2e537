"""Networks as a user writes them, to be loaded as a plug-in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import Array


class ConvNet(nn.Module):
    """Convolutions, pooling, batch norm and dropout, with a type of activations."""

    width: int = 8
    classes: int = 10
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = nn.relu(nn.Conv(self.width, (3, 3), dtype=self.dtype)(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.Conv(2 * self.width, (3, 3), use_bias=False, dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(x)
        x = nn.relu(x).mean((1, 2))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(x)


class OneConv(nn.Module):
    """The layers of ConvNet, but for its pooling, once each."""

    classes: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = nn.Conv(4, (3, 3), use_bias=False, dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(x)
        x = nn.Dropout(0.2, deterministic=not train)(nn.relu(x).mean((1, 2)))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


class TwoConvs(nn.Module):
    """Two convolutions with max pooling, and a dense layer."""

    classes: int
    width: int = 16

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        for width in (self.width, 2 * self.width):
            x = nn.max_pool(nn.relu(nn.Conv(width, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(self.classes)(x.reshape(x.shape[0], -1))


class Untyped(nn.Module):
    """A module without a type of its own, told by `deterministic`."""

    classes: int
    hidden: tuple[int, ...] = (16,)

    @nn.compact
    def __call__(self, x: Array, *, deterministic: bool) -> Array:
        x = x.reshape(x.shape[0], -1)
        for width in self.hidden:
            x = nn.Dropout(0.1, deterministic=deterministic)(nn.relu(nn.Dense(width)(x)))
        return nn.Dense(self.classes)(x)


class Volume(nn.Module):
    """Three-dimensional convolutions, which no lowering computes."""

    classes: int

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = x.reshape(x.shape[0], 8, 8, -1, 1)
        x = nn.relu(nn.Conv(2, (3, 3, 3), name="inner")(x))
        return nn.Dense(self.classes)(x.mean((1, 2, 3)))


class Caching(nn.Module):
    """A module with a collection that training does not carry."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        self.variable("cache", "seen", jnp.zeros, ())
        return nn.Dense(10)(x.mean((1, 2)))


class Summing(nn.Module):
    """A module that returns more than logits."""

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        logits = nn.Dense(10)(x.mean((1, 2)))
        return logits, logits.sum()


class Faulty(nn.Module):
    """A module with an error."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return nn.Dense(10)(x.flat_images)


class Masked(nn.Module):
    """A module that needs more than images."""

    @nn.compact
    def __call__(self, x: Array, mask: Array) -> Array:
        return nn.Dense(10)(x * mask)


class Halved(nn.Module):
    """A module with parameters in bfloat16."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return nn.Dense(10, param_dtype=jnp.bfloat16)(x.mean((1, 2)))


class NnxNet(nnx.Module):
    """The other kind of module, with layers in a list."""

    def __init__(
        self, width: int, classes: int, *, rngs: nnx.Rngs, dtype: Any = jnp.float32
    ) -> None:
        self.blocks = nnx.List(
            [
                nnx.Conv(1 if first else width, width, (3, 3), dtype=dtype, rngs=rngs)
                for first in (True, False)
            ]
        )
        self.norm = nnx.BatchNorm(width, momentum=0.9, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(width, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        for block in self.blocks:
            x = nnx.relu(block(x))
        return self.out(self.dropout(self.norm(x).mean((1, 2))))


def perceptron(classes: int, width: int = 16) -> Any:
    """A pair of functions over a list of pairs."""

    def init(key: Array, images: Array) -> Any:
        first, second = jax.random.split(key)
        inputs = images[0].size
        return [
            (jax.random.normal(first, (inputs, width)) / inputs**0.5, jnp.zeros(width)),
            (jax.random.normal(second, (width, classes)) / width**0.5, jnp.zeros(classes)),
        ]

    def apply(params: Any, images: Array, train: bool, key: Array) -> Array:
        x = images.reshape(images.shape[0], -1)
        (kernel, bias), (last, offset) = params
        x = jax.nn.relu(x @ kernel + bias)
        keep = jax.random.bernoulli(key, 0.9, x.shape)
        return (jnp.where(keep, x / 0.9, 0) if train else x) @ last + offset

    return init, apply


class Transformed:
    """Functions in the order of arguments of `haiku.transform`."""

    @staticmethod
    def init(rng: Array, *inputs: Array) -> Any:
        return {"linear": {"w": 0.1 * jax.random.normal(rng, (inputs[0].shape[-1], 10))}}

    @staticmethod
    def apply(params: Any, rng: Array, *inputs: Array) -> Array:
        return inputs[0].mean((1, 2)) @ params["linear"]["w"]


transformed = Transformed()


class TransformedWithState:
    """Functions in the order of arguments of `haiku.transform_with_state`."""

    @staticmethod
    def init(rng: Array, *inputs: Array) -> Any:
        state = {"norm": {"mean": jnp.zeros(inputs[0].shape[-1])}}
        return Transformed.init(rng, *inputs), state

    @staticmethod
    def apply(params: Any, state: Any, rng: Array, *inputs: Array) -> Any:
        x = inputs[0].mean((1, 2))
        mean = 0.9 * state["norm"]["mean"] + 0.1 * x.mean(0)
        return (x - mean) @ params["linear"]["w"], {"norm": {"mean": mean}}


transformed_with_state = TransformedWithState()


def keyless(classes: int) -> Any:
    """Functions of which apply takes no images."""
    return (lambda key, images: jnp.zeros(classes)), (lambda params: params)


def number() -> int:
    return 3
