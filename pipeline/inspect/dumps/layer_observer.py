"""Observation of the layers of a list: inputs, outputs, and the gradients of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.lowerings.problem.image_layout import Layout, swap_layout
from pipeline.models.modules.apply_layers import LayerContext
from pipeline.models.modules.layer_capture import tap

Arrays = Mapping[str, Any]
"""Arrays by the path of a layer, images as (batch, height, width, channels)."""


@dataclass(frozen=True)
class ForcedTensors:
    """Tensors of another program, which replace those that layers pass to each other."""

    outputs: Arrays
    input_gradients: Arrays


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

    Use one for each trace: its arrays are tracers, which must not outlive the trace. `input_slots`
    and `output_slots` are arrays like the inputs and outputs, by path; gradients by the slots are
    the gradients at the layers' inputs and outputs. With `forced`, every layer reads forced tensors
    instead of other layers' results, also in the backward pass, so its error is not inherited.
    """

    input_slots: Arrays = field(default_factory=dict)
    output_slots: Arrays = field(default_factory=dict)
    forced: ForcedTensors | None = None
    inputs: dict[str, Array] = field(default_factory=dict)
    """In the layer's order of axes, like all arrays here except `forced`."""
    outputs: dict[str, Array] = field(default_factory=dict)
    forms: dict[str, LayerForm] = field(default_factory=dict)

    def __call__(
        self,
        layer: LayerSpec,
        compute: Callable[[Array], Array],
        x: Array,
        context: LayerContext,
    ) -> Array:
        """Compute a layer, and record its input and output."""
        path = self._fresh("/".join(context.path))
        self.inputs[path] = x
        if path in self.input_slots:
            if self.forced is not None and path in self.forced.input_gradients:
                form = LayerForm(layer.name, "", context.layout)
                gradient = form.from_logical(self.forced.input_gradients[path])
                x = _with_gradient(x, jnp.asarray(gradient, x.dtype))
            x = tap(x, self.input_slots[path])
        y = compute(x)
        # In the order in which layers begin: one that holds others comes before them.
        self.forms[path] = form = LayerForm(layer.name, str(y.dtype), context.layout)
        self.outputs[path] = y
        if self.forced is not None and path in self.forced.outputs:
            return jnp.asarray(form.from_logical(self.forced.outputs[path]), y.dtype)
        return tap(y, self.output_slots[path]) if path in self.output_slots else y

    def _fresh(self, path: str) -> str:
        """Return the path, with a number if a layer is applied again."""
        number = 1
        name = path
        while name in self.inputs:
            number += 1
            name = f"{path}#{number}"
        return name


def is_inexact(x: Any) -> bool:
    """Whether an array is of floating-point numbers."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


@jax.custom_vjp
def _with_gradient(x: Array, gradient: Array) -> Array:
    """Return x; its gradient is `gradient` instead of the computed one."""
    return x


def _forward(x: Array, gradient: Array) -> tuple[Array, Array]:
    return x, gradient


def _backward(gradient: Array, cotangent: Array) -> tuple[Array, Array]:
    return gradient.astype(cotangent.dtype), jnp.zeros_like(gradient)


_with_gradient.defvjp(_forward, _backward)
