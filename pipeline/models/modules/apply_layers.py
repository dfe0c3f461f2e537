"""Application of a list of layers: each layer's computation, its context, the layout of images.

NHWC is the layout of the input, and every layer can compute in it. In CHWN the batch is the
innermost axis, so vectors consist of samples instead of channels. That is faster for few channels.
Height and width are axes 1 and 2 in both. Parameters are the same, so a checkpoint fits both.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax

from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import (
    InitSpec,
    LayerSpec,
    Padding,
    looks_up_rows,
)
from pipeline.models.layers.path_patterns import SAMPLE_LOSSES, is_frozen
from pipeline.models.layers.precision import Products, TypeRule, find_type_rule
from pipeline.models.lowerings.problem import DEFAULTS, Layout, LoweringPolicy, Pair

Computation = TypeVar("Computation", bound=Callable[..., Any])
"""A class of flax modules or a function."""
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


@dataclass(frozen=True)
class LayerContext:
    """A layer's place in the network, and the settings that it is computed with."""

    path: tuple[str, ...]
    initializers: InitSpec
    dtype: str
    """Type of the activations."""
    train: bool
    policy: LoweringPolicy = DEFAULTS
    """Chooses how convolutions, dense layers and max pooling are computed."""
    products: Products = "plain"
    """How dense layers multiply."""
    layout: Layout = "nhwc"
    """Order of axes of the images that the layer reads and returns."""
    rules: tuple[TypeRule, ...] = ()
    """Rules for layers that compute in another type than `dtype`."""
    token_mask: Array | None = None
    """Bool (batch, tokens): True for a token, False for padding. None: nothing is padded."""
    documents: Array | None = None
    """Number of each token's document, int32 (batch, tokens), ascending from 1, and 0 for padding.
    None: a sample is one document."""
    input_masks: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    """The same for each of several inputs, by the name of the input that the first layer reads."""
    batch_axis: str | None = None
    """Axis of a mesh whose devices share the batch that batch norm normalises over."""
    position: Array | None = None
    """Position of the input's only token, int32 (), if the keys and values of earlier tokens are in
    a cache; None: the input has all tokens."""
    cached_tokens: int = 0
    """Number of tokens for whose keys and values a cache has room."""
    fixed_statistics: tuple[str, ...] = ()
    """Patterns, as in `train.freeze`. Batch norm whose scale and bias are frozen by them uses its
    running statistics in training too, and doesn't update them."""
    recomputes: bool = False
    """Whether the backward pass recomputes the inner layers of blocks."""

    @property
    def trains_statistics(self) -> bool:
        """Whether batch norm normalises by the batch, and updates its running statistics."""
        paths = [(*self.path, name) for name in ("scale", "bias")]
        return self.train and not all(is_frozen(self.fixed_statistics, path) for path in paths)

    @property
    def name(self) -> str:
        return self.path[-1]

    def inside(self, name: str) -> LayerContext:
        return dataclasses.replace(self, path=(*self.path, name))

    def __str__(self) -> str:
        return "/".join(self.path)


_computations: dict[type[LayerSpec], Callable[..., Array]] = {}
"""Functions (layer, x, context) by the class whose layers they compute."""


def apply_layer(layer: LayerSpec, x: Array, context: LayerContext) -> Array:
    """Apply one layer, inside its parent flax module. A custom layer has a method `compute`. The
    computations of the package's layers are registered with `computes`, by modules that are
    imported when a network has one of these layers. The layer's class comes before its bases.
    Raises TypeError for a layer without a computation."""
    computation = _find_computation(type(layer))
    if computation is not None:
        return computation(layer, x, context)
    # A layer without a flax module would have no name in a profile or an autopsy.
    with jax.named_scope(context.name):
        result: Array = layer.compute(x, context)
    return result


@cache
def _find_computation(kind: type[LayerSpec]) -> Callable[..., Array] | None:
    """Return the registered computation of a class; None if its method `compute` computes it."""
    for base in kind.__mro__:
        if "compute" in vars(base):
            return None
        module = _MODULES.get(f"{base.__module__}.{base.__name__}")
        if module is not None:
            # This waits for another thread that imports it: what it registers may not work yet.
            import_module(module)
        if base in _computations:
            return _computations[base]
    return None


