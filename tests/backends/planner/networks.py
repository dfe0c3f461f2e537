"""Small networks as losses to plan, and rates under which known strategies are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.backends.planner.blocks import LossToPlan
from pipeline.backends.rates import CollectiveKind, DeviceGroup

Array = jax.Array


def shapes(**sizes: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """float32 arrays by name; `__` in a name is a slash of its path."""
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}


def to_plan(
    loss: Callable[[Any, Any], Array],
    params: Mapping[str, Any],
    *batch: tuple[tuple[int, ...], Any],
    state_ratio: float = 1.0,
    sync_batch_norm: bool = False,
) -> LossToPlan:
    """A loss over arrays of given shapes and types."""
    nbytes = sum(4 * leaf.size for leaf in jax.tree.leaves(params))
    arrays = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in batch)
    return LossToPlan("made", loss, params, arrays, int(state_ratio * nbytes), sync_batch_norm)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Mean cross-entropy without a gather over the classes."""
    picked = jnp.sum(jax.nn.one_hot(labels, logits.shape[-1]) * logits, -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def mlp(batch: int, *widths: int) -> LossToPlan:
    """Dense layers with a ReLU between, and cross-entropy over the last width."""
    pairs = list(pairwise(widths))
    params = {f"dense_{i}": shapes(kernel=(a, b), bias=(b,)) for i, (a, b) in enumerate(pairs)}

    def loss(params: Any, samples: Any) -> Array:
        x, labels = samples
        for i in range(len(pairs)):
            layer = params[f"dense_{i}"]
            x = x @ layer["kernel"] + layer["bias"]
            if i + 1 < len(pairs):
                x = jax.nn.relu(x)
        return cross_entropy(x, labels)

    return to_plan(loss, params, ((batch, widths[0]), jnp.float32), ((batch,), jnp.int32))


def conv_and_head(batch: int, classes: int, features: int = 2048, side: int = 7) -> LossToPlan:
    """The end of a ResNet-50: 1 x 1 convolutions, pooling and the head of many classes."""
    params = {
        "conv_0": shapes(kernel=(3, 3, 512, 512)),
        "conv_1": shapes(kernel=(1, 1, 512, features)),
        "head": shapes(kernel=(features, classes)),
    }

    def conv(x: Array, kernel: Array) -> Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(params: Any, samples: Any) -> Array:
        x, labels = samples
        x = jax.nn.relu(conv(x, params["conv_0"]["kernel"]))
        x = jax.nn.relu(conv(x, params["conv_1"]["kernel"])).mean((1, 2))
        return cross_entropy(x @ params["head"]["kernel"], labels)

    images = ((batch, side, side, 512), jnp.float32)
    return to_plan(loss, params, images, ((batch,), jnp.int32))


def embedding(batch: int, fields: int, rows: int, columns: int) -> LossToPlan:
    """A table, and one dense layer on the rows that are looked up."""
    params = {
        "table": shapes(rows=(rows, columns)),
        "dense": shapes(kernel=(columns, 2)),
    }

    def loss(params: Any, samples: Any) -> Array:
        numbers, labels = samples
        x = jnp.take(params["table"]["rows"], numbers, axis=0).sum(1)
        return cross_entropy(x @ params["dense"]["kernel"], labels)

    return to_plan(loss, params, ((batch, fields), jnp.int32), ((batch,), jnp.int32))


def gpt(batch: int, tokens: int, features: int, heads: int, blocks: int = 2) -> LossToPlan:
    """Blocks of causal self-attention and two dense layers, on embedded input."""
    names = ("query", "key", "value", "out")
    params = {
        f"block{i}": {
            **{name: shapes(kernel=(features, features)) for name in names},
            "up": shapes(kernel=(features, 4 * features), bias=(4 * features,)),
            "down": shapes(kernel=(4 * features, features), bias=(features,)),
            "norm": shapes(scale=(features,)),
        }
        for i in range(blocks)
    }

    def block(p: Any, x: Array) -> Array:
        split = (batch, tokens, heads, features // heads)
        y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True)) * p["norm"]["scale"]
        query, key, value = ((y @ p[name]["kernel"]).reshape(split) for name in names[:3])
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key))
        read = jnp.einsum("bhqk,bkhd->bqhd", scores, value).reshape(x.shape)
        x = x + read @ p["out"]["kernel"]
        hidden = jax.nn.relu(x @ p["up"]["kernel"] + p["up"]["bias"])
        return x + hidden @ p["down"]["kernel"] + p["down"]["bias"]

    def loss(params: Any, samples: Any) -> Array:
        (x,) = samples
        for i in range(blocks):
            x = block(params[f"block{i}"], x)
        return jnp.mean(jnp.square(x))

    return to_plan(loss, params, ((batch, tokens, features), jnp.float32))


