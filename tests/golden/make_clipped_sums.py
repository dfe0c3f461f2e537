"""Clipped sums of gradients by jax-privacy, written to clipped_sums.npz.

    python tests/golden/make_clipped_sums.py        with jax-privacy 2.0.0

Both networks are written in jax and computed in float64. One has convolutions whose samples are
separated by kernels and by pairs of positions, the other has token ids. The loss is cross-entropy.
Arrays are named NETWORK/params/PATH, NETWORK/samples, NETWORK/labels, NETWORK/clips and, by the
position of the clip, NETWORK/sums/POSITION/PATH.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_privacy.clipping import clipped_grad

FILE = Path(__file__).parent / "clipped_sums.npz"
SAMPLES = 8
CLASSES = 3
CLIPS = (0.01, 1.0, 1e6)
SHAPES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "images": {
        "conv_0/kernel": (3, 3, 2, 4),
        "conv_0/bias": (4,),
        "conv_1/kernel": (2, 2, 4, 24),
        "layer_norm_0/scale": (24,),
        "layer_norm_0/bias": (24,),
        "dense_0/kernel": (96, CLASSES),
        "dense_0/bias": (CLASSES,),
    },
    "tokens": {
        "embedding_0/table": (7, 5),
        "dense_0/kernel": (5, 6),
        "dense_0/bias": (6,),
        "dense_1/kernel": (24, CLASSES),
        "dense_1/bias": (CLASSES,),
    },
}


def convolve(images: Any, kernel: Any) -> Any:
    """Convolve (B, H, W, C) without padding."""
    axes = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, kernel, (1, 1), "VALID", dimension_numbers=axes)


def classify_images(params: Any, images: Any) -> Any:
    """Return logits (B, 3) of images (B, 5, 5, 2)."""
    hidden = jnp.tanh(convolve(images, params["conv_0/kernel"]) + params["conv_0/bias"])
    hidden = convolve(hidden, params["conv_1/kernel"])
    centred = hidden - hidden.mean(-1, keepdims=True)
    hidden = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-7)
    hidden = hidden * params["layer_norm_0/scale"] + params["layer_norm_0/bias"]
    return hidden.reshape(len(images), -1) @ params["dense_0/kernel"] + params["dense_0/bias"]


def classify_tokens(params: Any, tokens: Any) -> Any:
    """Return logits (B, 3) of token ids (B, 4)."""
    hidden = params["embedding_0/table"][tokens]
    hidden = jnp.tanh(hidden @ params["dense_0/kernel"] + params["dense_0/bias"])
    return hidden.reshape(len(tokens), -1) @ params["dense_1/kernel"] + params["dense_1/bias"]


def sum_clipped(classify: Callable[[Any, Any], Any], clip: float, *arguments: Any) -> Any:
    """Return the sum of clipped gradients for (params, samples, labels)."""

    def compute_loss(params: Any, samples: Any, labels: Any) -> Any:
        log_probabilities = jax.nn.log_softmax(classify(params, samples))
        return -log_probabilities[jnp.arange(len(labels)), labels].sum()

    return clipped_grad(compute_loss, l2_clip_norm=clip, batch_argnums=(1, 2))(*arguments)


def main() -> None:
    """Write the file."""
    generator = np.random.default_rng(3)
    samples = {
        "images": generator.normal(size=(SAMPLES, 5, 5, 2)).astype(np.float32),
        "tokens": generator.integers(0, 7, (SAMPLES, 4)).astype(np.int32),
    }
    arrays: dict[str, np.ndarray] = {}
    for network, classify in (("images", classify_images), ("tokens", classify_tokens)):
        params = {
            path: generator.normal(0, 0.5, shape).astype(np.float32)
            for path, shape in SHAPES[network].items()
        }
        labels = generator.integers(0, CLASSES, SAMPLES).astype(np.int32)
        arrays |= {f"{network}/params/{path}": value for path, value in params.items()}
        arrays[f"{network}/samples"] = samples[network]
        arrays[f"{network}/labels"] = labels
        arrays[f"{network}/clips"] = np.array(CLIPS)
        exact = {path: value.astype(np.float64) for path, value in params.items()}
        inputs = samples[network].astype(np.int32 if network == "tokens" else np.float64)
        for position, clip in enumerate(CLIPS):
            sums = sum_clipped(classify, clip, exact, inputs, labels)
            for path, value in sums.items():
                arrays[f"{network}/sums/{position}/{path}"] = np.asarray(value)
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