def computes(description: type[LayerSpec]) -> Callable[[Computation], Computation]:
    """Decorator that registers the computation of a layer and its subclasses.

    The computation is a flax module with the fields `layer` and `context`. It is called with x in
    the scope `context.name`. With the class variable `is_block = True` it is recomputed if
    `LayerContext.recomputes` is set. The computation may also be a function (layer, x, context).
    """

    def register(computation: Computation) -> Computation:
        is_module = isinstance(computation, type)
        apply = partial(_apply_module, computation) if is_module else computation
        _computations[description] = apply
        return computation

    return register


COMPUTATIONS: Mapping[str, Sequence[str]] = {
    "pipeline.models.modules.adversarial": ("standard.Adversarial",),
    "pipeline.models.modules.composite": (
        "standard.Sequence",
        "standard.Residual",
        "standard.Branches",
        "standard.Gate",
        "standard.GatedMlp",
        "standard.DualPath",
        "standard.Views",
    ),
    "pipeline.models.modules.convolution": (
        "standard.Conv",
        "standard.Conv3d",
        "standard.ConvTranspose",
    ),
    "pipeline.models.modules.norms": (
        "standard.LayerNorm",
        "standard.RmsNorm",
        "standard.GroupNorm",
    ),
    "pipeline.models.modules.token_mixers": (
        "token_mixers.MixtureOfExperts",
        "token_mixers.StateSpace",
        "tokens.Conv1d",
    ),
    "pipeline.models.modules.recurrent": ("tokens.Lstm", "tokens.Gru"),
    "pipeline.models.modules.standard": (
        "standard.Dense",
        "standard.BatchNorm",
        "standard.Dropout",
        "standard.Activation",
        "standard.LeakyRelu",
        "standard.MaxPool",
        "standard.AvgPool",
        "standard.GlobalAvgPool",
        "standard.AdaptiveAvgPool",
        "standard.AdaptiveMaxPool",
        "standard.Upsample",
        "standard.ChannelShuffle",
        "standard.Flatten",
        "standard.Reshape",
    ),
    "pipeline.models.modules.tables": (
        "tables.TableColumns",
        "tables.MemberDense",
        "tables.MemberHead",
    ),
    "pipeline.models.modules.tokens": (
        "tokens.Embedding",
        "tokens.TiedEmbedding",
        "tokens.Tokens",
        "tokens.ClassToken",
        "tokens.PositionEmbedding",
        "tokens.MeanToken",
        "tokens.Pool1d",
        "tokens.SelfAttention",
        "tokens.FirstToken",
    ),
}
"""Modules that register the computations of these layers of `pipeline.models.layers`, whose
descriptions aren't imported for it."""
_MODULES = {
    f"pipeline.models.layers.{layer}": module
    for module, layers in COMPUTATIONS.items()
    for layer in layers
}


def _apply_module(module: Any, layer: LayerSpec, x: Array, context: LayerContext) -> Array:
    if context.recomputes and context.train and getattr(module, "is_block", False):
        # Inner blocks are recomputed with the outer block.
        module = nn.remat(module)
        context = dataclasses.replace(context, recomputes=False)
    y: Array = module(layer=layer, context=context, name=context.name)(x)
    return y


LayerInterceptor = Callable[[LayerSpec, Callable[[Array], Array], Array, LayerContext], Array]
"""(layer, its computation, x, its context) -> its result."""
_interceptor: ContextVar[LayerInterceptor | None] = ContextVar("_interceptor", default=None)


@contextmanager
def intercept_layers(interceptor: LayerInterceptor) -> Iterator[None]:
    """Let `interceptor` compute each layer that `apply_layers` applies or traces in the body. If
    bodies are nested, the outer interceptor is called first. The computation that is passed to it
    calls the inner interceptor."""
    outer = _interceptor.get()

    def intercept(
        layer: LayerSpec, compute: Callable[[Array], Array], x: Array, context: LayerContext
    ) -> Array:
        if outer is None:
            return interceptor(layer, compute, x, context)
        return outer(layer, lambda x: interceptor(layer, compute, x, context), x, context)

    token = _interceptor.set(intercept)
    try:
        yield
    finally:
        _interceptor.reset(token)


