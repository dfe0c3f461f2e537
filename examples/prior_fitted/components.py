"""The dataset `prior_tables`, the op `draw_table` and the network `prior_fitted`.

A sample is a whole table, drawn anew at every step. The network reads some of its rows with their
class and predicts the class of the others, so that it learns to learn from a table (TabPFN:
Hollmann et al. 2022, arXiv 2207.01848; the network is nanoTabPFN's, arXiv 2511.03634).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.api import DatasetSpec, MapOp, ModelSpec, RawData, Split, Targets, component

ROWS, FEATURES, CAUSES = 96, 5, 6
QUERY = 255
"""The label of a row that isn't predicted: its class is an input."""
NODES = 12
"""Nodes of each of the two layers of a drawn network."""
DRAWS = {
    "causes": ROWS * CAUSES,
    "first": CAUSES * NODES,
    "second": NODES * NODES,
    "offsets": 2 * NODES,
    "kinds": 2 * NODES,
    "noise": ROWS * 2 * NODES,
    "chosen": CAUSES + 2 * NODES,
    "steps": FEATURES,
    "choices": 8,
}
"""Numbers that a table needs, in [0, 1)."""


def draw_tables(xp: Any, uniforms: Any) -> tuple[Any, Any]:
    """Draw tables from the prior, by uniforms (batch, numbers), with xp numpy or jax.numpy.

    Return cells float32 (batch, ROWS, 1, FEATURES + 1), of which the last column is the class, or
    -1 if it is to be predicted, and labels int32 (batch, ROWS, 1), `QUERY` where it isn't. Causes
    are normal; a network of random weights and activations maps them to nodes, with noise. Features
    are some of the causes and nodes, a few of them rounded; a class is a node above a quantile.
    """
    batch = uniforms.shape[0]
    ends = np.cumsum(list(DRAWS.values()))
    parts = {
        name: uniforms[:, end - count : end]
        for (name, count), end in zip(DRAWS.items(), ends, strict=True)
    }
    causes = _to_normal(xp, parts["causes"]).reshape(batch, ROWS, CAUSES)
    weights = (
        _to_normal(xp, parts["first"]).reshape(batch, CAUSES, NODES) / CAUSES**0.5,
        _to_normal(xp, parts["second"]).reshape(batch, NODES, NODES) / NODES**0.5,
    )
    noise = _to_normal(xp, parts["noise"]).reshape(batch, ROWS, 2, NODES)
    choices = parts["choices"]
    noise = noise * (0.3 * choices[:, 0] ** 2)[:, None, None, None]
    values, layers = causes, [causes]
    for number, weight in enumerate(weights):
        here = slice(number * NODES, (number + 1) * NODES)
        offset = _to_normal(xp, parts["offsets"][:, here])[:, None]
        scale = (0.5 + 3 * choices[:, 1 + number])[:, None, None]
        values = _activate(xp, scale * (values @ weight) + offset, parts["kinds"][:, None, here])
        values = values + noise[:, :, number]
        layers.append(values)
    nodes = xp.concatenate(layers, axis=2)
    order = xp.argsort(parts["chosen"], axis=1)
    # A class is always a node, and never a feature too.
    target = CAUSES + (choices[:, 3] * 2 * NODES).astype(np.int32)
    is_feature = order != target[:, None]
    ranks = xp.where(is_feature, np.arange(order.shape[1]), order.shape[1])
    order = xp.take_along_axis(order, xp.argsort(ranks, axis=1), axis=1)[:, :FEATURES]
    features = xp.take_along_axis(nodes, order[:, None], axis=2)
    steps = 1 + (parts["steps"] * 8).astype(np.int32)[:, None]
    features = xp.where(parts["steps"][:, None] < 0.3, xp.round(features * steps) / steps, features)
    score = xp.take_along_axis(nodes, target[:, None, None], axis=2)[:, :, 0]
    quantile = (ROWS * (0.2 + 0.6 * choices[:, 4])).astype(np.int32)
    border = xp.take_along_axis(xp.sort(score, axis=1), quantile[:, None], axis=1)
    classes = (score >= border).astype(np.int32)
    known = (ROWS * (0.25 + 0.5 * choices[:, 5])).astype(np.int32)
    is_known = np.arange(ROWS) < known[:, None]
    shown = xp.where(is_known, classes, -1).astype(np.float32)
    cells = xp.concatenate([features, shown[..., None]], axis=2).astype(np.float32)
    labels = xp.where(is_known, QUERY, classes).astype(np.int32)
    return cells[:, :, None], labels[:, :, None]


def _to_normal(xp: Any, uniforms: Any) -> Any:
    """Return normal numbers by Box and Muller, from pairs of uniforms (batch, even)."""
    radius = xp.sqrt(-2 * xp.log(1 - uniforms[:, 0::2]))
    angle = np.float32(2 * np.pi) * uniforms[:, 1::2]
    return xp.concatenate([radius * xp.cos(angle), radius * xp.sin(angle)], axis=1)


