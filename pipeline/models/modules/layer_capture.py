"""What every dense and convolutional layer reads, and the gradient at what it gives.

Second-order optimizers are made of these. The layers know nothing of it: flax hands every call of
a module to an interceptor, and without one a network is the program that it always was. What a
layer gives passes through an identity with a second argument, of the same shape and otherwise
unused, whose gradient is that at the layer's output.

Observed are `nn.Dense` and the layer `conv` with one group; other layers are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.tree_util import register_dataclass

from pipeline.lowerings.problem.conv_window import Window, make_window
from pipeline.lowerings.problem.image_layout import Layout
from pipeline.models.layers import standard
from pipeline.models.layers.fields import pair
from pipeline.models.layers.padding import pads_around, reach
from pipeline.models.modules.layout import shape_nhwc


@register_dataclass
@dataclass(frozen=True)
class LayerCapture:
    """One layer in one step.

    `inputs` is what it read, and `cotangents` the gradient at what it gave: (batch, features) or
    (batch, tokens, features) of a dense layer; of a convolution images in its layout. `window` is
    how the kernel moved over them, and None of a dense layer.
    """

    inputs: Array
    cotangents: Array
    window: Window | None = field(metadata={"static": True})
    layout: Layout = field(metadata={"static": True})


Observations = Mapping[str, LayerCapture]
"""By the path of the layer's scope, such as `stage_0/conv_1`."""


@register_dataclass
@dataclass(frozen=True)
class Captured:
    """What the layers saw in the step that gradients come from.

    The first `count` (int32 scalar) samples are real. `scale` (float32 scalar) times the cotangents
    are the gradients of each sample's own loss: the inverse of the loss scale and, where the loss
    is a mean, times the number of samples.
    """

    layers: Observations
    count: Array | int
    scale: Array | float


def grad_observing_layers(
    function: Callable[[Any], tuple[Array, Any]],
) -> Callable[[Any], tuple[Any, Any, Observations]]:
    """A function of parameters -> (gradients, auxiliary output, observations).

    `function` gives (scalar, auxiliary output), as for `jax.grad(function, has_aux=True)`, and
    applies a network on its way. Cotangents are those of the scalar. Raises ValueError where a
    layer is applied twice, since its weights then see two inputs.
    """

    def outputs_of(params: Any) -> dict[str, Array]:
        taps = _Taps(None)
        with nn.intercept_methods(taps):
            function(params)
        return taps.outputs

    def differentiate(params: Any) -> tuple[Any, Any, Observations]:
        shapes = jax.eval_shape(outputs_of, params)
        slots = {path: jnp.zeros(shape.shape, shape.dtype) for path, shape in shapes.items()}
        windows: dict[str, tuple[Window | None, Layout]] = {}

        def tapped(params: Any, slots: dict[str, Array]) -> tuple[Array, tuple[Any, Any]]:
            taps = _Taps(slots)
            with nn.intercept_methods(taps):
                value, auxiliary = function(params)
            windows.update(taps.windows)
            return value, (auxiliary, taps.inputs)

        grad = jax.grad(tapped, argnums=(0, 1), has_aux=True)
        (gradients, cotangents), (auxiliary, inputs) = grad(params, slots)
        observations = {
            path: LayerCapture(inputs[path], cotangents[path], *windows[path]) for path in slots
        }
        return gradients, auxiliary, observations

    return differentiate


class _Taps:
    """The interceptor: collects what observed layers read and give, by path.

    It is made anew for every trace, which what it holds must not outlive.
    """

    def __init__(self, slots: Mapping[str, Array] | None) -> None:
        self._slots = slots
        self.inputs: dict[str, Array] = {}
        self.outputs: dict[str, Array] = {}
        self.windows: dict[str, tuple[Window | None, Layout]] = {}

    def __call__(
        self,
        next_function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        outputs = next_function(*args, **kwargs)
        module = context.module
        if context.method_name != "__call__" or not _is_observed(module):
            return outputs
        path = "/".join(module.path)
        if path in self.inputs:
            raise ValueError(
                f"{path}: is applied twice in a step; a layer can be observed only where its "
                "weights see one input"
            )
        self.inputs[path], self.outputs[path] = args[0], outputs
        self.windows[path] = _window(module, args[0])
        return outputs if self._slots is None else _tap(outputs, self._slots[path])


def _is_observed(module: nn.Module) -> bool:
    layer = getattr(module, "layer", None)
    return isinstance(module, nn.Dense) or (isinstance(layer, standard.Conv) and layer.groups == 1)


def _window(module: Any, inputs: Array) -> tuple[Window | None, Layout]:
    """How the kernel of a layer moves over its inputs, and their layout."""
    if isinstance(module, nn.Dense):
        return None, "nhwc"
    layer, layout = module.layer, module.context.layout
    _, height, width, _ = shape_nhwc(inputs, layout)
    kernel, strides, dilation = pair(layer.kernel), pair(layer.stride), pair(layer.dilation)
    covered = reach(kernel, dilation)
    pads = pads_around((height, width), covered, strides, layer.padding)
    return make_window((height, width), kernel, strides, pads, dilation, groups=1), layout


@jax.custom_vjp
def _tap(outputs: Array, slot: Array) -> Array:
    """The outputs; their cotangent is the slot's too."""
    return outputs


def _tap_forward(outputs: Array, slot: Array) -> tuple[Array, None]:
    return outputs, None


def _tap_backward(_: None, cotangent: Array) -> tuple[Array, Array]:
    return cotangent, cotangent


_tap.defvjp(_tap_forward, _tap_backward)
