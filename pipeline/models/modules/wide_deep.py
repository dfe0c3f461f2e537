"""The computation of Wide & Deep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.data.tables.encode_table import FIELD_COLUMNS
from pipeline.models.layers.model_spec import Initializer, InitSpec, LayerSpec
from pipeline.models.layers.precision import TypeRule
from pipeline.models.layers.standard import Dense, Relu
from pipeline.models.modules.apply_layers import LayerContext, apply_layers


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
        softmax is the logistic function of the second. Indices outside of the vocabulary lead to
        NaN. Raises ValueError for inputs of other shapes, and for more than two classes.
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
