"""Scaled dot-product attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.models.torch_graph.laid import Laid, laid
from pipeline.models.torch_graph.operator_table import OperatorContext, aten
from pipeline.models.torch_graph.operators.random_ops import drop_values


@dataclass(frozen=True)
class Attention:
    """Settings of attention, in ATen's order; the last two are by name alone."""

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = field(default=None, kw_only=True)
    enable_gqa: bool = field(default=False, kw_only=True)


@aten("scaled_dot_product_attention.default", kind="self_attention", draws=True, settings=Attention)
def scaled_dot_product_attention(
    context: OperatorContext,
    query: Laid,
    key: Laid,
    value: Laid,
    attn_mask: Laid | None = None,
    settings: Attention = Attention(),
) -> Laid:
    """softmax(query @ key^T * scale) @ value (Vaswani et al. 2017, eq. 1), softmax in float32.

    Arrays are (..., length, features). A mask of booleans is true for a position that is read; a
    mask of numbers is added.
    """
    q, k, v = (x.plain() for x in (query, key, value))
    if settings.enable_gqa:
        k, v = (jnp.repeat(x, q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    factor = 1 / math.sqrt(q.shape[-1]) if settings.scale is None else settings.scale
    scores = jnp.matmul(q * factor, jnp.swapaxes(k, -1, -2))
    mask = None if attn_mask is None else attn_mask.plain()
    if settings.is_causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], jnp.bool_))
    weights = jax.nn.softmax(_apply_mask(scores, mask).astype(jnp.float32), -1).astype(q.dtype)
    if settings.dropout_p > 0:
        weights = drop_values(weights, settings.dropout_p, context.draw())
    return laid(jnp.matmul(weights, v))


def _apply_mask(scores: Array, mask: Array | None) -> Array:
    if mask is None:
        return scores
    if mask.dtype == jnp.bool_:
        return jnp.where(mask, scores, -jnp.inf)
    return scores + mask.astype(scores.dtype)
