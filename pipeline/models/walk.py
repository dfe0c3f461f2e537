"""How a list of layers is walked: every layer computes at its site."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import singledispatch

from jax import Array

from pipeline.models.layers import scope_names
from pipeline.models.layout import Layout, shape_nhwc
from pipeline.models.lowerings.lowering import DEFAULTS, Chooser
from pipeline.models.spec import InitSpec, LayerSpec


@dataclass(frozen=True)
class Site:
    """Where a layer stands in the network, and what it is computed with."""

    path: tuple[str, ...]
    initializers: InitSpec
    dtype: str
    train: bool
    chooser: Chooser = DEFAULTS
    layout: Layout = "nhwc"
    """How images reach the layer, and how it gives them on."""

    @property
    def name(self) -> str:
        """The layer's own name among its siblings."""
        return self.path[-1]

    def inside(self, name: str) -> Site:
        """The site of the child called `name`."""
        return dataclasses.replace(self, path=(*self.path, name))

    def __str__(self) -> str:
        return "/".join(self.path)


@singledispatch
def forward(layer: LayerSpec, x: Array, site: Site) -> Array:
    """What a layer makes of x, called inside the flax module that it is part of.

    A distribution that adds a layer registers its computation: `@forward.register`.
    """
    raise TypeError(
        f"{site}: nothing computes layer {layer.name}; "
        "register a function with pipeline.models.network.forward.register"
    )


def walk(stack: tuple[LayerSpec, ...], x: Array, site: Site) -> Array:
    """What the layers make of x, one after the other, each in the scope of its name."""
    for name, layer in zip(scope_names(stack), stack, strict=True):
        x = forward(layer, x, site.inside(name))
    return x


def require_images(x: Array, site: Site) -> None:
    """Raise ValueError, with the layer and the shape, unless x has four axes."""
    if x.ndim != 4:
        raise ValueError(
            f"{site}: reads images (batch, height, width, channels), and shape {x.shape} reaches it"
        )


def require_groups(x: Array, groups: int, site: Site) -> int:
    """The channels of x. Raises ValueError unless they fall into as many groups of one size."""
    shape = shape_nhwc(x, site.layout)
    if shape[-1] % groups:
        raise ValueError(
            f"{site}: groups {groups} does not divide the {shape[-1]} channels of shape {shape}"
        )
    return shape[-1]
