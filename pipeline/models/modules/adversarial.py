"""The computation of a generator and a discriminator that are trained against each other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

from pipeline.models.layers import standard
from pipeline.models.modules.apply_layers import LayerContext, computes
from pipeline.models.modules.composite import Scope

SCORES = 3
"""Number of scores of a sample, see `standard.Adversarial`."""
GENERATOR = "generator"


@computes(standard.Adversarial)
class _Adversarial(nn.Module):
    layer: standard.Adversarial
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if self.layer.scores != SCORES:
            raise ValueError(
                f"{self.context}: has {SCORES} scores, and the dataset {self.layer.scores} labels; "
                "must have 3, by the map op constant_labels in dataset.train.ops and "
                "dataset.eval.ops"
            )
        generate = self._make_scope(GENERATOR, self.layer.generator)
        judge = self._make_scope("discriminator", self.layer.discriminator)
        images = generate(self._draw_noise(x))
        if images.shape != x.shape:
            raise ValueError(
                f"{self.context}: the generator returns shape {images.shape}, and the images have "
                f"shape {x.shape}; they must be equal"
            )
        scores = [
            judge(x),
            judge(jax.lax.stop_gradient(images)),
            self._judge_unchanged(judge, images),
        ]
        if scores[0].shape != (x.shape[0], 1):
            raise ValueError(
                f"{self.context}: the discriminator returns shape {scores[0].shape}; must be "
                "(batch, 1): end it in dense with 1 feature"
            )
        return jnp.concatenate(scores, axis=1)

    def _make_scope(self, name: str, layers: tuple[Any, ...]) -> Scope:
        return Scope(layers, self.context.inside(name), name=name)

    def _judge_unchanged(self, judge: Scope, images: Array) -> Array:
        """Return the scores of images, without a gradient for the discriminator's weights, and
        without an update of its running statistics."""
        module, variables = judge.unbind()
        draws = {"dropout": self.make_rng("dropout")} if self.context.train else {}
        scores, _ = module.apply(
            jax.lax.stop_gradient(variables), images, rngs=draws, mutable=["batch_stats"]
        )
        return jnp.asarray(scores)

    def _draw_noise(self, x: Array) -> Array:
        """Draw the generator's inputs (batch, latent): in training from the step's key, in
        evaluation from a hash of each sample, so that its results don't depend on the batch."""
        shape = (x.shape[0], self.layer.latent)
        if self.context.train:
            return jax.random.normal(self.make_rng("dropout"), shape).astype(x.dtype)
        pixels = x.astype(jnp.float32).reshape(x.shape[0], -1)
        words = jax.lax.bitcast_convert_type(pixels, jnp.uint32)
        # The first steps of lowbias32 (Wellons 2018), then Knuth's factor 2654435761 by position.
        words = (words ^ (words >> 16)) * np.uint32(2146121005)
        words ^= words >> 15
        factors = np.arange(1, 2 * words.shape[1], 2, dtype=np.uint32) * np.uint32(2654435761)
        hashes = jnp.sum(words * factors, axis=1, dtype=jnp.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), hashes)
        draw = jax.vmap(lambda key: jax.random.normal(key, (self.layer.latent,)))
        return draw(keys).astype(x.dtype)
