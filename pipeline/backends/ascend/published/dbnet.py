"""DBNet: text detection by differentiable binarisation (Liao et al. 2020)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
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
    name_scopes,
)
from pipeline.models.modules.apply_layers import LayerContext, apply_layer

STRIDES = (4, 8, 16, 32)
"""Factors by which the backbone has shrunk the images at the layers that the pyramid reads."""

STEEPNESS = 50.0
"""k of the binarisation (Liao et al. 2020, eq. 2)."""


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
        binary = jax.nn.sigmoid(STEEPNESS * (probability - threshold))
        return jnp.concatenate([probability, threshold, binary], axis=-1)

    def _pyramid(self, levels: dict[int, Array], site: LayerContext) -> Array:
        """Return all levels side by side: (batch, height / 4, width / 4, features)."""
        lateral = Conv(features=self.features, kernel=1)
        smooth = self.features // 4
        above: Array | None = None
        smoothed = []
        for stride in reversed(STRIDES):
            level = _apply_part(f"lateral{stride}", (lateral,), levels[stride], site)
            if above is not None:
                level += _apply_part(f"above{stride}", (Upsample(factor=2),), above, site)
            above = level
            body = (Conv(features=smooth, kernel=3), Upsample(factor=stride // STRIDES[0]))
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
