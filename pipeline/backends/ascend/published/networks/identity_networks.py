"""Networks of faces and people whose steps were published: images -> embeddings or logits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.backends.ascend.published.networks.parts import (
    avg_pool,
    conv,
    conv_norm,
    dense,
    depthwise,
    dropout,
    max_pool,
    norm,
    prelu,
    resnet,
)


def arc_resnet100(x: Array, classes: int) -> Array:
    """LResNet100E-IR, the ResNet of ArcFace for faces of 112 pixels (Deng et al. 2019)."""
    x = prelu(norm(conv(x, 64)))
    for features, blocks in ((64, 3), (128, 13), (256, 30), (512, 3)):
        for block in range(blocks):
            stride = 1 if block else 2
            y = prelu(conv(norm(x), features))
            y = norm(conv(y, features, 3, stride))
            short = x if block else norm(conv(x, features, 1, stride))
            x = short + y
    x = dropout(norm(x), 0.4).reshape(x.shape[0], -1)
    x = norm(dense(x, 512))
    x = x / jnp.sqrt((x**2).sum(-1, keepdims=True))
    return 64 * dense(x, classes, bias=False)


def osnet(x: Array, classes: int) -> Array:
    """OSNet x1.0 (Zhou et al. 2019): four streams of light convolutions, gated together."""

    def light(x: Array, features: int) -> Array:
        return nn.relu(norm(depthwise(conv(x, features, 1))))

    def block(x: Array, features: int) -> Array:
        middle = features // 4
        y = conv_norm(x, middle, 1)
        streams = []
        for depth in range(1, 5):
            z = y
            for _ in range(depth):
                z = light(z, middle)
            streams.append(z)
        hidden, gate = nn.Conv(middle // 16, (1, 1)), nn.Conv(middle, (1, 1))
        total: Any = sum(
            z * nn.sigmoid(gate(nn.relu(hidden(z.mean((1, 2), keepdims=True))))) for z in streams
        )
        y = norm(conv(total, features, 1))
        short = x if x.shape[-1] == features else norm(conv(x, features, 1))
        return nn.relu(short + y)

    x = max_pool(conv_norm(x, 64, 7, 2), 3, 2)
    for stage, features in enumerate((256, 384, 512)):
        x = block(block(x, features), features)
        x = avg_pool(conv_norm(x, features, 1)) if stage < 2 else x
    x = conv_norm(x, 512, 1)
    return dense(nn.relu(norm(dense(x.mean((1, 2)), 512))), classes)


def pcb(x: Array, classes: int) -> Array:
    """Part-based ResNet-50 (Sun et al. 2018): six stripes with a classifier each."""
    x = resnet(x, 50, stride=16)[-1]
    batch, height, width, features = x.shape
    parts = x.reshape(batch, 6, height // 6, width, features).mean((2, 3))
    parts = nn.relu(norm(conv(dropout(parts, 0.5), 256, 1)))
    return jnp.stack([dense(parts[:, part], classes) for part in range(6)], 1)


def light_cnn9(x: Array, classes: int) -> Array:
    """LightCNN-9 (Wu et al. 2018): each convolution keeps the larger of two maps."""

    def maxout(x: Array, features: int, kernel: int) -> Array:
        y = conv(x, 2 * features, kernel, use_bias=True)
        return jnp.maximum(y[..., :features], y[..., features:])

    x = max_pool(maxout(x, 48, 5))
    for features, before, pools in ((96, 48, 1), (192, 96, 1), (128, 192, 0), (128, 128, 1)):
        x = maxout(maxout(x, before, 1), features, 3)
        x = max_pool(x) if pools else x
    y = dense(x.reshape(x.shape[0], -1), 512)
    y = jnp.maximum(y[:, :256], y[:, 256:])
    return dense(dropout(y, 0.5), classes)