def record_layers(
    record: Callable[[tuple[str, ...], str, Any], None],
) -> AbstractContextManager[None]:
    """Call `record` with path, kind and result of each layer that `apply_layers` applies in the
    body."""

    def compute_and_record(
        layer: LayerSpec, compute: Callable[[Array], Array], x: Array, context: LayerContext
    ) -> Array:
        y = compute(x)
        record(context.path, layer.name, y)
        return y

    return intercept_layers(compute_and_record)


def apply_layers(stack: tuple[LayerSpec, ...], x: Array, context: LayerContext) -> Array:
    """Apply layers one after the other, each in the scope of its name."""
    interceptor = _interceptor.get()
    for name, layer in zip(name_scopes(stack), stack, strict=True):
        inside = context.inside(name)
        if interceptor is None:
            x = _apply_by_rules(layer, x, inside)
        else:
            x = interceptor(layer, partial(_apply_by_rules, layer, context=inside), x, inside)
    return x


def _apply_by_rules(layer: LayerSpec, x: Array, context: LayerContext) -> Array:
    """Cast x to the type of the layer's rule, and apply the layer in that type. Inner layers that
    no rule covers compute in that type too. Without any rules x isn't cast."""
    if not context.rules:
        return apply_layer(layer, x, context)
    rule = find_type_rule(context.rules, layer.name, context.path)
    dtype = context.dtype if rule is None else rule.dtype
    # A lookup reads whole numbers, which don't fit into 16 bits; branches cast their own inputs.
    keeps = isinstance(x, Mapping) or looks_up_rows(layer)
    inputs = x if keeps else x.astype(dtype)
    result = apply_layer(layer, inputs, dataclasses.replace(context, dtype=dtype))
    return result.astype(context.dtype) if rule is not None and rule.casts_back else result


def require_images(x: Array, context: LayerContext) -> None:
    """Raise ValueError with the layer and the shape if x isn't images (4 axes)."""
    if x.ndim != 4:
        raise ValueError(
            f"{context}: shape {x.shape} reaches the layer; must be images (batch, height, width, "
            "channels)"
        )


def require_number(features: int | str, context: LayerContext) -> int:
    """Return `features`. Raises ValueError for `$classes`, which only the model `layers`
    replaces."""
    if isinstance(features, str):
        raise ValueError(
            f"{context}: features {features} is a number only in the model `layers`; "
            "must be the number of classes in a network in Python"
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


def require_tokens(x: Array, context: LayerContext) -> None:
    """Raise ValueError if x isn't (batch, tokens, features)."""
    if x.ndim != 3:
        raise ValueError(
            f"{context}: shape {x.shape} reaches the layer; must be (batch, tokens, features): "
            "put tokens or embedding before it"
        )


def add_sample_losses(module: nn.Module, losses: Array) -> None:
    """Add to the losses of the samples of a training step, (batch,) float32. Other callers of the
    network, such as an evaluation, leave them out."""
    if not module.is_initializing():
        module.sow(SAMPLE_LOSSES, "loss", losses, reduce_fn=jnp.add, init_fn=lambda: jnp.float32(0))


def require_mask(shape: tuple[int, ...], context: LayerContext) -> Array | None:
    """Return the mask of padding; None without padding. Raises ValueError if the mask doesn't have
    this shape."""
    mask = context.token_mask
    if mask is not None and mask.shape != shape:
        raise ValueError(
            f"{context}: the mask of padding has shape {mask.shape}, and the tokens are {shape}; "
            "no layer before may add or drop tokens"
        )
    return mask


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
        # Custom code computes in NHWC.
        is_custom = type(layer).compute is not LayerSpec.compute
        is_grouped = isinstance(layer, standard.Conv) and layer.groups != 1
        if is_custom or is_grouped or not isinstance(layer, _CHWN_LAYERS):
            return layer
    return None


def compute_pads(
    sizes: Sequence[int], window: Sequence[int], strides: Sequence[int], padding: WindowPadding
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


def name_scopes(layers: Iterable[LayerSpec]) -> list[str]:
    """Return the names of sibling layers in parameter paths: the scope, or the kind with a number.
    Raises ValueError if two layers would share a name."""
    counts: Counter[str] = Counter()
    names: list[str] = []
    for layer in layers:
        name = layer.scope
        if name is None:
            name = f"{layer.name}_{counts[layer.name]}"
            counts[layer.name] += 1
        if name in names:
            raise ValueError(f"two layers share the scope {name!r}; scopes must differ")
        names.append(name)
    return names
