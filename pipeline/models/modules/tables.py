"""The computations of the layers for rows of a table, of ensembles that share weights, and of Wide
& Deep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

from pipeline.data.tables.encode_table import FIELD_COLUMNS
from pipeline.models.layers import tables
from pipeline.models.layers.model_spec import Initializer, InitSpec, LayerSpec
from pipeline.models.layers.precision import TypeRule
from pipeline.models.layers.standard import Dense, Relu
from pipeline.models.modules.apply_layers import (
    LayerContext,
    apply_layers,
    computes,
    require_number,
)

ACTIVATIONS = {"relu": jax.nn.relu, "selu": jax.nn.selu, "mish": jax.nn.mish}
LARGEST_EXPONENT = 12.0
"""Largest logarithm of a positive number's ratio to the mean."""
Draw = Callable[..., Array]
"""An initializer: (key, shape, dtype) -> array."""
_ONES, _ZEROS, _NORMAL = (
    nn.initializers.ones,
    nn.initializers.zeros,
    nn.initializers.normal(1.0),
)


@computes(tables.TableColumns)
class _TableColumns(nn.Module):
    layer: tables.TableColumns
    context: LayerContext

    @nn.compact
    def __call__(self, rows: Array) -> Array:
        """Return the features of rows, (batch, features), in the context's type. Raises ValueError
        for rows of another number of columns."""
        layer = self.layer
        columns = layer.numbers + len(layer.categories)
        if rows.ndim != 2 or rows.shape[1] != columns:
            raise ValueError(
                f"{self.context}: shape {rows.shape} reaches the layer; must be (batch, {columns})"
            )
        rows = rows.astype(jnp.float32)
        parts = [self._embed_numbers(rows[:, : layer.numbers])] if layer.numbers else []
        for position, size in enumerate(layer.categories):
            # 0 is a category that the training split lacks.
            category = rows[:, layer.numbers + position].astype(jnp.int32)
            parts.append(self._embed_category(f"category_{position}", category, size))
        x = jnp.concatenate(parts, axis=1)
        if layer.scale_factor:
            scale = self.param("scale", _ZEROS, (x.shape[1],), jnp.float32)
            x = x * (1 + layer.scale_factor * scale)
        return x.astype(self.context.dtype)

    # flax adds the names of methods to profiles, as scopes.
    def _embed_numbers(self, numbers: Array) -> Array:
        """Return PBLD features of each number, the number and its bins, column by column."""
        layer = self.layer
        cells = numbers[..., None]
        parts = [self._compute_waves(cells)] if layer.frequencies else []
        parts.append(cells)
        if layer.bins:
            edges = list_bin_edges(layer.bins)
            parts.append(jnp.clip((cells - edges[:-1]) / np.diff(edges), 0, 1))
        return jnp.concatenate(parts, axis=2).reshape((numbers.shape[0], -1))

    def _compute_waves(self, cells: Array) -> Array:
        """Return V cos(2 pi w x + b) + c of numbers (batch, columns, 1)."""
        layer = self.layer
        count, slow = layer.numbers, layer.slow_factor
        shape = (count, layer.frequencies)
        draw_frequency = nn.initializers.normal(layer.frequency_scale / slow)
        frequencies = slow * self.param("frequency", draw_frequency, shape, jnp.float32)
        phases = slow * self.param("phase", _draw_uniform(np.pi / slow), shape, jnp.float32)
        waves = jnp.cos(2 * jnp.pi * frequencies * cells + phases)
        uniform = _draw_uniform(1 / (layer.frequencies**0.5 * slow))
        size = layer.number_size
        weights = slow * self.param("wave_kernel", uniform, (*shape, size), jnp.float32)
        biases = slow * self.param("wave_bias", uniform, (count, size), jnp.float32)
        return jnp.einsum("bnf,nfd->bnd", waves, weights) + biases

    def _embed_category(self, name: str, category: Array, size: int) -> Array:
        if self.layer.is_one_hot(size):
            return jnp.asarray(list_one_hot_rows(size))[category]
        shape = (size + 1, self.layer.category_size)
        vectors = self.param(name, _NORMAL, shape, jnp.float32)
        return vectors[category]


