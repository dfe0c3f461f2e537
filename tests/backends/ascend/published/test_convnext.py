"""ConvNeXt-T has the published network's parameters and shapes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from pipeline.backends.ascend.published.convnext import ConvNeXt


@pytest.mark.medium
def test_convnext_tiny_has_the_published_parameters() -> None:
    """28,589,128, as in torchvision's and timm's convnext_tiny."""
    images = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    network = ConvNeXt(1000)
    variables = jax.eval_shape(lambda x: network.init(jax.random.key(0), x, False), images)
    leaves = jax.tree.leaves(variables)
    assert sum(math.prod(leaf.shape) for leaf in leaves) == 28_589_128
    rngs = {"dropout": jax.random.key(1)}
    logits = jax.eval_shape(lambda v, x: network.apply(v, x, True, rngs=rngs), variables, images)
    assert logits.shape == (2, 1000)
