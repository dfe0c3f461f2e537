"""Vision networks of published steps as flax modules: ConvNeXt, Swin Transformer, DBNet.

ConvNeXt has layer norm (Liu et al. 2022). DBNet detects text by differentiable binarisation (Liao
et al. 2020). Swin Transformer has attention in windows that every second block shifts (Liu et al.
2021).

MindCV computes queries, keys and values by a product each, and joins patches by one transpose
(models/swintransformer.py of mindcv 0.3.0). The authors' code has one product, whose result it
transposes and slices, and joins patches by four slices. Both forms compute the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.layers.model_spec import InitSpec, LayerSpec
from pipeline.models.layers.standard import (
    BatchNorm,
    Conv,
    ConvTranspose,
    Relu,
    Sequence,
    Sigmoid,
    Upsample,
)
from pipeline.models.modules.apply_layers import LayerContext, apply_layer, name_scopes

CONVNEXT_DEPTHS = (3, 3, 9, 3)
CONVNEXT_WIDTHS = (96, 192, 384, 768)
"""Blocks and channels of each stage of ConvNeXt-T."""
CONVNEXT_KERNEL = (7, 7)
EXPANSION = 4
"""Channels between the two products of a block, relative to its channels, in both networks."""
CONVNEXT_SCALE = 1e-6
"""Initial factor of a block before the input is added."""
CONVNEXT_DROP_PATH = 0.1
"""Share of samples that skip the last block in training (Liu et al. 2022, table 5)."""
WINDOW = 7
"""Edge of a window, in tokens."""
PATCH = 4
"""Edge of the patch of a token, in pixels."""
HEAD_FEATURES = 32
SWIN_DROP_PATH = 0.2
"""Share of samples that skip the last block of Swin-T in training."""
SWIN_DEPTHS = (2, 2, 6, 2)
"""Blocks of each stage of Swin-T."""
FEATURES = 96
"""Features of a token in the first stage of Swin-T; each stage doubles them."""
MASKED = -100.0
"""Added to the score of two tokens that aren't neighbours in the image, as in the authors' code."""
DBNET_STRIDES = (4, 8, 16, 32)
"""Factors by which the backbone has shrunk the images at the layers that the pyramid reads."""

DBNET_STEEPNESS = 50.0
"""k of the binarisation (Liao et al. 2020, eq. 2)."""


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, layer norm and two products of channels, added to the input.

    In training a sample skips the block with the probability `dropped`.
    """

    dropped: float

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        """Return maps of the input's shape (batch, height, width, channels)."""
        channels = x.shape[-1]
        y = nn.Conv(channels, CONVNEXT_KERNEL, feature_group_count=channels)(x)
        y = nn.LayerNorm(epsilon=1e-6)(y)
        y = nn.gelu(nn.Dense(EXPANSION * channels)(y), approximate=False)
        y = nn.Dense(channels)(y)
        scale = self.param("scale", nn.initializers.constant(CONVNEXT_SCALE), (channels,))
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
        for stage, (depth, width) in enumerate(zip(CONVNEXT_DEPTHS, CONVNEXT_WIDTHS, strict=True)):
            size = (2, 2) if stage else (4, 4)
            norm = nn.LayerNorm(epsilon=1e-6)
            conv = nn.Conv(width, size, strides=size)
            x = conv(norm(x)) if stage else norm(conv(x))
            for _ in range(depth):
                x = ConvNeXtBlock(CONVNEXT_DROP_PATH * block / (sum(CONVNEXT_DEPTHS) - 1))(x, train)
                block += 1
        return nn.Dense(self.classes)(nn.LayerNorm(epsilon=1e-6)(x.mean((1, 2))))


class Swin(nn.Module):
    """Swin-T on images whose edges are multiples of 224.

    With `mindcv`, queries, keys, values and patches are computed as in MindCV, else as in the
    authors' code.
    """

    classes: int
    mindcv: bool = False

    @nn.compact
    def __call__(self, images: Array, train: bool) -> Array:
        """Return logits (batch, classes) of images (batch, height, width, channels)."""
        tokens = nn.Conv(FEATURES, (PATCH, PATCH), PATCH, name="patches")(images)
        tokens = nn.LayerNorm(name="patch_norm")(tokens)
        rates = iter(np.linspace(0, SWIN_DROP_PATH, sum(SWIN_DEPTHS)).tolist())
        for stage, depth in enumerate(SWIN_DEPTHS):
            if stage:
                tokens = PatchMerging(self.mindcv, name=f"merge{stage}")(tokens)
            for block in range(depth):
                shift = WINDOW // 2 if block % 2 and min(tokens.shape[1:3]) > WINDOW else 0
                name = f"stage{stage}_block{block}"
                swin_block = SwinBlock(shift, next(rates), self.mindcv, name=name)
                tokens = swin_block(tokens, train)
        pooled = nn.LayerNorm(name="norm")(tokens).mean((1, 2))
        return nn.Dense(self.classes, name="head")(pooled)


