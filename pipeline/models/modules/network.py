"""A list of layers as a flax module."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.models.layers.model_spec import InitSpec, LayerSpec
from pipeline.models.layers.precision import TypeRule
from pipeline.models.layers.tokens import Lookup
from pipeline.models.lowerings.problem.image_layout import Layout, swap_layout
from pipeline.models.lowerings.problem.lowering import DEFAULTS, LoweringPolicy
from pipeline.models.modules.apply_layers import LayerContext, apply_layers
from pipeline.models.modules.layout import find_layer_without_chwn, to_nhwc


def lowers_itself(network: Any) -> bool:
    """Return whether the layers of a network call the policy, so that it isn't rewritten."""
    return bool(getattr(network, "lowers_itself", False))


def is_imported(network: Any) -> bool:
    """Return whether a network is custom code, an `ImportedNetwork`."""
    return bool(getattr(network, "is_imported", False))


class Network(nn.Module):
    """A list of layers, from images to logits.

    Parameters and batch statistics are float32, in the collections `params` and `batch_stats`;
    dropout draws from the stream `dropout`. Fields without a description are settings of all
    layers, as in `LayerContext`.
    """

    lowers_itself: ClassVar[bool] = True
    layers: tuple[LayerSpec, ...]
    initializers: InitSpec
    dtype: str
    policy: LoweringPolicy = DEFAULTS
    layout: Layout = "nhwc"
    """Order of axes of images. It doesn't change parameters, and only the last digits of results.
    In CHWN `policy` doesn't choose convolutions, since there is only one formula."""
    rules: tuple[TypeRule, ...] = ()
    padding_mask: bool = False
    """Whether the last channel of the input of a network of tokens is a mask, 1 for a token and 0
    for padding, which attention ignores."""
    batch_axis: str | None = None
    fixed_statistics: tuple[str, ...] = ()
    cached_tokens: int = 0
    recomputes: bool = False

    def can_be_batch_last(self, image: tuple[int, ...]) -> bool:
        return find_layer_without_chwn(self.layers) is None

    def structure(self, image: tuple[int, ...]) -> str:
        return repr((self.layers, self.rules, self.padding_mask))

    @nn.compact
    def __call__(self, images: Array, train: bool, position: Array | None = None) -> Array:
        """Return logits (batch, classes), float32, of images (batch, height, width, channels).

        A network that classifies every token or every pixel returns (batch, tokens, classes) or
        (batch, height, width, classes). With a `position`, int32 (), the input is the token at that
        position, (batch, 1, 1, 1), and the collection `cache` has the keys and values of earlier
        tokens. Raises ValueError, with the layer and the shape, if a layer doesn't fit the layer
        before it, or the layout.
        """
        context = LayerContext(
            path=(),
            initializers=self.initializers,
            dtype=self.dtype,
            train=train,
            policy=self.policy,
            layout=self.layout,
            rules=self.rules,
            batch_axis=self.batch_axis,
            fixed_statistics=self.fixed_statistics,
            position=position,
            cached_tokens=self.cached_tokens,
            recomputes=self.recomputes,
        )
        reads_tokens = bool(self.layers) and isinstance(self.layers[0], Lookup)
        if reads_tokens and self.padding_mask:
            mask = images[..., -1].reshape(images.shape[0], -1) > 0
            images = images[..., :-1]
            context = dataclasses.replace(context, token_mask=mask)
        # Under rules every layer casts its input: the first may compute in float32.
        x = images if reads_tokens or self.rules else images.astype(self.dtype)
        if self.layout == "chwn":
            _require_batch_last(self.layers, x)
            x = swap_layout(x)
        logits = to_nhwc(apply_layers(self.layers, x, context), self.layout)
        return logits.astype(jnp.float32)


def _require_batch_last(stack: tuple[LayerSpec, ...], images: Array) -> None:
    """Raise ValueError if the images or a layer can't be computed in CHWN."""
    layer = find_layer_without_chwn(stack)
    if layer is not None:
        raise ValueError(f"layer {layer.name} can't be computed in the layout chwn; must be nhwc")
    if images.ndim != 4:
        raise ValueError(
            f"the layout chwn is for images, and the input has shape {images.shape}; must be nhwc"
        )
