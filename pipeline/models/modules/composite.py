"""Computations of layers with inner layers: in sequence, in parallel, added or multiplied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.modules.apply_layers import (
    LayerContext,
    apply_layers,
    computes,
    require_groups,
    require_images,
)
from pipeline.models.modules.standard import activate


class Scope(nn.Module):
    """A sequence of layers in a separate scope."""

    layers: tuple[LayerSpec, ...]
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """Apply the layers, to tokens with a mask of padding if there is one."""
        context = self.context if mask is None else replace(self.context, token_mask=mask)
        return apply_layers(self.layers, x, context)


@computes(standard.Sequence)
def _compute_sequence(layer: standard.Sequence, x: Array, context: LayerContext) -> Array:
    return Scope(layer.body * layer.repeat, context, name=context.name)(x)


@computes(standard.Residual)
class _Residual(nn.Module):
    is_block: ClassVar[bool] = True
    layer: standard.Residual
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        body = apply_layers(self.layer.body, x, self.context)
        inside = self.context.inside("shortcut")
        shortcut = Scope(self.layer.shortcut, inside, name=inside.name)(x)
        if body.shape != shortcut.shape:
            raise ValueError(
                f"{self.context}: the body returns shape {body.shape} and the shortcut "
                f"{shortcut.shape}; they are added, so the shapes must be equal"
            )
        return body + shortcut


@computes(standard.Branches)
class _Branches(nn.Module):
    is_block: ClassVar[bool] = True
    layer: standard.Branches
    context: LayerContext

    @nn.compact
    def __call__(self, x: Any) -> Array:
        branches = self.layer.branches
        parts = [x] * len(branches)
        if self.layer.split:
            require_groups(x, len(branches), self.context)
            parts = jnp.split(x, len(branches), -1)
        if self.layer.inputs:
            return self._join(self._read_inputs(x))
        results = [
            Scope(branch, self.context.inside(f"branch_{index}"), name=f"branch_{index}")(part)
            for index, (branch, part) in enumerate(zip(branches, parts, strict=True))
        ]
        return self._join(results)

    def _join(self, results: Sequence[Array]) -> Array:
        """Return the channels of all results, or the first one modulated by the second. Raises
        ValueError for shapes that don't fit."""
        shapes = [result.shape for result in results]
        if self.layer.join == "film":
            return self._modulate(*results)
        if len({shape[:-1] for shape in shapes}) > 1:
            raise ValueError(
                f"{self.context}: the branches return shapes {', '.join(map(str, shapes))}; their "
                "channels are joined, so all other sizes must be equal"
            )
        return jnp.concatenate(results, axis=-1)

    def _modulate(self, x: Array, changes: Array) -> Array:
        """Return x (batch, ..., C), each channel scaled and shifted by changes (batch, 2 C)."""
        if changes.shape != (len(x), 2 * x.shape[-1]):
            raise ValueError(
                f"{self.context}: the second branch returns shape {changes.shape}; to modulate "
                f"{x.shape} it must return {(len(x), 2 * x.shape[-1])}, a factor and a shift for "
                "each channel"
            )
        scale, shift = jnp.split(jnp.expand_dims(changes, tuple(range(1, x.ndim - 1))), 2, axis=-1)
        return x * (1 + scale) + shift

    def _read_inputs(self, x: Any) -> list[Array]:
        """Return the result for each input, by its branch or by the only branch."""
        names = self.layer.inputs
        if not isinstance(x, Mapping) or not set(names) <= set(x):
            reached = f"{', '.join(x)} reach" if isinstance(x, Mapping) else "one array reaches"
            raise ValueError(
                f"{self.context}: {reached} the layer, and its branches read {', '.join(names)}; "
                "with inputs it must be the first layer, and model.inputs must name these"
            )
        scopes = [
            Scope(branch, self.context.inside(f"branch_{index}"), name=f"branch_{index}")
            for index, branch in enumerate(self.layer.branches)
        ]
        masks = self.context.input_masks
        return [
            scope(_cast_floats(x[name], self.context.dtype), masks.get(name))
            for name, scope in zip(names, scopes * (len(names) // len(scopes)), strict=True)
        ]


def _cast_floats(x: Array, dtype: str) -> Array:
    """Return numbers in the type of activations. Whole numbers are tokens, which don't fit it."""
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


@computes(standard.Gate)
class _Gate(nn.Module):
    layer: standard.Gate
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        factors = apply_layers(self.layer.body, x, self.context)
        if factors.shape not in (x.shape, (x.shape[0], x.shape[-1])):
            raise ValueError(
                f"{self.context}: the body returns shape {factors.shape}; to multiply {x.shape} it "
                f"must return {(x.shape[0], x.shape[-1])}, a factor per channel, or the same shape"
            )
        ones = (1,) * (x.ndim - factors.ndim)
        return x * factors.reshape((x.shape[0], *ones, *factors.shape[1:]))


@computes(standard.GatedMlp)
class _GatedMlp(nn.Module):
    layer: standard.GatedMlp
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        def project(name: str, features: int, x: Array) -> Array:
            dense = standard.Dense(scope=name, features=features, bias=self.layer.bias)
            return apply_layers((dense,), x, self.context)

        gate = activate(self.layer.activation, project("gate", self.layer.hidden, x))
        return project("down", x.shape[-1], gate * project("up", self.layer.hidden, x))


@computes(standard.DualPath)
class _DualPath(nn.Module):
    is_block: ClassVar[bool] = True
    layer: standard.DualPath
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        added = self.layer.added
        body = apply_layers(self.layer.body, x, self.context)
        inside = self.context.inside("shortcut")
        shortcut = Scope(self.layer.shortcut, inside, name=inside.name)(x)
        has_equal_sizes = body.shape[:-1] == shortcut.shape[:-1]
        if not has_equal_sizes or min(body.shape[-1], shortcut.shape[-1]) < added:
            raise ValueError(
                f"{self.context}: the body returns shape {body.shape} and the shortcut "
                f"{shortcut.shape}; the first {added} channels are added, so both must have these "
                "channels, and all other sizes must be equal"
            )
        total = body[..., :added] + shortcut[..., :added]
        return jnp.concatenate([total, shortcut[..., added:], body[..., added:]], axis=-1)


@computes(standard.Views)
class _Views(nn.Module):
    layer: standard.Views
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        require_images(x, self.context)
        height, width = x.shape[1:3]
        shift = self.layer.shift
        if min(height, width) <= shift:
            raise ValueError(
                f"{self.context}: images are {height}x{width}; shift {shift} must be below both"
            )
        views = [x] if self.context.train else _list_views(x, self.layer)
        # Views of an image follow each other, so a batch that devices share stays where it is.
        rows = jnp.stack(views, 1).reshape(-1, *x.shape[1:])
        results = apply_layers(self.layer.body, rows, self.context)
        if results.ndim != 2:
            raise ValueError(
                f"{self.context}: the body returns shape {results.shape}; must be values without "
                "positions (batch, values), since views have their positions elsewhere"
            )
        dtype = jnp.promote_types(results.dtype, jnp.float32)
        return results.reshape(x.shape[0], len(views), results.shape[-1]).mean(1, dtype)


def _list_views(x: Array, layer: standard.Views) -> list[Array]:
    """Return the views of images (batch, height, width, channels), each of their shape."""
    views = [x]
    shift = layer.shift
    if shift:
        height, width = x.shape[1:3]
        padded = jnp.pad(x, ((0, 0), (shift, shift), (shift, shift), (0, 0)), mode="reflect")
        views += [
            padded[:, start : start + height, start : start + width] for start in (2 * shift, 0)
        ]
    if layer.mirror:
        views += [view[:, :, ::-1] for view in views]
    return views
