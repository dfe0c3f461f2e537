"""Swin Transformer: attention in windows that every second block shifts (Liu et al. 2021).

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

WINDOW = 7
"""Edge of a window, in tokens."""
PATCH = 4
"""Edge of the patch of a token, in pixels."""
HEAD_FEATURES = 32
HIDDEN_RATIO = 4
DROP_PATH = 0.2
"""Share of samples that skip the last block in training."""
DEPTHS = (2, 2, 6, 2)
"""Blocks of each stage of Swin-T."""
FEATURES = 96
"""Features of a token in the first stage of Swin-T; each stage doubles them."""
MASKED = -100.0
"""Added to the score of two tokens that aren't neighbours in the image, as in the authors' code."""


class Swin(nn.Module):
    """Swin-T on images whose edges are multiples of 224; `mindcv` is the form of its blocks."""

    classes: int
    mindcv: bool = False

    @nn.compact
    def __call__(self, images: Array, train: bool) -> Array:
        """Return logits (batch, classes) of images (batch, height, width, channels)."""
        tokens = nn.Conv(FEATURES, (PATCH, PATCH), PATCH, name="patches")(images)
        tokens = nn.LayerNorm(name="patch_norm")(tokens)
        rates = iter(np.linspace(0, DROP_PATH, sum(DEPTHS)).tolist())
        for stage, depth in enumerate(DEPTHS):
            if stage:
                tokens = PatchMerging(self.mindcv, name=f"merge{stage}")(tokens)
            for block in range(depth):
                shift = WINDOW // 2 if block % 2 and tokens.shape[1] > WINDOW else 0
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
        hidden = nn.gelu(nn.Dense(HIDDEN_RATIO * features, name="expand")(hidden), False)
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
