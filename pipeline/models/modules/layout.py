"""The layout of images in a network, which is the order of their axes, and their padding.

NHWC is the layout of the input, and every layer can compute in it. In CHWN the batch is the
innermost axis, so vectors consist of samples instead of channels. That is faster for few channels.
Height and width are axes 1 and 2 in both. Parameters are the same, so a checkpoint fits both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from jax import Array, lax

from pipeline.models.layers import standard
from pipeline.models.layers.fields import Padding
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.lowerings.problem.conv_window import Pair
from pipeline.models.lowerings.problem.image_layout import Layout

WindowPadding = Padding | Literal["causal"]
"""Padding of a window; causal: zeros before each axis only."""

_CHWN_LAYERS = (
    standard.Activation,
    standard.AdaptivePool,
    standard.AvgPool,
    standard.BatchNorm,
    standard.Conv,
    standard.Dense,
    standard.Dropout,
    standard.Flatten,
    standard.GlobalAvgPool,
    standard.MaxPool,
)
"""Layers that can be computed in CHWN."""


@runtime_checkable
class LaidOutNetwork(Protocol):
    """A network that computes in either layout, if all its layers can."""

    dtype: str
    layout: Layout

    def can_be_batch_last(self, image: tuple[int, ...]) -> bool:
        """Return whether images (height, width, channels) can be computed in CHWN."""

    def structure(self, image: tuple[int, ...]) -> str:
        """Return a text that is equal for networks of equal speed, if dtype and batch are equal."""


def to_nhwc(x: Array, layout: Layout) -> Array:
    """Transpose images from a layout to NHWC; other arrays are returned unchanged."""
    return x.transpose(3, 1, 2, 0) if channel_axis(x, layout) == 0 else x


def channel_axis(x: Array, layout: Layout) -> int:
    """Return the axis of an image's channels, 0 or -1; of other arrays the features' axis, -1."""
    return 0 if x.ndim == 4 and layout == "chwn" else -1


def shape_nhwc(x: Array, layout: Layout) -> tuple[int, ...]:
    """Return the shape of x; of images in any layout as (batch, height, width, channels)."""
    if channel_axis(x, layout) != 0:
        return x.shape
    channels, height, width, batch = x.shape
    return batch, height, width, channels


def find_layer_without_chwn(stack: tuple[LayerSpec, ...]) -> LayerSpec | None:
    """Return the first layer that can't be computed in CHWN; None if all can."""
    for layer in stack:
        if not isinstance(layer, _CHWN_LAYERS) or getattr(layer, "groups", 1) != 1:
            return layer
    return None


def compute_pads(
    sizes: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    padding: WindowPadding,
) -> tuple[Pair, ...]:
    """Return the pads (before, after) of each axis; `window` has the kernel's dilated sizes."""
    if padding == "causal":
        return tuple((size - 1, 0) for size in window)
    if padding == "symmetric":
        return tuple(((size - 1) // 2, (size - 1) // 2) for size in window)
    if isinstance(padding, str):
        return tuple(lax.padtype_to_pads(sizes, window, strides, padding.upper()))
    if isinstance(padding, int):
        return ((padding, padding),) * len(sizes)
    return padding