def list_one_hot_rows(size: int) -> np.ndarray:
    """Return the features of each category of a column, and first of an unknown one: float32 (3, 1)
    for at most two values, else (size + 1, size)."""
    if size <= 2:
        return np.array([[0.0], [-1.0], [1.0]], np.float32)
    return np.concatenate([np.zeros((1, size)), np.eye(size)]).astype(np.float32)


def list_bin_edges(bins: int) -> np.ndarray:
    """Return the edges of bins, float32 (bins + 1,): from -3 to 3, the range of clipped numbers,
    with quantiles of a normal distribution, whose quartiles are 1 apart, between."""
    normal = NormalDist(0, 1 / (NormalDist().inv_cdf(0.75) * 2))
    inner = [normal.inv_cdf(number / bins) for number in range(1, bins)]
    return np.array([-3.0, *inner, 3.0], np.float32)


@computes(tables.MemberDense)
class _MemberDense(nn.Module):
    layer: tables.MemberDense
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        layer, members = self.layer, self.layer.members
        if x.ndim == 2:
            x = jnp.broadcast_to(x[:, None], (x.shape[0], members, x.shape[1]))
        if x.ndim != 3 or x.shape[1] != members:
            raise ValueError(
                f"{self.context}: shape {x.shape} reaches the layer; must be (batch, inputs) or "
                f"(batch, {members}, inputs)"
            )
        inputs = x.shape[2]
        if layer.columns and sum(layer.columns) != inputs:
            raise ValueError(
                f"{self.context}: columns have {sum(layer.columns)} features; must have the "
                f"{inputs} that reach the layer"
            )
        kernel = self.param("kernel", _NORMAL, (inputs, layer.features), jnp.float32)
        if members > 1:
            draw = _draw_by_column(layer.columns, layer.draws_signs) if layer.columns else _ONES
            before = self.param("before", draw, (members, inputs), jnp.float32)
            x = x * before.astype(x.dtype)
        x = x @ (kernel / inputs**0.5).astype(x.dtype)
        if members > 1:
            after = self.param("after", _ONES, (members, layer.features), jnp.float32)
            x = x * after.astype(x.dtype)
        draw_bias = _repeat(nn.initializers.normal(1.0 / layer.slow_factor))
        bias = self.param("bias", draw_bias, (members, layer.features), jnp.float32)
        x = x + (layer.slow_factor * bias).astype(x.dtype)
        activated = ACTIVATIONS[layer.activation](x)
        if not layer.parametric:
            return activated
        share = self.param("share", _ZEROS, (layer.features,), jnp.float32)
        return x + (1 + layer.slow_factor * share).astype(x.dtype) * (activated - x)


@computes(tables.MemberHead)
class _MemberHead(nn.Module):
    layer: tables.MemberHead
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if x.ndim != 3:
            raise ValueError(
                f"{self.context}: shape {x.shape} reaches the layer; must be (batch, members, "
                "inputs): put member_dense before it"
            )
        members, inputs = x.shape[1:]
        outputs = require_number(self.layer.features, self.context)
        kernel = self.param("kernel", _ZEROS, (members, inputs, outputs), jnp.float32)
        bias = self.param("bias", _ZEROS, (members, outputs), jnp.float32)
        y = jnp.einsum("bki,kio->bko", x, (kernel / inputs**0.5).astype(x.dtype))
        y = y.astype(jnp.float32) + self.layer.slow_factor * bias
        if self.layer.ratios:
            limited = jnp.clip(y, -LARGEST_EXPONENT, LARGEST_EXPONENT)
            y = jnp.asarray(self.layer.ratios, jnp.float32) * jnp.expm1(limited)
        if members == 1:
            return y[:, 0]
        return y if self.context.train else average_members(y, self.layer.average)


def average_members(outputs: Array, average: str) -> Array:
    """Return the mean over members of probabilities, as logits, or of numbers: (batch, members, C)
    -> (batch, C)."""
    if average == "probabilities":
        shares = jax.nn.log_softmax(outputs)
        return jax.nn.logsumexp(shares, axis=1) - np.float32(np.log(outputs.shape[1]))
    if average == "labels":
        yes = jax.nn.logsumexp(jax.nn.log_sigmoid(outputs), axis=1)
        return yes - jax.nn.logsumexp(jax.nn.log_sigmoid(-outputs), axis=1)
    return outputs.mean(axis=1)


