"""Apply a list of layers: each one's computation, and the context that it computes in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import Any, TypeVar

import jax
from flax import linen as nn
from jax import Array

from pipeline.models.layers.model_spec import InitSpec, LayerSpec
from pipeline.models.layers.path_patterns import is_frozen
from pipeline.models.layers.precision import TypeRule, rule_for
from pipeline.models.layers.standard import scope_names
from pipeline.models.layers.tokens import Lookup
from pipeline.models.lowerings.problem.image_layout import Layout
from pipeline.models.lowerings.problem.lowering import DEFAULTS, LoweringPolicy
from pipeline.models.modules.layout import shape_nhwc

Computation = TypeVar("Computation", bound=Callable[..., Any])
"""A flax module or a function."""


@dataclass(frozen=True)
class LayerContext:
    """A layer's place in the network, and the settings that it is computed with."""

    path: tuple[str, ...]
    initializers: InitSpec
    dtype: str
    train: bool
    policy: LoweringPolicy = DEFAULTS
    layout: Layout = "nhwc"
    """Order of axes of the images that the layer reads and returns."""
    rules: tuple[TypeRule, ...] = ()
    """Layers that compute in another type than `dtype`."""
    token_mask: Array | None = None
    """True for a token, False for padding: bool (batch, tokens). None: all are tokens."""
    batch_axis: str | None = None
    """Axis of a mesh whose devices share the batch that batch norm normalises over."""
    position: Array | None = None
    """Place of the only token that is read, int32 (), after the tokens whose keys and values are
    cached; None: all tokens are read at once."""
    cached_tokens: int = 0
    """The number of tokens that a cache has room for."""
    fixed_statistics: tuple[str, ...] = ()
    """Patterns, as of `train.freeze`: batch norm whose parameters they cover is not trained."""
    recomputes: bool = False
    """Whether the backward pass computes the inner layers of blocks again."""

    @property
    def trains_statistics(self) -> bool:
        """Whether batch norm normalises by the batch, and updates its running statistics."""
        paths = [(*self.path, name) for name in ("scale", "bias")]
        return self.train and not all(is_frozen(self.fixed_statistics, path) for path in paths)

    @property
    def name(self) -> str:
        """The layer's name among its siblings."""
        return self.path[-1]

    def inside(self, name: str) -> LayerContext:
        """The context of the child layer called `name`."""
        return dataclasses.replace(self, path=(*self.path, name))

    def __str__(self) -> str:
        return "/".join(self.path)


@singledispatch
def apply_layer(layer: LayerSpec, x: Array, context: LayerContext) -> Array:
    """Apply one layer. Call inside its parent flax module.

    A custom layer has a method `compute`; layers of the package are registered with `computes`.
    Raises TypeError for a layer without either.
    """
    # A layer without a flax module would have no name in a profile or an autopsy.
    with jax.named_scope(context.name):
        result: Array = layer.compute(x, context)
    return result


def computes(description: type[LayerSpec]) -> Callable[[Computation], Computation]:
    """Decorator: register the computation of a layer and its subclasses.

    It is a flax module with the fields `layer` and `context`, which is called with x in the scope
    `context.name`, a block if its class has `is_block`; or, for a layer without parameters, a
    function of (layer, x, context).
    """

    def register(computation: Computation) -> Computation:
        is_module = isinstance(computation, type)
        apply = partial(_apply_module, computation) if is_module else computation
        apply_layer.register(description, apply)
        return computation

    return register


def _apply_module(module: Any, layer: LayerSpec, x: Array, context: LayerContext) -> Array:
    if context.recomputes and context.train and getattr(module, "is_block", False):
        # Its inner blocks are computed again with it.
        module = nn.remat(module)
        context = dataclasses.replace(context, recomputes=False)
    y: Array = module(layer=layer, context=context, name=context.name)(x)
    return y


LayerInterceptor = Callable[[LayerSpec, Callable[[Array], Array], Array, LayerContext], Array]
"""(layer, its computation, x, its context) -> its result."""
_interceptor: ContextVar[LayerInterceptor | None] = ContextVar("_interceptor", default=None)


@contextmanager
def around_layers(interceptor: LayerInterceptor) -> Iterator[None]:
    """Let a function compute each layer of a list that is applied or traced in the body.

    The function gets the layer's computation, and its result replaces the layer's. In another such
    body, the outer function gets the inner one's computation.
    """
    outer = _interceptor.get()
    token = _interceptor.set(interceptor if outer is None else _nest(outer, interceptor))
    try:
        yield
    finally:
        _interceptor.reset(token)


def _nest(outer: LayerInterceptor, inner: LayerInterceptor) -> LayerInterceptor:
    """Return an interceptor that calls `outer`, whose computation of a layer is `inner`'s."""

    def intercept(
        layer: LayerSpec, compute: Callable[[Array], Array], x: Array, context: LayerContext
    ) -> Array:
        return outer(layer, lambda x: inner(layer, compute, x, context), x, context)

    return intercept


def record_layers(
    note: Callable[[tuple[str, ...], str, Any], None],
) -> AbstractContextManager[None]:
    """Call `note` with path, kind and result of each layer of a list that the body applies."""

    def call_and_note(
        layer: LayerSpec, compute: Callable[[Array], Array], x: Array, context: LayerContext
    ) -> Array:
        y = compute(x)
        note(context.path, layer.name, y)
        return y

    return around_layers(call_and_note)


def apply_layers(stack: tuple[LayerSpec, ...], x: Array, context: LayerContext) -> Array:
    """Apply layers one after the other, each in the scope of its name."""
    interceptor = _interceptor.get()
    for name, layer in zip(scope_names(stack), stack, strict=True):
        inside = context.inside(name)
        if interceptor is None:
            x = _apply_by_rules(layer, x, inside)
        else:
            x = interceptor(layer, partial(_apply_by_rules, layer, context=inside), x, inside)
    return x


def _apply_by_rules(layer: LayerSpec, x: Array, context: LayerContext) -> Array:
    """Cast x to the type of the layer's rule, and apply the layer in that type.

    Inner layers that no rule covers compute in that type too. Without rules x is not cast.
    """
    if not context.rules:
        return apply_layer(layer, x, context)
    rule = rule_for(context.rules, layer.name, context.path)
    dtype = context.dtype if rule is None else rule.dtype
    # A lookup reads whole numbers, which do not fit into 16 bits.
    inputs = x if isinstance(layer, Lookup) else x.astype(dtype)
    result = apply_layer(layer, inputs, dataclasses.replace(context, dtype=dtype))
    return result.astype(context.dtype) if rule is not None and rule.casts_back else result


def require_images(x: Array, context: LayerContext) -> None:
    """Raise ValueError, with the layer and the shape, unless x has four axes."""
    if x.ndim != 4:
        raise ValueError(
            f"{context}: reads images (batch, height, width, channels), "
            f"and shape {x.shape} reaches it"
        )


def features_of(features: int | str, context: LayerContext) -> int:
    """Return the number of features. Raises ValueError for `$classes`, outside of `layers`."""
    if isinstance(features, str):
        raise ValueError(
            f"{context}: features {features} stands for a number only in the model `layers`; "
            "a network in Python puts the number of classes there itself"
        )
    return features


def require_groups(x: Array, groups: int, context: LayerContext) -> int:
    """Return the number of channels of x. Raises ValueError if `groups` doesn't divide it."""
    shape = shape_nhwc(x, context.layout)
    if shape[-1] % groups:
        raise ValueError(
            f"{context}: groups {groups} does not divide the {shape[-1]} channels of shape {shape}"
        )
    return shape[-1]
