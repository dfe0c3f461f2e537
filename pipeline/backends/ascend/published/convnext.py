"""ConvNeXt, a convolutional network with layer norm (Liu et al. 2022)."""

from __future__ import annotations

import jax
from flax import linen as nn
from jax import Array

DEPTHS = (3, 3, 9, 3)
WIDTHS = (96, 192, 384, 768)
"""Blocks and channels of each stage of ConvNeXt-T."""
KERNEL = (7, 7)
EXPANSION = 4
"""Channels between the two products of a block, relative to its channels."""
LAYER_SCALE = 1e-6
"""Initial factor of a block before the input is added."""
DROPPED_DEPTH = 0.1
"""Share of samples that skip the last block in training (Liu et al. 2022, table 5)."""


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, layer norm and two products of channels, added to the input.

    In training a sample skips the block with the probability `dropped`.
    """

    dropped: float

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        """Return maps of the input's shape (batch, height, width, channels)."""
        channels = x.shape[-1]
        y = nn.Conv(channels, KERNEL, feature_group_count=channels)(x)
        y = nn.LayerNorm(epsilon=1e-6)(y)
        y = nn.gelu(nn.Dense(EXPANSION * channels)(y), approximate=False)
        y = nn.Dense(channels)(y)
        scale = self.param("scale", nn.initializers.constant(LAYER_SCALE), (channels,))
        y = scale * y
        if train and self.dropped:
            keep_rate = 1 - self.dropped
            mask = jax.random.bernoulli(self.make_rng("dropout"), keep_rate, (x.shape[0], 1, 1, 1))
            y = y * (mask / keep_rate).astype(y.dtype)
        return x + y


class ConvNeXt(nn.Module):
    """ConvNeXt-T."""

    classes: int

    @nn.compact
    def __call__(self, images: Array, train: bool) -> Array:
        """Return logits (batch, classes) of images (batch, height, width, channels)."""
        x = images
        block = 0
        for stage, (depth, width) in enumerate(zip(DEPTHS, WIDTHS, strict=True)):
            size = (2, 2) if stage else (4, 4)
            x = nn.LayerNorm(epsilon=1e-6)(x) if stage else x
            x = nn.Conv(width, size, strides=size)(x)
            x = x if stage else nn.LayerNorm(epsilon=1e-6)(x)
            for _ in range(depth):
                x = ConvNeXtBlock(DROPPED_DEPTH * block / (sum(DEPTHS) - 1))(x, train)
                block += 1
        return nn.Dense(self.classes)(nn.LayerNorm(epsilon=1e-6)(x.mean((1, 2))))
