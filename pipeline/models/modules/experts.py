"""The computation of mixtures of experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.nn import logsumexp, one_hot

from pipeline.models.layers import token_mixers
from pipeline.models.modules.activations import activate
from pipeline.models.modules.apply_layers import (
    LayerContext,
    add_sample_losses,
    computes,
    require_mask,
    require_tokens,
)


@computes(token_mixers.MixtureOfExperts)
class _MixtureOfExperts(nn.Module):
    layer: token_mixers.MixtureOfExperts
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        require_tokens(x, self.context)
        layer, (_, count, features) = self.layer, x.shape
        init = self.context.initializers.dense.build()
        router = self.param("router", init, (features, layer.experts), jnp.float32)
        sizes = {"gate": layer.hidden, "up": layer.hidden, "down": features}
        init_experts = _draw_each(init)
        kernels = {
            name: self.param(
                name,
                init_experts,
                (layer.experts, layer.hidden if name == "down" else features, size),
                jnp.float32,
            ).astype(x.dtype)
            for name, size in sizes.items()
        }
        logits = x.astype(jnp.float32) @ router
        probabilities = jax.nn.softmax(logits)
        largest, choices = jax.lax.top_k(probabilities, layer.top)
        is_token = require_mask(x.shape[:2], self.context)
        if is_token is None:
            is_token = jnp.ones(x.shape[:2], bool)
        is_chosen = one_hot(choices, layer.experts).sum(axis=2) * is_token[..., None]
        if self.context.train and layer.adds_losses:
            add_sample_losses(self, self._compute_losses(logits, is_chosen, is_token))
        weights = (largest / largest.sum(axis=-1, keepdims=True)).astype(x.dtype)
        if self.context.train and layer.capacity_factor is not None:
            capacity = math.ceil(layer.capacity_factor * count * layer.top / layer.experts)
            if capacity < count:
                return self._compute_first(x, kernels, weights, choices, is_chosen, capacity)
        results = self._compute_experts(kernels, x, "btf,efh->ebth", "ebth,ehf->ebtf")
        by_expert = one_hot(choices, layer.experts, dtype=x.dtype) * weights[..., None]
        return jnp.einsum("btke,ebtf->btf", by_expert, results)

    def _compute_experts(
        self, kernels: dict[str, Array], x: Array, inwards: str, outwards: str
    ) -> Array:
        gate = activate(self.layer.activation, jnp.einsum(inwards, x, kernels["gate"]))
        return jnp.einsum(outwards, gate * jnp.einsum(inwards, x, kernels["up"]), kernels["down"])

    def _compute_first(
        self,
        x: Array,
        kernels: dict[str, Array],
        weights: Array,
        choices: Array,
        is_chosen: Array,
        capacity: int,
    ) -> Array:
        """Return the sum of the results of the first `capacity` tokens of each expert."""
        count = x.shape[1]
        # The largest keys are the first tokens; 0 is a token that didn't choose the expert.
        keys = is_chosen * jnp.arange(count, 0, -1)[:, None]
        _, places = jax.lax.top_k(keys.swapaxes(1, 2), capacity)  # (batch, experts, capacity)
        rows = jnp.arange(len(x))[:, None, None]
        results = self._compute_experts(
            kernels, x[rows, places], "becf,efh->bech", "bech,ehf->becf"
        )
        number = jnp.cumsum(is_chosen, axis=1) - 1  # of a token among those that chose the expert
        place = jnp.take_along_axis(number, choices, axis=2).astype(jnp.int32)
        is_computed = jnp.take_along_axis(is_chosen, choices, axis=2) * (place < capacity)
        outputs = results[rows, choices, jnp.clip(place, 0, capacity - 1)]
        return jnp.einsum("btk,btkf->btf", weights * is_computed.astype(x.dtype), outputs)

    def _compute_losses(self, logits: Array, is_chosen: Array, is_token: Array) -> Array:
        """Return the weighted losses of the router, float32 (batch,)."""
        layer = self.layer
        tokens_of_sample = jnp.maximum(is_token.sum(axis=1, dtype=jnp.float32), 1)
        shares = is_chosen.sum(axis=1) / (layer.top * tokens_of_sample[:, None])
        probabilities = jax.nn.softmax(logits) * is_token[..., None]
        means = probabilities.sum(axis=1) / tokens_of_sample[:, None]
        losses: Array = layer.balance * layer.experts * (shares * means).sum(axis=-1)
        if layer.z_loss:
            squares = jnp.where(is_token, jnp.square(logsumexp(logits, axis=-1)), 0)
            losses = losses + layer.z_loss * squares.sum(axis=1) / tokens_of_sample
        return losses


def _draw_each(draw: Callable[..., Any]) -> Callable[..., Array]:
    """Return an initialiser that draws the kernel of each expert separately, so that the number of
    experts doesn't count among its inputs."""

    def draw_all(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
        kernels: Array = jax.vmap(lambda key: draw(key, shape[1:], dtype))(
            jax.random.split(key, shape[0])
        )
        return kernels

    return draw_all
