"""The network of `benchmarks.custom_networks`, as a plug-in: flax, a component, PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from flax import linen as nn
from jax import Array

from pipeline.api import ModelSpec, component

WIDTHS = (16, 32)


class ConvNet(nn.Module):
    """Two convolutions, max pooling after each, and a dense layer."""

    classes: int

    @nn.compact
    def __call__(self, images: Array, train: bool = False) -> Array:
        """Logits (batch, classes) of images (batch, 32, 32, channels)."""
        x = images
        for width in WIDTHS:
            x = nn.relu(nn.Conv(width, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(self.classes)(x.reshape(x.shape[0], -1))


@component("model")
class CustomConvNet(ModelSpec):
    """The flax module, built by a component."""

    name: Literal["custom_conv_net"] = "custom_conv_net"

    def build(self, classes: int, dtype: str) -> nn.Module:
        """The module in float32."""
        return ConvNet(classes)


class DrawnNet(nn.Module):
    """Convolutions with ReLU, max pooling after some, and a dense layer."""

    classes: int
    convolutions: Sequence[Sequence[int]]
    """Features, edge of the kernel, stride, and 1 if pooling follows."""

    @nn.compact
    def __call__(self, images: Array, train: bool = False) -> Array:
        """Return logits (batch, classes) of images (batch, height, width, channels)."""
        x = images
        for features, edge, stride, pools in self.convolutions:
            x = nn.relu(nn.Conv(features, (edge, edge), (stride, stride))(x))
            x = nn.max_pool(x, (2, 2), (2, 2)) if pools else x
        return nn.Dense(self.classes)(x.reshape(x.shape[0], -1))


@component("model")
class DrawnConvNet(ModelSpec):
    """The drawn module, built by a component."""

    name: Literal["drawn_conv_net"] = "drawn_conv_net"
    convolutions: list[list[int]]
    """Features, edge of the kernel, stride, and 1 if pooling follows."""

    def build(self, classes: int, dtype: str) -> nn.Module:
        """Return the module in float32."""
        return DrawnNet(classes, tuple(map(tuple, self.convolutions)))


def torch_conv_net(channels: int, classes: int) -> Any:
    """The same network in PyTorch, for images (batch, channels, 32, 32)."""
    from torch import nn as torch_nn

    layers: list[Any] = []
    for inputs, width in zip((channels, *WIDTHS), WIDTHS, strict=False):
        layers += [torch_nn.Conv2d(inputs, width, 3, padding=1), torch_nn.ReLU()]
        layers.append(torch_nn.MaxPool2d(2))
    return torch_nn.Sequential(
        *layers, torch_nn.Flatten(), torch_nn.Linear(8 * 8 * WIDTHS[-1], classes)
    )