def _activate(xp: Any, values: Any, kinds: Any) -> Any:
    """Return one of five functions of values (batch, rows, nodes), by kinds in [0, 1)."""
    results = values
    functions = (xp.tanh, xp.sin, xp.abs, lambda x: xp.maximum(x, 0), lambda x: (x > 0) * 1.0)
    for number, function in enumerate(functions):
        results = xp.where(kinds * 6 >= number + 1, function(values), results)
    return results


@component("dataset")
class PriorTables(DatasetSpec):
    """Tables that are drawn from a prior, those of training within the compiled step."""

    name: Literal["prior_tables"] = "prior_tables"
    train_size: int = 2048
    """Tables of an epoch. Those of another epoch are others."""
    eval_size: int = 256

    def read(self, cache: Path) -> RawData:
        """Cells `image` and labels `label`, as `draw_tables`; zeros for training."""
        numbers = np.random.default_rng(0).random((self.eval_size, sum(DRAWS.values())))
        cells, labels = draw_tables(np, numbers.astype(np.float32))
        shape = (self.train_size, ROWS, 1)
        zeros = {
            "image": np.zeros((*shape, FEATURES + 1), np.float32),
            # Both classes, since a run warns of one that no label has.
            "label": np.indices(shape).sum(axis=0, dtype=np.int32) % 2,
        }
        evaluated = Split({"image": cells, "label": labels})
        return RawData(Split(zeros), evaluated, Targets(("low", "high")))


@component("op")
class DrawTable(MapOp):
    """Replaces each sample by a table of the prior."""

    name: Literal["draw_table"] = "draw_table"

    @property
    def draws(self) -> int:
        """The numbers of a table."""
        return sum(DRAWS.values())

    @property
    def columns(self) -> tuple[str, ...]:
        """Both columns of a sample."""
        return ("image", "label")

    def outputs(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same shapes and types."""
        return tuple(replace(value) for value in values)

    def map(self, xp: Any, values: Any, uniforms: Any) -> Any:
        """Tables instead of the values."""
        return draw_tables(xp, uniforms)


@component("model")
class PriorFitted(ModelSpec):
    """Attention between the columns of a table, and from its rows to those with a class."""

    name: Literal["prior_fitted"] = "prior_fitted"
    size: int = 64
    heads: int = 4
    blocks: int = 3

    def build(self, classes: int, dtype: str) -> Any:
        """Return the flax module: cells (batch, rows, 1, columns) -> (batch, rows, 1, classes)."""
        return make_network(self.size, self.heads, self.blocks, classes)


def make_network(size: int, heads: int, blocks: int, classes: int) -> Any:
    """Return the flax module of `PriorFitted`, for any number of rows and columns."""
    import jax.numpy as jnp
    from flax import linen as nn

    class Network(nn.Module):
        """nanoTabPFN: no code of a row's or column's position, so neither order matters."""

        @nn.compact
        def __call__(self, cells: Any, train: bool) -> Any:
            cells = cells[:, :, 0]
            shown = cells[:, :, -1:]
            is_known = (shown >= 0).astype(jnp.float32)
            count = is_known.sum(axis=1, keepdims=True)
            x = cells[:, :, :-1]
            mean = (x * is_known).sum(axis=1, keepdims=True) / count
            variance = (is_known * (x - mean) ** 2).sum(axis=1, keepdims=True) / (count - 1)
            x = jnp.clip((x - mean) / jnp.sqrt(variance + 1e-12), -100, 100)
            share = (shown * is_known).sum(axis=1, keepdims=True) / count
            y = jnp.where(is_known > 0, shown, share)
            embedded = nn.Dense(size)(x[..., None]), nn.Dense(size)(y[..., None])
            z = jnp.concatenate(embedded, axis=2)
            # Every row reads those with a class alone, so rows to predict don't see each other.
            mask = is_known[:, None, None, None, :, 0] > 0
            for _ in range(blocks):
                z = nn.LayerNorm()(z + _attend(heads, z, None))
                turned = z.swapaxes(1, 2)
                turned = nn.LayerNorm()(turned + _attend(heads, turned, mask))
                z = turned.swapaxes(1, 2)
                hidden = nn.gelu(nn.Dense(2 * size)(z))
                z = nn.LayerNorm()(z + nn.Dense(size)(hidden))
            hidden = nn.gelu(nn.Dense(2 * size)(z[:, :, -1]))
            return nn.Dense(classes)(hidden)[:, :, None]

    def _attend(heads: int, x: Any, mask: Any) -> Any:
        return nn.MultiHeadDotProductAttention(heads)(x, mask=mask)

    return Network()
