"""Capture of the inputs of layers, and of the gradients at their outputs.

Second-order optimizers need both for dense and convolutional layers, and gradients of single
samples for every layer with parameters. An observer passes a layer's output through `tap`: an
identity with a second, unused argument of the same shape, the slot. The gradient of the slot is the
gradient at the output. Without an observer the network's program doesn't change.

Flax calls the observer for every call of a module. The observer captures `nn.Dense` and the layer
`conv` with one group, or all modules with parameters. Networks that aren't flax modules call
`observe_layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.tree_util import register_dataclass

from pipeline.core.errors import RecipeError
from pipeline.core.host.array_values import find_shapes
from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import pair
from pipeline.models.lowerings.problem import (
    ConvWindow,
    Layout,
    compute_reach,
    make_window,
)
from pipeline.models.modules.apply_layers import compute_pads, shape_nhwc


@register_dataclass
@dataclass(frozen=True)
class LayerCapture:
    """Inputs of one layer in one step, and cotangents, the gradients at its output.

    Both are (batch, features) or (batch, tokens, features) for a dense layer, and images in
    `layout` for a convolution. `window` is the geometry of the convolution; None for other layers.
    `number` is the place among the captured layers, from 0, in the order in which the network
    applies them. `module` is the flax module, not bound to parameters; None if only dense and
    convolutional layers are captured.
    """

    inputs: Array
    cotangents: Array
    window: ConvWindow | None = field(metadata={"static": True})
    layout: Layout = field(metadata={"static": True})
    number: int = field(default=0, metadata={"static": True})
    module: nn.Module | None = field(default=None, metadata={"static": True})


Loss = Callable[..., tuple[Array, Any]]
"""(parameters, slots) -> (loss, auxiliary output)."""
Observations = Mapping[str, LayerCapture]
"""Captures by the path of the layer's scope, such as `stage_0/conv_1`."""

_observer: ContextVar[_Taps | None] = ContextVar("observer", default=None)
"""Observer of the networks that are being traced."""


def is_observing() -> bool:
    return _observer.get() is not None


def observe_layer(
    path: str, inputs: Array, outputs: Array, window: ConvWindow | None, layout: Layout = "nhwc"
) -> Array:
    """Return the outputs of a layer. The observer, if there is one, captures inputs and outputs.
    `path` is the kernel's path without its last name. Other arguments are as in `LayerCapture`.
    Raises ValueError if the layer is applied twice."""
    observer = _observer.get()
    return outputs if observer is None else observer.tap(path, inputs, outputs, window, layout)


@contextmanager
def with_observer(observer: _Taps | None) -> Iterator[None]:
    """Let an observer capture the layers that the body applies or traces; None: capture none."""
    token = _observer.set(observer)
    try:
        with nullcontext() if observer is None else nn.intercept_methods(observer):
            yield
    finally:
        _observer.reset(token)


def grad_observing_layers(
    function: Callable[[Any], tuple[Array, Any]],
    params: Any,
    transform: Callable[[Loss], Loss] = lambda loss: loss,
    *,
    all_modules: bool = False,
) -> tuple[Any, Any, Observations]:
    """Return the gradients, the auxiliary output, and the captures of a loss of parameters.

    `function` applies a network and returns (scalar, auxiliary output), as for
    `jax.grad(function, has_aux=True)`. Cotangents are gradients of the scalar. `transform` is
    applied to the loss before differentiation. With `all_modules`, every flax module with
    parameters is captured. Raises ValueError if a layer is applied twice, since its weights then
    have two inputs, and RecipeError without any layer.
    """

    def find_outputs(params: Any) -> dict[str, Array]:
        taps = _Taps(None, all_modules)
        with with_observer(taps):
            function(params)
        return taps.outputs

    shapes = find_shapes(find_outputs, params)
    if not shapes:
        raise RecipeError(
            [
                "train.optimizer: reads the inputs of dense and convolutional layers, and the "
                "network has none that can be observed; must be another optimizer, or a "
                "network with parameters named kernel, used outside of loops"
            ]
        )
    slots = {path: jnp.zeros(shape.shape, shape.dtype) for path, shape in shapes.items()}
    traces: list[_Taps] = []

    def apply_tapped(params: Any, slots: dict[str, Array]) -> tuple[Array, tuple[Any, Any]]:
        taps = _Taps(slots, all_modules)
        traces.append(taps)
        with with_observer(taps):
            value, auxiliary = function(params)
        return value, (auxiliary, taps.inputs)

    grad = jax.grad(transform(apply_tapped), argnums=(0, 1), has_aux=True)
    (gradients, cotangents), (auxiliary, inputs) = grad(params, slots)
    taps = traces[-1]
    observations = {
        path: LayerCapture(
            inputs[path], cotangents[path], window, layout, number, taps.modules.get(path)
        )
        for number, (path, (window, layout)) in enumerate(taps.windows.items())
    }
    return gradients, auxiliary, observations


class _Taps:
    """Observer of one trace: its captured layers by path. Without slots it changes no outputs."""

    def __init__(self, slots: Mapping[str, Array] | None, all_modules: bool = False) -> None:
        self._slots = slots
        self._all_modules = all_modules
        self.modules: dict[str, nn.Module] = {}
        self.inputs: dict[str, Array] = {}
        self.outputs: dict[str, Array] = {}
        self.windows: dict[str, tuple[ConvWindow | None, Layout]] = {}

    def __call__(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        outputs = call(*args, **kwargs)
        module = context.module
        if context.method_name != "__call__" or _observer.get() is not self:
            return outputs
        layer = getattr(module, "layer", None)
        is_conv = isinstance(layer, standard.Conv) and layer.groups == 1
        path = "/".join(module.path)
        params = module.variables.get("params", {}) if self._all_modules else {}
        has_params = any(not isinstance(value, Mapping) for value in params.values())
        if has_params:
            self.modules[path] = module.clone(parent=None, name=None)
        elif not is_conv and not isinstance(module, nn.Dense):
            return outputs
        inputs = args[0] if args else next(iter(kwargs.values()))
        window, layout = _read_window(module, inputs) if is_conv else (None, "nhwc")
        return self.tap(path, inputs, outputs, window, layout)

    def tap(
        self, path: str, inputs: Array, outputs: Array, window: ConvWindow | None, layout: Layout
    ) -> Array:
        """Record a layer, and return its outputs, passed through `tap` if there are slots. Raises
        ValueError if the layer was recorded before."""
        if path in self.inputs:
            raise ValueError(
                f"{path}: is applied twice in a step; must be applied once, as only one input of "
                "its weights can be observed"
            )
        self.inputs[path] = inputs
        self.outputs[path] = outputs
        self.windows[path] = (window, layout)
        return outputs if self._slots is None else tap(outputs, self._slots[path])


def _read_window(module: Any, inputs: Array) -> tuple[ConvWindow | None, Layout]:
    """Return the geometry of a convolution and the layout of its images."""
    layer = module.layer
    layout = module.context.layout
    _, height, width, _ = shape_nhwc(inputs, layout)
    sizes = (height, width)
    kernel, strides, dilation = map(pair, (layer.kernel, layer.stride, layer.dilation))
    pads = compute_pads(sizes, compute_reach(kernel, dilation), strides, layer.padding)
    return make_window(sizes, kernel, strides, pads, dilation, groups=1), layout


@jax.custom_vjp
def tap(outputs: Array, slot: Array) -> Array:
    """Return the outputs. Their cotangent is also the cotangent of `slot`, of the same shape."""
    return outputs


tap.defvjp(lambda outputs, slot: (outputs, None), lambda _, cotangent: (cotangent, cotangent))
