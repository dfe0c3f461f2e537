"""Layers of images as PyTorch modules, channel first, with their initial weights."""

from __future__ import annotations

from functools import singledispatch

import numpy as np
import torch
from torch import nn

from benchmarks.tasks import get_window, name_layers, order_rows
from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import LayerSpec

Weights = dict[str, np.ndarray]


class Stack(nn.Sequential):
    """Layers one after the other, with their weights; `features` are the channels of the result."""

    def __init__(
        self, stack: tuple[LayerSpec, ...], weights: Weights, channels: int, scope: str = ""
    ) -> None:
        modules = []
        for path, layer in name_layers(stack, scope):
            module = build_module(layer, path, weights, channels)
            channels = getattr(module, "features", channels)
            modules.append(module)
        super().__init__(*modules)
        self.features = channels


class _Residual(nn.Module):
    def __init__(
        self, layer: standard.Residual, path: str, weights: Weights, channels: int
    ) -> None:
        super().__init__()
        self.body = Stack(layer.body, weights, channels, path)
        self.shortcut = Stack(layer.shortcut, weights, channels, f"{path}/shortcut")
        self.features = self.body.features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.shortcut(x)


class _GlobalAvgPool(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


@singledispatch
def build_module(layer: LayerSpec, path: str, weights: Weights, channels: int) -> nn.Module:
    raise TypeError(f"{path}: the PyTorch peer has no layer {layer.name}")


@build_module.register
def _(layer: standard.Conv, path: str, weights: Weights, channels: int) -> nn.Module:
    kernel = torch.from_numpy(weights[f"{path}/kernel"]).permute(3, 2, 0, 1)
    size, stride, padding = get_window(layer, bias=True)
    both = size // 2 if padding == "same" else 0
    module = nn.Conv2d(channels, len(kernel), size, stride, both, bias=layer.bias)
    assign(module.weight, kernel)
    if layer.bias:
        assign(module.bias, torch.from_numpy(weights[f"{path}/bias"]))
    module.features = len(kernel)
    return module


@build_module.register
def _(layer: standard.Dense, path: str, weights: Weights, channels: int) -> nn.Module:
    kernel = weights[f"{path}/kernel"]
    # After a flattened image there are more rows than channels.
    rows = torch.from_numpy(order_rows(kernel, channels))
    module = nn.Linear(*kernel.shape, bias=layer.bias)
    assign(module.weight, rows.T)
    if layer.bias:
        assign(module.bias, torch.from_numpy(weights[f"{path}/bias"]))
    module.features = module.out_features
    return module


@build_module.register
def _(layer: standard.BatchNorm, path: str, weights: Weights, channels: int) -> nn.Module:
    module = nn.BatchNorm2d(channels, eps=layer.epsilon, momentum=1 - layer.momentum)
    assign(module.weight, torch.from_numpy(weights[f"{path}/scale"]))
    assign(module.bias, torch.from_numpy(weights[f"{path}/bias"]))
    return module


@build_module.register
def _(layer: standard.MaxPool, path: str, weights: Weights, channels: int) -> nn.Module:
    size, stride, padding = get_window(layer)
    return nn.MaxPool2d(size, stride, size // 2 if padding == "same" else 0)


@build_module.register
def _(layer: standard.Residual, path: str, weights: Weights, channels: int) -> nn.Module:
    return _Residual(layer, path, weights, channels)


@build_module.register
def _(layer: standard.Views, path: str, weights: Weights, channels: int) -> nn.Module:
    """Return only the body, since peers don't evaluate."""
    return Stack(layer.body, weights, channels, path)


@build_module.register
def _(layer: standard.Relu, path: str, weights: Weights, channels: int) -> nn.Module:
    return nn.ReLU(inplace=True)


@build_module.register
def _(layer: standard.Flatten, path: str, weights: Weights, channels: int) -> nn.Module:
    return nn.Flatten()


@build_module.register
def _(layer: standard.GlobalAvgPool, path: str, weights: Weights, channels: int) -> nn.Module:
    return _GlobalAvgPool()


def assign(parameter: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values)