def _draw_uniform(limit: float) -> Draw:
    """Return an initializer of U(-limit, limit)."""

    def draw(key: Array, shape: Sequence[int], dtype: type = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return draw


def _draw_by_column(columns: Sequence[int], draws_signs: bool) -> Draw:
    """Return an initializer (members, features) with one number for each column's features: -1 or
    1, or N(0, 1)."""

    def draw(key: Array, shape: Sequence[int], dtype: type = jnp.float32) -> Array:
        numbers = (shape[0], len(columns))
        sample = jax.random.rademacher if draws_signs else jax.random.normal
        return jnp.repeat(sample(key, numbers, dtype), np.array(columns), axis=1)

    return draw


def _repeat(draw: Draw) -> Draw:
    """Return an initializer with the same values for every member, the first axis."""

    def repeat(key: Array, shape: Sequence[int], dtype: type = jnp.float32) -> Array:
        return jnp.broadcast_to(draw(key, shape[1:], dtype), shape)

    return repeat


class WideDeepNetwork(nn.Module):
    """A linear model of sparse features beside dense layers on their embeddings."""

    lowers_itself: ClassVar[bool] = True
    classes: int
    vocabulary: int
    embedding: int
    hidden: tuple[int, ...]
    table_init: Initializer
    initializers: InitSpec
    dtype: str
    """Type that the dense layers compute in."""
    rules: tuple[TypeRule, ...] = ()
    """Rules for layers that compute in another type."""

    @nn.compact
    def __call__(self, inputs: Mapping[str, Array], train: bool) -> Array:
        """Return logits (batch, 2), float32, or (batch, 1) for a prediction of a number or label.

        Inputs are, for each field, the index of its feature, `field_index` int32 (batch, fields),
        and the feature's value, `field_value` (batch, fields). The first of two logits is 0, so
        softmax is the logistic function of the second. Indices from `vocabulary` on lead to NaN,
        and one below 0 counts from the end. Raises ValueError for inputs of other shapes, and for
        more than two classes.
        """
        if self.classes > 2:
            raise ValueError(
                f"separates 2 classes, and the dataset has {self.classes}; labels must be 0 and 1"
            )
        feature_numbers, values = (inputs[name] for name in FIELD_COLUMNS)
        if feature_numbers.ndim != 2 or feature_numbers.shape != values.shape:
            raise ValueError(
                f"{' and '.join(FIELD_COLUMNS)} have the shapes {feature_numbers.shape} and "
                f"{values.shape}; both must be (batch, fields)"
            )
        feature_numbers = feature_numbers.astype(jnp.int32)
        logit = self._wide(feature_numbers, values) + self._deep(feature_numbers, values, train)
        if self.classes == 1:
            return logit
        return jnp.concatenate([jnp.zeros_like(logit), logit], axis=1)

    # flax adds the names of methods to profiles, as scopes.
    def _table(self, name: str, features: int) -> Array:
        shape = (self.vocabulary, features)
        return self.param(name, self.table_init.build(), shape, jnp.float32)

    def _wide(self, feature_numbers: Array, values: Array) -> Array:
        """Return the sum (batch, 1) of every feature's value times its weight."""
        weights = jnp.take(self._table("wide", 1), feature_numbers, axis=0)
        bias = self.param("wide_bias", self.initializers.bias.build(), (1,), jnp.float32)
        return (weights * values[..., None]).sum(1) + bias

    def _deep(self, feature_numbers: Array, values: Array, train: bool) -> Array:
        """Apply dense layers, each after a ReLU, to embeddings times values; return (batch, 1)."""
        embeddings = jnp.take(self._table("deep", self.embedding), feature_numbers, axis=0)
        rows = (embeddings * values[..., None]).reshape(feature_numbers.shape[0], -1)
        layers: tuple[LayerSpec, ...] = ()
        for features in (*self.hidden, 1):
            layers += (Relu(), Dense(features=features))
        context = LayerContext((), self.initializers, self.dtype, train, rules=self.rules)
        return apply_layers(layers, rows.astype(self.dtype), context).astype(jnp.float32)
