"""Layers of tokens as PyTorch modules, (batch, tokens, features), with their initial weights.

Attention is `scaled_dot_product_attention`, which PyTorch computes in blocks on a CPU.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.peers.torch_layers import Stack, Weights, assign, build_module
from pipeline.models.layers import standard, tokens


class _Tokens(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(2).transpose(1, 2)


class _FirstToken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0]


class _ClassToken(nn.Module):
    def __init__(self, token: torch.Tensor) -> None:
        super().__init__()
        self.token = nn.Parameter(token)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.token.to(x.dtype).expand(len(x), -1, -1), x], 1)


class _PositionEmbedding(nn.Module):
    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


class _TiedEmbedding(nn.Module):
    def __init__(self, table: torch.Tensor, body: nn.Module) -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.body(nn.functional.embedding(x, self.table)), self.table)


class _SelfAttention(nn.Module):
    def __init__(
        self, layer: tokens.SelfAttention, path: str, weights: Weights, features: int
    ) -> None:
        super().__init__()
        self.heads = layer.heads
        self.causal = layer.causal
        dense = standard.Dense(features=features)
        self.query, self.key, self.value, self.out = (
            build_module(dense, f"{path}/{name}", weights, features)
            for name in ("query", "key", "value", "out")
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        attention = nn.functional.scaled_dot_product_attention(*heads, is_causal=self.causal)
        return self.out(attention.transpose(1, 2).flatten(2))


@build_module.register
def _(layer: tokens.Tokens, path: str, weights: Weights, channels: int) -> nn.Module:
    return _Tokens()


@build_module.register
def _(layer: tokens.FirstToken, path: str, weights: Weights, channels: int) -> nn.Module:
    return _FirstToken()


@build_module.register
def _(layer: tokens.ClassToken, path: str, weights: Weights, channels: int) -> nn.Module:
    return _ClassToken(torch.from_numpy(weights[f"{path}/token"]))


@build_module.register
def _(layer: tokens.PositionEmbedding, path: str, weights: Weights, channels: int) -> nn.Module:
    return _PositionEmbedding(torch.from_numpy(weights[f"{path}/table"]))


@build_module.register
def _(layer: tokens.TiedEmbedding, path: str, weights: Weights, channels: int) -> nn.Module:
    table = torch.from_numpy(weights[f"{path}/table"])
    return _TiedEmbedding(table, Stack(layer.body, weights, table.shape[1], path))


@build_module.register
def _(layer: tokens.SelfAttention, path: str, weights: Weights, channels: int) -> nn.Module:
    if layer.dropout:
        raise TypeError(f"{path}: the PyTorch peer has no dropout of attention")
    return _SelfAttention(layer, path, weights, channels)


@build_module.register
def _(layer: standard.LayerNorm, path: str, weights: Weights, channels: int) -> nn.Module:
    module = nn.LayerNorm(channels, eps=layer.epsilon)
    assign(module.weight, torch.from_numpy(weights[f"{path}/scale"]))
    assign(module.bias, torch.from_numpy(weights[f"{path}/bias"]))
    return module


@build_module.register
def _(layer: standard.Gelu, path: str, weights: Weights, channels: int) -> nn.Module:
    return nn.GELU(approximate="tanh")


@build_module.register
def _(layer: standard.Dropout, path: str, weights: Weights, channels: int) -> nn.Module:
    return nn.Dropout(layer.rate)


@build_module.register
def _(layer: standard.Sequence, path: str, weights: Weights, channels: int) -> nn.Module:
    if layer.repeat != 1:
        raise TypeError(f"{path}: the PyTorch peer has no repeated sequence")
    return Stack(layer.body, weights, channels, path)