@dataclass(frozen=True)
class MindSporeRates:
    """MindSpore's cost model: bytes that operators read, and bytes communicated times beta.

    Its prices are no times: alpha 1, beta 400 for Ascend and 50 for GPUs, gamma 0.001
    (frontend/parallel/costmodel_context.h). It counts a weight twice a step, forward and backward,
    which here is read by three products and an update: eight times. It halves gathers
    (ALLGATHER_REDUCESCATTER_SCALE_FACTOR in tensor_redistribution.h, as remembered).
    """

    beta: float = 400.0
    exposed_share: float = 0.001
    scatters_sums: bool = True

    def slowdown(self, devices: int) -> float:
        """Nothing is shared."""
        return 1.0

    def compute_us(self, flops: float, nbytes: float) -> float:
        """Bytes that an operator reads, a quarter of those that are moved."""
        return nbytes / 4

    def collective_us(self, kind: CollectiveKind, nbytes: float, group: DeviceGroup) -> float:
        """Bytes that are communicated."""
        halved = kind in ("all_gather", "reduce_scatter")
        return self.beta * nbytes * (group.size > 1) * (0.5 if halved else 1.0)


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Two rates of links between devices: the time of a message, and bytes per microsecond.

    In a ring of n devices, an all-gather, a reduce-scatter or an all-to-all sends (n - 1) / n of
    the bytes over each link. An all-reduce sends twice the bytes and twice the messages.
    """

    message_us: float
    bytes_per_us: float

    def collective_us(self, kind: CollectiveKind, nbytes: float, size: int) -> float:
        """Return the microseconds of a collective over `size` devices."""
        if size == 1:
            return 0.0
        rounds = 2 if kind == "all_reduce" else 1
        return rounds * (self.message_us + nbytes * (size - 1) / size / self.bytes_per_us)


@dataclass(frozen=True)
class ServerRates:
    """Rates of devices, and of links: fast in groups within `per_server` adjacent devices."""

    flops_per_us: float
    bytes_per_us: float
    links: LinkRates
    far_links: LinkRates
    per_server: int = 8
    exposed_share: float = 1.0
    scatters_sums: bool = False

    def slowdown(self, devices: int) -> float:
        """Nothing is shared."""
        return 1.0

    def compute_us(self, flops: float, nbytes: float) -> float:
        """The roofline."""
        return max(flops / self.flops_per_us, nbytes / self.bytes_per_us)

    def collective_us(self, kind: CollectiveKind, nbytes: float, group: DeviceGroup) -> float:
        """Time of a ring."""
        is_in_server = group.size * group.stride <= self.per_server
        links = self.links if is_in_server else self.far_links
        return links.collective_us(kind, nbytes, group.size)


FAST_LINKS = LinkRates(5.0, 100_000.0)
SLOW_LINKS = LinkRates(20.0, 1_000.0)
GPU_LIKE = ServerRates(50e6, 1e6, FAST_LINKS, SLOW_LINKS)
"""50 TFLOP/s and 1 TB/s, 100 GB/s between devices of a server, 1 GB/s between servers."""
