"""Observer of the layers of a network: their inputs, their outputs, and the gradients of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.lowerings.problem import Layout, swap_layout
from pipeline.models.modules.apply_layers import LayerContext
from pipeline.models.modules.layer_capture import tap

Arrays = Mapping[str, Any]
"""Arrays by the path of a layer, images as (batch, height, width, channels)."""


@dataclass(frozen=True)
class LayerForm:
    """The kind of a layer, the type of its result, and the order of axes that it computes in."""

    kind: str
    dtype: str
    layout: Layout

    def from_logical(self, x: Array) -> Array:
        """Return images (batch, height, width, channels) in the layer's order of axes."""
        return swap_layout(x) if self.layout == "chwn" and x.ndim == 4 else x


@dataclass
class LayerObserver:
    """Computes layers for `intercept_layers`, and records their inputs and outputs.

    Use one observer for each trace, since its arrays are tracers. `input_slots` and `output_slots`
    have an array like each input and output, by path. The gradients with respect to the slots are
    the gradients at the layers' inputs and outputs. `forced_outputs` and `forced_gradients` (at
    inputs) are tensors of another program, which layers read instead of other layers' results, in
    both passes, so other layers' errors don't reach them.
    """

    input_slots: Arrays = field(default_factory=dict)
    output_slots: Arrays = field(default_factory=dict)
    forced_outputs: Arrays = field(default_factory=dict)
    forced_gradients: Arrays = field(default_factory=dict)
    inputs: dict[str, Array] = field(default_factory=dict)
    """Inputs by path. All arrays here but the forced ones have the layer's order of axes."""
    outputs: dict[str, Array] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    """Paths of the layers in the order in which they begin."""
    forms: dict[str, LayerForm] = field(default_factory=dict)

    def __call__(
        self, layer: LayerSpec, compute: Callable[[Array], Array], x: Array, context: LayerContext
    ) -> Array:
        path = "/".join(context.path)
        # From the second application of a layer on, the path has a number.
        names = chain([path], (f"{path}#{number}" for number in count(2)))
        path = next(name for name in names if name not in self.paths)
        self.paths.append(path)
        # The first layer may read several inputs, which are those of the layers inside it.
        if not isinstance(x, dict):
            self.inputs[path] = x
        if path in self.input_slots:
            if path in self.forced_gradients:
                form = LayerForm(layer.name, "", context.layout)
                gradient = form.from_logical(self.forced_gradients[path])
                x = _replace_gradient(x, jnp.asarray(gradient, x.dtype))
            x = tap(x, self.input_slots[path])
        y = compute(x)
        self.forms[path] = form = LayerForm(layer.name, str(y.dtype), context.layout)
        self.outputs[path] = y
        if path in self.forced_outputs:
            return jnp.asarray(form.from_logical(self.forced_outputs[path]), y.dtype)
        return tap(y, self.output_slots[path]) if path in self.output_slots else y


@jax.custom_vjp
def _replace_gradient(x: Array, gradient: Array) -> Array:
    """Return x, and replace its gradient in the backward pass by `gradient`."""
    return x


_replace_gradient.defvjp(
    lambda x, gradient: (x, gradient),
    lambda gradient, cotangent: (gradient.astype(cotangent.dtype), jnp.zeros_like(gradient)),
)
