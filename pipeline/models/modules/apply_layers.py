"""How a list of layers is walked: every layer computes at its site."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import singledispatch

from jax import Array

from pipeline.lowerings.problem.image_layout import Layout
from pipeline.lowerings.problem.lowering import DEFAULTS, LoweringPolicy
from pipeline.models.layers.model_spec import InitSpec, LayerSpec
from pipeline.models.layers.precision import TypeRule, rule_for
from pipeline.models.layers.standard import scope_names
from pipeline.models.layers.tokens import Lookup
from pipeline.models.modules.layout import shape_nhwc


@dataclass(frozen=True)
class LayerContext:
    """Where a layer stands in the network, and what it is computed with."""

    path: tuple[str, ...]
    initializers: InitSpec
    dtype: str
    train: bool
    chooser: LoweringPolicy = DEFAULTS
    layout: Layout = "nhwc"
    """How images reach the layer, and how it gives them on."""
    rules: tuple[TypeRule, ...] = ()
    """Which layers compute in another type than `dtype`."""
    token_mask: Array | None = None
    """Those that are no padding, bool (batch, tokens); None: all of them."""

    @property
    def name(self) -> str:
        """The layer's own name among its siblings."""
        return self.path[-1]

    def inside(self, name: str) -> LayerContext:
        """The site of the child called `name`."""
        return dataclasses.replace(self, path=(*self.path, name))

    def __str__(self) -> str:
        return "/".join(self.path)


@singledispatch
def apply_layer(layer: LayerSpec, x: Array, site: LayerContext) -> Array:
    """What a layer makes of x, called inside the flax module that it is part of.

    A distribution that adds a layer registers its computation: `@forward.register`.
    """
    raise TypeError(
        f"{site}: nothing computes layer {layer.name}; "
        "register a function with pipeline.models.modules.standard.forward.register"
    )


def apply_layers(stack: tuple[LayerSpec, ...], x: Array, site: LayerContext) -> Array:
    """What the layers make of x, one after the other, each in the scope of its name."""
    for name, layer in zip(scope_names(stack), stack, strict=True):
        inside = site.inside(name)
        x = _in_its_type(layer, x, inside) if site.rules else apply_layer(layer, x, inside)
    return x


def _in_its_type(layer: LayerSpec, x: Array, site: LayerContext) -> Array:
    """What a layer makes of x, which is cast to what the layer computes in.

    Layers inside of it that no rule covers compute in that too: a rule that covers a layer covers
    all inside.
    """
    rule = rule_for(site.rules, layer.name, site.path)
    dtype = site.dtype if rule is None else rule.dtype
    # The numbers that a lookup reads are no activations, and do not fit into 16 bits.
    inputs = x if isinstance(layer, Lookup) else x.astype(dtype)
    result = apply_layer(layer, inputs, dataclasses.replace(site, dtype=dtype))
    return result.astype(site.dtype) if rule is not None and rule.casts_back else result


def require_images(x: Array, site: LayerContext) -> None:
    """Raise ValueError, with the layer and the shape, unless x has four axes."""
    if x.ndim != 4:
        raise ValueError(
            f"{site}: reads images (batch, height, width, channels), and shape {x.shape} reaches it"
        )


def features_of(features: int | str, site: LayerContext) -> int:
    """How many features a layer gives. Raises ValueError where only a recipe's list knows."""
    if isinstance(features, str):
        raise ValueError(
            f"{site}: features {features} stands for a number only in the model `layers`; "
            "a network in Python puts the number of classes there itself"
        )
    return features


def require_groups(x: Array, groups: int, site: LayerContext) -> int:
    """The channels of x. Raises ValueError unless they fall into as many groups of one size."""
    shape = shape_nhwc(x, site.layout)
    if shape[-1] % groups:
        raise ValueError(
            f"{site}: groups {groups} does not divide the {shape[-1]} channels of shape {shape}"
        )
    return shape[-1]
