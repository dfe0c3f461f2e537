"""Layers that hold layers: one after the other, side by side, added or multiplied."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.modules.apply_layers import (
    LayerContext,
    apply_layer,
    apply_layers,
    require_groups,
)


class _Sequence(nn.Module):
    body: tuple[LayerSpec, ...]
    site: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return apply_layers(self.body, x, self.site)


@apply_layer.register
def _sequence(layer: standard.Sequence, x: Array, site: LayerContext) -> Array:
    return _Sequence(layer.body * layer.repeat, site, name=site.name)(x)


class _Residual(nn.Module):
    layer: standard.Residual
    site: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        body = apply_layers(self.layer.body, x, self.site)
        inside = self.site.inside("shortcut")
        shortcut = _Sequence(self.layer.shortcut, inside, name=inside.name)(x)
        if body.shape != shortcut.shape:
            raise ValueError(
                f"{self.site}: the body gives shape {body.shape} and the shortcut "
                f"{shortcut.shape}; they are added, so both must be the same"
            )
        return body + shortcut


@apply_layer.register
def _residual(layer: standard.Residual, x: Array, site: LayerContext) -> Array:
    return _Residual(layer, site, name=site.name)(x)


class _Branches(nn.Module):
    layer: standard.Branches
    site: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        branches = self.layer.branches
        if self.layer.split:
            require_groups(x, len(branches), self.site)
        parts = jnp.split(x, len(branches), -1) if self.layer.split else [x] * len(branches)
        results = [
            _Sequence(branch, self.site.inside(f"branch_{index}"), name=f"branch_{index}")(part)
            for index, (branch, part) in enumerate(zip(branches, parts, strict=True))
        ]
        shapes = [result.shape for result in results]
        if len({shape[:-1] for shape in shapes}) > 1:
            raise ValueError(
                f"{self.site}: the branches give shapes {', '.join(map(str, shapes))}; their "
                "channels stand side by side, so all else must be the same"
            )
        return jnp.concatenate(results, axis=-1)


@apply_layer.register
def _branches(layer: standard.Branches, x: Array, site: LayerContext) -> Array:
    return _Branches(layer, site, name=site.name)(x)


class _Gate(nn.Module):
    layer: standard.Gate
    site: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        factors = apply_layers(self.layer.body, x, self.site)
        if factors.shape not in (x.shape, (x.shape[0], x.shape[-1])):
            raise ValueError(
                f"{self.site}: the body gives shape {factors.shape}; to multiply {x.shape} it must "
                f"give {(x.shape[0], x.shape[-1])}, one factor for each channel, or the same shape"
            )
        ones = (1,) * (x.ndim - factors.ndim)
        return x * factors.reshape(x.shape[0], *ones, *factors.shape[1:])


@apply_layer.register
def _gate(layer: standard.Gate, x: Array, site: LayerContext) -> Array:
    return _Gate(layer, site, name=site.name)(x)


class _DualPath(nn.Module):
    layer: standard.DualPath
    site: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        added = self.layer.added
        body = apply_layers(self.layer.body, x, self.site)
        inside = self.site.inside("shortcut")
        shortcut = _Sequence(self.layer.shortcut, inside, name=inside.name)(x)
        shapes = body.shape, shortcut.shape
        if shapes[0][:-1] != shapes[1][:-1] or min(shape[-1] for shape in shapes) < added:
            raise ValueError(
                f"{self.site}: the body gives shape {shapes[0]} and the shortcut {shapes[1]}; the "
                f"first {added} channels are added, so both must have these and all else the same"
            )
        total = body[..., :added] + shortcut[..., :added]
        return jnp.concatenate([total, shortcut[..., added:], body[..., added:]], axis=-1)


@apply_layer.register
def _dual_path(layer: standard.DualPath, x: Array, site: LayerContext) -> Array:
    return _DualPath(layer, site, name=site.name)(x)
