"""Scaled dot-product attention."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.models.torch_graph.laid import Laid, laid
from pipeline.models.torch_graph.operator_table import OperatorContext, aten
from pipeline.models.torch_graph.operators.random_ops import dropped


@aten("scaled_dot_product_attention.default", kind="self_attention", draws=True)
def scaled_dot_product_attention(
    context: OperatorContext,
    query: Laid,
    key: Laid,
    value: Laid,
    attn_mask: Laid | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Laid:
    """softmax(query @ key^T * scale) @ value (Vaswani et al. 2017, eq. 1), softmax in float32.

    Arrays are (..., length, features). A mask of booleans is true where a place is read; one of
    numbers is added.
    """
    q, k, v = query.plain(), key.plain(), value.plain()
    if enable_gqa:
        k, v = (jnp.repeat(each, q.shape[-3] // each.shape[-3], -3) for each in (k, v))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = jnp.matmul(q * factor, jnp.swapaxes(k, -1, -2))
    mask = None if attn_mask is None else attn_mask.plain()
    if is_causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], jnp.bool_))
    shares = jax.nn.softmax(_masked(scores, mask).astype(jnp.float32), -1).astype(q.dtype)
    if dropout_p > 0:
        shares = dropped(shares, dropout_p, context.draw())
    return laid(jnp.matmul(shares, v))


def _masked(scores: Array, mask: Array | None) -> Array:
    if mask is None:
        return scores
    if mask.dtype == jnp.bool_:
        return jnp.where(mask, scores, -jnp.inf)
    return scores + mask.astype(scores.dtype)
