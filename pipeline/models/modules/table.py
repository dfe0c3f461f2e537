"""The computation of the network for rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

from pipeline.data.tables.encode_table import TableLayout
from pipeline.data.targets import Targets

if TYPE_CHECKING:
    from pipeline.models.networks.table import TableModel

ACTIVATIONS = {"relu": jax.nn.relu, "selu": jax.nn.selu, "mish": jax.nn.mish}
LARGEST_EXPONENT = 12.0
"""Largest logarithm of a positive number's ratio to the mean."""


class TableModule(nn.Module):
    """Rows to the outputs of each member, and in evaluation to those of the ensemble.

    A parameter that should learn slower or faster by a factor f is stored divided by f: Adam moves
    every stored parameter alike. Weights are stored times the square root of their inputs, so that
    a kernel of N(0, 1) keeps the variance (NTK parametrisation, as RealMLP).
    """

    lowers_itself: ClassVar[bool] = True
    spec: TableModel
    layout: TableLayout
    targets: Targets
    dtype: str
    """Type that the dense layers compute in."""

    @nn.compact
    def __call__(self, rows: Array, train: bool) -> Array:
        """Return outputs float32 (batch, members, C) in training, else (batch, C). One member has
        (batch, C) in both. `rows` are (batch, columns), as `FittedTable` has them."""
        x, chunks = self._embed(rows)
        x = jnp.broadcast_to(x[:, None], (len(x), self.spec.members, x.shape[-1]))
        for number, width in enumerate(self.spec.hidden):
            x = self._multiply(f"dense_{number}", x, width, chunks if number == 0 else None)
            x = self._activate(f"dense_{number}", x)
            x = nn.Dropout(self.spec.dropout, deterministic=not train)(x)
        outputs = self._compute_heads(x)
        if self.targets.is_positive:
            outputs = self._exponentiate(outputs)
        if self.spec.members == 1:
            return outputs[:, 0]
        return outputs if train else self._average(outputs)

    # flax adds the names of methods to profiles, as scopes.
    def _embed(self, rows: Array) -> tuple[Array, tuple[int, ...]]:
        """Return the features of rows, (batch, features), and the number of features of each
        column."""
        parts: list[Array] = []
        numbers = rows[:, : self.layout.numbers]
        if self.layout.numbers:
            parts += self._embed_numbers(numbers)
        for position, size in enumerate(self.layout.categories):
            # 0 is a category that the training split lacks.
            category = rows[:, self.layout.numbers + position].astype(jnp.int32)
            parts.append(self._embed_category(f"category_{position}", category, size))
        x = jnp.concatenate(parts, axis=1)
        if self.spec.scale_factor:
            scale = self.param("scale", nn.initializers.zeros, (x.shape[1],), jnp.float32)
            x = x * (1 + self.spec.scale_factor * scale)
        return x.astype(self.dtype), tuple(part.shape[1] for part in parts)

    def _embed_numbers(self, numbers: Array) -> list[Array]:
        """Return PBLD features of each number: [V cos(2 pi w x + b) + c, x] (RealMLP, sec. 3)."""
        spec, count = self.spec, self.layout.numbers
        if not spec.frequencies:
            return [numbers[:, [column]] for column in range(count)]
        slow = spec.slow_factor
        shape = (count, spec.frequencies)
        normal = nn.initializers.normal(spec.frequency_scale / slow)
        frequencies = slow * self.param("frequency", normal, shape, jnp.float32)
        phases = slow * self.param("phase", _draw_uniform(np.pi / slow), shape, jnp.float32)
        waves = jnp.cos(2 * jnp.pi * frequencies * numbers[..., None] + phases)
        uniform = _draw_uniform(1 / (spec.frequencies**0.5 * slow))
        shape = (count, spec.frequencies, spec.number_size)
        weights = slow * self.param("wave_kernel", uniform, shape, jnp.float32)
        biases = slow * self.param("wave_bias", uniform, (count, shape[2]), jnp.float32)
        features = jnp.einsum("bnf,nfd->bnd", waves, weights) + biases
        features = jnp.concatenate([features, numbers[..., None]], axis=2)
        return [features[:, column] for column in range(count)]

    def _embed_category(self, name: str, category: Array, size: int) -> Array:
        if size <= 2:
            return jnp.array([0.0, -1.0, 1.0])[category][:, None]
        if size <= self.spec.one_hot_up_to:
            return jax.nn.one_hot(category - 1, size)
        shape = (size + 1, self.spec.category_size)
        vectors = self.param(name, nn.initializers.normal(1.0), shape, jnp.float32)
        return vectors[category]

    def _multiply(
        self, name: str, x: Array, width: int, chunks: tuple[int, ...] | None
    ) -> Array:
        """Return ((x r) W) s + b for (batch, members, inputs), with r, s and b of each member
        (TabM). In the first layer r differs at first, by a number for each column of the table."""
        members, inputs = x.shape[1:]
        kernel = self.param(f"{name}_kernel", nn.initializers.normal(1.0), (inputs, width))
        if members > 1:
            ones = nn.initializers.ones
            draw = ones if chunks is None else _draw_by_column(chunks, bool(self.spec.frequencies))
            before = self.param(f"{name}_before", draw, (members, inputs), jnp.float32)
            x = x * before.astype(x.dtype)
        x = x @ (kernel / inputs**0.5).astype(x.dtype)
        if members > 1:
            after = self.param(f"{name}_after", nn.initializers.ones, (members, width))
            x = x * after.astype(x.dtype)
        slow = self.spec.slow_factor
        draw_bias = _repeat(nn.initializers.normal(1.0 / slow))
        bias = self.param(f"{name}_bias", draw_bias, (members, width), jnp.float32)
        return x + (slow * bias).astype(x.dtype)

    def _activate(self, name: str, x: Array) -> Array:
        activated = ACTIVATIONS[self.spec.activation](x)
        if not self.spec.parametric:
            return activated
        share = self.param(f"{name}_share", nn.initializers.zeros, (x.shape[-1],), jnp.float32)
        return x + (1 + self.spec.slow_factor * share).astype(x.dtype) * (activated - x)

    def _compute_heads(self, x: Array) -> Array:
        """Return a separate linear layer of each member, float32 (batch, members, C)."""
        members, inputs = x.shape[1:]
        shape = (members, inputs, len(self.targets))
        kernel = self.param("head_kernel", nn.initializers.normal(1.0), shape, jnp.float32)
        outputs = jnp.einsum("bki,kio->bko", x, (kernel / inputs**0.5).astype(x.dtype))
        zeros = nn.initializers.zeros
        bias = self.param("head_bias", zeros, (members, shape[2]), jnp.float32)
        return outputs.astype(jnp.float32) + self.spec.slow_factor * bias

    def _exponentiate(self, outputs: Array) -> Array:
        """Return numbers that are mean * exp(output), standardised as the labels are."""
        ratio = jnp.array(self.targets.mean) / jnp.array(self.targets.std)
        limited = jnp.clip(outputs, -LARGEST_EXPONENT, LARGEST_EXPONENT)
        return (ratio * jnp.expm1(limited)).astype(jnp.float32)

    def _average(self, outputs: Array) -> Array:
        """Return the mean over members of probabilities, as logits, or of numbers."""
        if self.targets.task == "classification":
            shares = jax.nn.log_softmax(outputs)
            return jax.nn.logsumexp(shares, axis=1) - np.float32(np.log(outputs.shape[1]))
        if self.targets.task == "multi_label":
            yes = jax.nn.logsumexp(jax.nn.log_sigmoid(outputs), axis=1)
            return yes - jax.nn.logsumexp(jax.nn.log_sigmoid(-outputs), axis=1)
        return outputs.mean(axis=1)


def _draw_uniform(limit: float) -> jax.nn.initializers.Initializer:
    """Return an initializer of U(-limit, limit)."""

    def draw(key: Array, shape: tuple[int, ...], dtype: type = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return draw


def _draw_by_column(chunks: tuple[int, ...], is_normal: bool) -> jax.nn.initializers.Initializer:
    """Return an initializer (members, features) with one number for each column's features: N(0, 1)
    if numbers are embedded, else -1 or 1 (TabM)."""

    def draw(key: Array, shape: tuple[int, ...], dtype: type = jnp.float32) -> Array:
        numbers = (shape[0], len(chunks))
        if is_normal:
            values = jax.random.normal(key, numbers, dtype)
        else:
            values = jax.random.rademacher(key, numbers, dtype)
        return jnp.repeat(values, np.array(chunks), axis=1)

    return draw


def _repeat(draw: jax.nn.initializers.Initializer) -> jax.nn.initializers.Initializer:
    """Return an initializer with the same values for every member, the first axis."""

    def repeat(key: Array, shape: tuple[int, ...], dtype: type = jnp.float32) -> Array:
        return jnp.broadcast_to(draw(key, shape[1:], dtype), shape)

    return repeat
