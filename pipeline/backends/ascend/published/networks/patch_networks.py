"""Classifiers of patches, such as transformers, and networks of faces and people, whose steps were
published: images -> embeddings or logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.backends.ascend.published.networks.parts import (
    attend,
    avg_pool,
    conv,
    conv_norm,
    dense,
    depthwise,
    dropout,
    feed_forward,
    gelu,
    head,
    layer_norm,
    max_pool,
    norm,
    prelu,
    resize,
    resnet,
    self_attention,
    transformer_block,
)


def beit(x: Array, classes: int) -> Array:
    """BEiT-B/16: ViT with biases by distance and scaled branches (Bao et al. 2021)."""
    tokens = patches(x, 16, 768)
    places = tokens.shape[1]
    for _ in range(12):
        table = _make_parameter(732, 12)
        bias = table[jnp.zeros((places * places,), jnp.int32) + jnp.arange(places**2) % 732]
        bias = bias.reshape(places, places, 12).transpose(2, 0, 1)
        scales = [_make_parameter(768) for _ in range(2)]
        tokens = tokens + scales[0] * self_attention(layer_norm(tokens), 12, bias)
        tokens = tokens + scales[1] * feed_forward(layer_norm(tokens), 3072)
    return dense(layer_norm(tokens[:, 1:].mean(1)), classes)


def cmt_small(x: Array, classes: int) -> Array:
    """CMT-S (Guo et al. 2022): attention to shrunk maps, and depthwise convolutions around it."""
    for stride in (2, 1, 1):
        x = norm(gelu(conv(x, 32, 3, stride, use_bias=True)))
    for stage, blocks in enumerate((3, 3, 16, 3)):
        x = layer_norm(conv(x, 64 * 2**stage, 2, 2, use_bias=True))
        shrink = 8 // 2**stage
        places = x.shape[1] * x.shape[2]
        bias = _make_parameter(2**stage, places, places // shrink**2)
        for _ in range(blocks):
            x = _cmt_block(x, bias, shrink)
    return head(nn.silu(norm(conv(x, 1280, 1))), classes)


def _cmt_block(x: Array, bias: Array, shrink: int) -> Array:
    batch, features = x.shape[0], x.shape[-1]
    x = x + depthwise(x, use_bias=True)
    y = layer_norm(x)
    memory = layer_norm(depthwise(y, shrink, shrink, use_bias=True)) if shrink > 1 else y
    tokens, memory = (part.reshape(batch, -1, features) for part in (y, memory))
    query, key, value = (dense(part, features) for part in (tokens, memory, memory))
    x = x + dense(attend(query, key, value, bias.shape[0], bias), features).reshape(x.shape)
    y = norm(gelu(conv(layer_norm(x), 4 * features, 1)))
    y = norm(y + gelu(depthwise(y)))
    return x + norm(conv(y, features, 1))


class _Parameter(nn.Module):
    shape: tuple[int, ...]

    @nn.compact
    def __call__(self) -> Array:
        value: Array = self.param("value", nn.initializers.normal(0.02), self.shape)
        return value


def _make_parameter(*shape: int) -> Array:
    return _Parameter(shape)()


def patches(x: Array, size: int, features: int, *, class_token: bool = True) -> Array:
    """Return tokens of patches, after a learned token."""
    x = conv(x, features, size, size, use_bias=True)
    tokens = x.reshape(x.shape[0], -1, features)
    if class_token:
        first = jnp.broadcast_to(_make_parameter(1, 1, features), (x.shape[0], 1, features))
        tokens = jnp.concatenate([first, tokens], 1)
    return tokens


def vit(x: Array, classes: int, features: int, heads: int, size: int = 16) -> Array:
    """ViT (Dosovitskiy et al. 2021)."""
    tokens = patches(x, size, features)
    tokens = tokens + _make_parameter(1, *tokens.shape[1:])
    for _ in range(12):
        tokens = transformer_block(tokens, heads)
    return dense(layer_norm(tokens)[:, 0], classes)


def dino(x: Array, classes: int) -> Array:
    """Pretraining of ViT-S/16 by DINO (Caron et al. 2021): a loss for each image.

    The student sees two crops of 224 and eight of 96 pixels, the teacher the large ones. Their
    heads have 65,536 outputs, which the loss compares for each pair of crops.
    """
    student, teacher = _DinoNetwork(), _DinoNetwork()
    small = jnp.tile(x[:, :96, :96], (8, 1, 1, 1))
    large = jnp.concatenate([x, x], 0)
    guesses = student(large).reshape(2, x.shape[0], -1), student(small).reshape(8, x.shape[0], -1)
    logs = jax.nn.log_softmax(jnp.concatenate(guesses) / 0.1)
    truth = jax.lax.stop_gradient(jax.nn.softmax(teacher(large) / 0.04)).reshape(2, x.shape[0], -1)
    losses = [-(truth[i] * logs[j]).sum(-1) for i in range(2) for j in range(10) if i != j]
    return jnp.stack(losses).mean(0)[:, None]


class _DinoNetwork(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        tokens = nn.Conv(384, (16, 16), (16, 16))(x).reshape(x.shape[0], -1, 384)
        first = self.param("first", nn.initializers.normal(0.02), (1, 1, 384))
        places = self.param("places", nn.initializers.normal(0.02), (1, 197, 384))
        tokens = jnp.concatenate([jnp.broadcast_to(first, (x.shape[0], 1, 384)), tokens], 1)
        if tokens.shape[1] < 197:
            grid = resize(places[:, 1:].reshape(1, 14, 14, 384), (6, 6), method="bicubic")
            places = jnp.concatenate([places[:, :1], grid.reshape(1, 36, 384)], 1)
        tokens = tokens + places
        for _ in range(12):
            tokens = transformer_block(tokens, 6)
        y = layer_norm(tokens)[:, 0]
        y = dense(gelu(dense(gelu(dense(y, 2048)), 2048)), 256)
        y = y / jnp.sqrt((y**2).sum(-1, keepdims=True) + 1e-6)
        return dense(y, 65_536, bias=False)


def spatial_mlp(x: Array, classes: int) -> Array:
    """sMLPNet-T (Tang et al. 2022): products along rows, columns and channels."""
    x = layer_norm(conv(x, 80, 4, 4, use_bias=True))
    for stage, blocks in enumerate((2, 8, 14, 2)):
        features = 80 * 2**stage
        x = conv(x, features, 2, 2, use_bias=True) if stage else x
        for _ in range(blocks):
            y = nn.relu(norm(depthwise(norm(x))))
            along = dense(y.swapaxes(2, 3), y.shape[2]).swapaxes(2, 3)
            across = dense(y.swapaxes(1, 3), y.shape[1]).swapaxes(1, 3)
            x = x + dense(jnp.concatenate([y, along, across], -1), features)
            x = x + feed_forward(norm(x), 3 * features)
    return head(norm(x), classes)


def pvt_attention(x: Array, heads: int, ratio: int) -> Array:
    """Return attention of tokens on a grid to means of `ratio` x `ratio` tokens (Wang 2021)."""
    batch, height, width, features = x.shape
    tokens = x.reshape(batch, -1, features)
    memory = tokens
    if ratio > 1:
        reduced = conv(x, features, ratio, ratio, use_bias=True).reshape(batch, -1, features)
        memory = layer_norm(reduced)
    return _cross_attention(tokens, memory, heads).reshape(batch, height, width, features)


def _cross_attention(tokens: Array, memory: Array, heads: int) -> Array:
    features = tokens.shape[-1]
    pair = dense(memory, 2 * features)
    y = attend(dense(tokens, features), pair[..., :features], pair[..., features:], heads)
    return dense(y, features)


def windowed_attention(x: Array, heads: int, window: int = 7) -> Array:
    """Return attention in windows of tokens on a grid."""
    batch, height, width, features = x.shape
    rows, columns = height // window, width // window
    shape = (batch, rows, window, columns, window, features)
    tokens = x.reshape(shape).swapaxes(2, 3).reshape(-1, window * window, features)
    tokens = self_attention(tokens, heads)
    shape = (batch, rows, columns, window, window, features)
    return tokens.reshape(shape).swapaxes(2, 3).reshape(batch, height, width, features)


def twins(
    x: Array, classes: int, *, local: bool, depths: Sequence[int], widths: Sequence[int]
) -> Array:
    """Twins (Chu et al. 2021): PCPVT, or ALTGVT with every other block `local` in windows."""
    heads = [width // 32 for width in widths] if local else (1, 2, 5, 8)
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        size = 2 if stage else 4
        x = layer_norm(conv(x, width, size, size, use_bias=True))
        for block in range(depth):
            y = layer_norm(x)
            ratio = (8, 4, 2, 1)[stage]
            in_windows = local and block % 2 == 0
            attended = (
                windowed_attention(y, heads[stage])
                if in_windows
                else pvt_attention(y, heads[stage], ratio)
            )
            x = x + attended
            hidden = width * (4 if local or stage > 1 else 8)
            x = x + feed_forward(layer_norm(x), hidden)
            if not block:
                x = x + depthwise(x, 3, use_bias=True)
    return head(layer_norm(x), classes)


def convit_tiny(x: Array, classes: int) -> Array:
    """ConViT-Ti (d'Ascoli et al. 2021): ten blocks mix attention with a gated prior of places."""
    tokens = patches(x, 16, 192, class_token=False)
    tokens = tokens + _make_parameter(1, *tokens.shape[1:])
    places = tokens.shape[1]
    distances = jnp.zeros((1, places, places, 3))
    first = jnp.broadcast_to(_make_parameter(1, 1, 192), (x.shape[0], 1, 192))
    for block in range(12):
        if block == 10:
            tokens = jnp.concatenate([first, tokens], 1)
        if block >= 10:
            tokens = transformer_block(tokens, 4)
            continue
        y = layer_norm(tokens)
        prior = jax.nn.softmax(dense(distances, 4).transpose(0, 3, 1, 2))
        query, key, value = (
            dense(y, 192, bias=False).reshape(*y.shape[:2], 4, 48).swapaxes(1, 2) for _ in range(3)
        )
        scores = jax.nn.softmax(query * 48**-0.5 @ key.swapaxes(-1, -2))
        gate = nn.sigmoid(_make_parameter(4)).reshape(1, 4, 1, 1)
        mixed = (1 - gate) * scores + gate * prior
        mixed = mixed / mixed.sum(-1, keepdims=True)
        attended = (mixed @ value).swapaxes(1, 2).reshape(y.shape)
        tokens = tokens + dense(attended, 192)
        tokens = tokens + feed_forward(layer_norm(tokens), 768)
    return dense(layer_norm(tokens)[:, 0], classes)


def van_b2(x: Array, classes: int) -> Array:
    """VAN-B2 (Guo et al. 2022): large kernels as three convolutions, whose result gates."""
    for stage, (width, depth) in enumerate(zip((64, 128, 320, 512), (3, 3, 12, 3), strict=True)):
        kernel, stride = (3, 2) if stage else (7, 4)
        x = norm(conv(x, width, kernel, stride, use_bias=True))
        for _ in range(depth):
            y = gelu(conv(norm(x), width, 1, use_bias=True))
            z = depthwise(depthwise(y, 5, use_bias=True), 7, kernel_dilation=3, use_bias=True)
            y = conv(y * conv(z, width, 1, use_bias=True), width, 1, use_bias=True)
            x = x + _make_parameter(width) * y
            hidden = conv(norm(x), width * (8 if stage < 2 else 4), 1, use_bias=True)
            hidden = gelu(depthwise(hidden, use_bias=True))
            x = x + _make_parameter(width) * conv(hidden, width, 1, use_bias=True)
        x = layer_norm(x)
    return head(x, classes)


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