class PatchMerging(nn.Module):
    """Joins squares of four tokens to one of twice the features."""

    mindcv: bool = False

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        batch, height, width, features = tokens.shape
        if self.mindcv:
            squares = tokens.reshape(batch, height // 2, 2, width // 2, 2, features)
            joined = squares.transpose(0, 1, 3, 4, 2, 5).reshape(batch, height // 2, width // 2, -1)
        else:
            places = ((0, 0), (1, 0), (0, 1), (1, 1))
            joined = jnp.concatenate([tokens[:, row::2, column::2] for row, column in places], -1)
        features *= 2
        return nn.Dense(features, use_bias=False, name="reduce")(nn.LayerNorm(name="norm")(joined))


class SwinBlock(nn.Module):
    """Attention in windows, shifted by some tokens, and two dense layers."""

    shift: int
    drop_path: float
    mindcv: bool = False

    @nn.compact
    def __call__(self, tokens: Array, train: bool) -> Array:
        batch, height, width, features = tokens.shape
        drop = nn.Dropout(self.drop_path, broadcast_dims=(1, 2, 3), deterministic=not train)
        windows = nn.LayerNorm(name="norm1")(tokens)
        if self.shift:
            windows = jnp.roll(windows, (-self.shift, -self.shift), (1, 2))
        windows = split_windows(windows)
        mask = mask_shifted(height, width, self.shift) if self.shift else None
        windows = WindowAttention(self.mindcv, name="attention")(windows, mask)
        attended = join_windows(windows, batch, height, width)
        if self.shift:
            attended = jnp.roll(attended, (self.shift, self.shift), (1, 2))
        tokens = tokens + drop(attended)
        hidden = nn.LayerNorm(name="norm2")(tokens)
        hidden = nn.Dense(EXPANSION * features, name="expand")(hidden)
        hidden = nn.gelu(hidden, approximate=False)
        return tokens + drop(nn.Dense(features, name="contract")(hidden))


class WindowAttention(nn.Module):
    """Self-attention of the tokens of each window, with a learned bias by their distance."""

    mindcv: bool = False

    @nn.compact
    def __call__(self, windows: Array, mask: np.ndarray | None) -> Array:
        count, length, features = windows.shape
        heads = features // HEAD_FEATURES
        if self.mindcv:
            shape = (count, length, heads, HEAD_FEATURES)
            query, key, value = (
                nn.Dense(features, name=name)(windows).reshape(shape).swapaxes(1, 2)
                for name in ("query", "key", "value")
            )
        else:
            qkv = nn.Dense(3 * features, name="qkv")(windows)
            qkv = qkv.reshape(count, length, 3, heads, HEAD_FEATURES).transpose(2, 0, 3, 1, 4)
            query, key, value = (qkv[place] for place in range(3))
        scores = (query * HEAD_FEATURES**-0.5) @ key.swapaxes(-1, -2)
        table = self.param("bias", nn.initializers.normal(0.02), ((2 * WINDOW - 1) ** 2, heads))
        bias = table[index_distances().ravel()].reshape(length, length, heads)
        scores = scores + bias.transpose(2, 0, 1)
        if mask is not None:
            places = mask.shape[0]
            masked = scores.reshape(count // places, places, heads, length, length)
            scores = (masked + mask[:, None]).reshape(count, heads, length, length)
        attended = jax.nn.softmax(scores) @ value
        attended = attended.swapaxes(1, 2).reshape(count, length, features)
        return nn.Dense(features, name="project")(attended)


def split_windows(tokens: Array) -> Array:
    """Return windows (windows, tokens, features) of tokens (batch, height, width, features)."""
    batch, height, width, features = tokens.shape
    shape = (batch, height // WINDOW, WINDOW, width // WINDOW, WINDOW, features)
    return tokens.reshape(shape).swapaxes(2, 3).reshape(-1, WINDOW**2, features)


def join_windows(windows: Array, batch: int, height: int, width: int) -> Array:
    """Return tokens (batch, height, width, features) from `split_windows`'s windows."""
    shape = (batch, height // WINDOW, width // WINDOW, WINDOW, WINDOW, windows.shape[-1])
    return windows.reshape(shape).swapaxes(2, 3).reshape(batch, height, width, -1)


def index_distances() -> np.ndarray:
    """Return the row of the bias table for each pair of a window's tokens, as (tokens, tokens)."""
    places = np.stack(np.meshgrid(range(WINDOW), range(WINDOW), indexing="ij")).reshape(2, -1)
    rows, columns = places[:, :, None] - places[:, None, :] + WINDOW - 1
    return rows * (2 * WINDOW - 1) + columns


def mask_shifted(height: int, width: int, shift: int) -> np.ndarray:
    """Return 0, or `MASKED` for tokens that weren't neighbours, as (windows, tokens, tokens)."""

    def number_bands(length: int) -> np.ndarray:
        return np.digitize(range(length), (length - WINDOW, length - shift))

    regions = 3 * number_bands(height)[:, None] + number_bands(width)
    shape = (height // WINDOW, WINDOW, width // WINDOW, WINDOW)
    windows = regions.reshape(shape).swapaxes(1, 2).reshape(-1, WINDOW**2)
    return np.where(windows[:, None] == windows[:, :, None], 0.0, MASKED).astype(np.float32)


class DBNet(nn.Module):
    """A backbone, a feature pyramid, and two heads, for probability and threshold."""

    backbone: tuple[LayerSpec, ...]
    initializers: InitSpec
    features: int
    """Features of each level of the pyramid, a multiple of 4."""

    @nn.compact
    def __call__(self, images: Array, train: bool) -> Array:
        """Return maps (batch, height, width, 3): probability, threshold and binary map.

        Height and width must be multiples of 32; raises ValueError otherwise.
        """
        if images.ndim != 4 or images.shape[1] % 32 or images.shape[2] % 32:
            raise ValueError(
                f"dbnet: images of shape {images.shape}: must be (batch, height, width, channels) "
                "with height and width multiples of 32"
            )
        site = LayerContext((), self.initializers, "float32", train)
        inside = site.inside("backbone")
        levels = _Backbone(self.backbone, inside, name=inside.name)(images)
        fused = self._pyramid(levels, site)
        probability, threshold = (
            _apply_part(name, _make_head(self.features // 4), fused, site)
            for name in ("probability", "threshold")
        )
        binary = jax.nn.sigmoid(DBNET_STEEPNESS * (probability - threshold))
        return jnp.concatenate([probability, threshold, binary], axis=-1)

    def _pyramid(self, levels: dict[int, Array], site: LayerContext) -> Array:
        """Return all levels side by side: (batch, height / 4, width / 4, features)."""
        lateral = Conv(features=self.features, kernel=1)
        smooth = self.features // 4
        above: Array | None = None
        smoothed = []
        for stride in reversed(DBNET_STRIDES):
            level = _apply_part(f"lateral{stride}", (lateral,), levels[stride], site)
            if above is not None:
                level += _apply_part(f"above{stride}", (Upsample(factor=2),), above, site)
            above = level
            body = (Conv(features=smooth, kernel=3), Upsample(factor=stride // DBNET_STRIDES[0]))
            smoothed.append(_apply_part(f"smooth{stride}", body, level, site))
        return jnp.concatenate(smoothed, axis=-1)


class _Backbone(nn.Module):
    """A network without its classifier, which returns activations of several sizes."""

    layers: tuple[LayerSpec, ...]
    site: LayerContext

    @nn.compact
    def __call__(self, images: Array) -> dict[int, Array]:
        """Return the last activations of each size, by the factor by which images have shrunk."""
        x = images
        levels = {}
        for name, layer in zip(name_scopes(self.layers), self.layers, strict=True):
            x = apply_layer(layer, x, self.site.inside(name))
            levels[images.shape[1] // x.shape[1]] = x
        return levels


def dbnet(backbone: LayeredModelSpec, features: int = 256) -> nn.Module:
    """Return DBNet on a network without its classifier.

    The module is called with images NHWC and `train`. With ResNet-18 DBNet has 12,340,930
    parameters.
    """
    layers = backbone.layers_for(1)
    kinds = [layer.name for layer in layers]
    return DBNet(layers[: kinds.index("global_avg_pool")], backbone.init, features)


def _make_head(features: int) -> tuple[LayerSpec, ...]:
    """Return layers that double the size twice, to a value in 0..1 for each pixel of the images."""
    return (
        Conv(features=features, kernel=3),
        BatchNorm(),
        Relu(),
        ConvTranspose(features=features, kernel=2, stride=2, bias=True),
        BatchNorm(),
        Relu(),
        ConvTranspose(features=1, kernel=2, stride=2, bias=True),
        Sigmoid(),
    )


def _apply_part(name: str, body: tuple[LayerSpec, ...], x: Array, site: LayerContext) -> Array:
    return apply_layer(Sequence(scope=name, body=body), x, site.inside(name))
