"""Convolutions of tokens, whose images have the height 1."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.models.layers import tokens
from pipeline.models.lowerings.lowered_layers import conv2d
from pipeline.models.lowerings.problem.conv_window import compute_reach
from pipeline.models.modules.apply_layers import computes, require_mask, require_tokens
from pipeline.models.modules.convolution import (
    ConvolutionModule,
    add_layer_bias,
    find_pads,
    make_kernel,
)


@computes(tokens.Conv1d)
class _Conv1d(ConvolutionModule):
    layer: tokens.Conv1d

    @nn.compact
    def __call__(self, x: Array) -> Array:
        require_tokens(x, self.context)
        mask = require_mask(x.shape[:2], self.context)
        if mask is not None:
            # Set padding to zero, like the padding at both ends.
            x = jnp.where(mask[..., None], x, jnp.zeros((), x.dtype))
        layer = self.layer
        size = (layer.kernel,)
        dilation = (layer.dilation,)
        strides = (layer.stride,)
        pads = find_pads(x, compute_reach(size, dilation), strides, layer.padding, self.context)
        # The tokens are images of height 1.
        y = conv2d(
            x[:, None],
            make_kernel(self, x, size)[None],
            strides=(1, layer.stride),
            padding=((0, 0), *pads),
            dilation=(1, layer.dilation),
            groups=layer.groups,
            policy=self.context.policy,
        )
        return add_layer_bias(self, y[:, 0])
