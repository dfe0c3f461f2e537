"""A list of layers as a flax module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.data.inputs import MASK, name_mask
from pipeline.models.layers.model_spec import InitSpec, LayerSpec, looks_up_rows, walk_layers
from pipeline.models.layers.precision import Products, TypeRule
from pipeline.models.layers.standard import Branches
from pipeline.models.lowerings.problem import DEFAULTS, Layout, LoweringPolicy, swap_layout
from pipeline.models.modules.apply_layers import (
    LayerContext,
    apply_layers,
    find_layer_without_chwn,
    name_scopes,
    to_nhwc,
)

if TYPE_CHECKING:
    from pipeline.data.columns import Split
    from pipeline.data.inputs import NetworkInputs


def lowers_itself(network: Any) -> bool:
    """Return whether the layers of a network call the policy, so that it isn't rewritten."""
    return bool(getattr(network, "lowers_itself", False))


def is_imported(network: Any) -> bool:
    """Return whether a network is custom code, an `ImportedNetwork`."""
    return bool(getattr(network, "is_imported", False))


@runtime_checkable
class RowLookupNetwork(Protocol):
    """A network whose tables are known before training, so that a token without a row is found."""

    def require_rows(self, inputs: NetworkInputs, split: Split, vocabulary: int | None) -> None:
        """Raise ValueError for a token of a split without a row in a table.

        `vocabulary` is the number of tokens of texts; None for other samples.
        """


class Network(nn.Module):
    """A list of layers, from samples to logits.

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
    products: Products = "plain"
    batch_axis: str | None = None
    fixed_statistics: tuple[str, ...] = ()
    cached_tokens: int = 0
    recomputes: bool = False

    def can_be_batch_last(self, image: tuple[int, ...]) -> bool:
        return find_layer_without_chwn(self.layers) is None

    def structure(self, image: tuple[int, ...]) -> str:
        return repr((self.layers, self.rules, self.products))

    @nn.compact
    def __call__(
        self, inputs: Array | Mapping[str, Array], train: bool, position: Array | None = None
    ) -> Array:
        """Return logits (batch, classes), float32, of an array, such as images (batch, height,
        width, channels) or tokens int32 (batch, tokens).

        Several inputs by name are read by a first layer `branches` with these names. The input
        `mask`, bool (batch, tokens), is false for padding, which attention ignores; of several
        inputs, each may have a mask, such as `query_mask`. A mask int32 (batch, tokens) has the
        number of each token's document, or 0 for padding. A network that classifies every token or
        every pixel returns (batch, tokens, classes) or (batch, height, width, classes). With a
        `position`, int32 (), the input is the token at that position, (batch, 1), and the
        collection `cache` has the keys and values of earlier tokens. Raises ValueError, with the
        layer and the shape, if a layer doesn't fit the layer before it, the inputs or the layout.
        """
        x, mask, masks = separate_masks(self.layers, inputs)
        documents = None
        if mask is not None and mask.dtype != bool:
            _require_separate_documents(self.layers)
            documents, mask = mask, mask > 0
        context = LayerContext(
            path=(),
            initializers=self.initializers,
            dtype=self.dtype,
            train=train,
            policy=self.policy,
            layout=self.layout,
            rules=self.rules,
            products=self.products,
            batch_axis=self.batch_axis,
            fixed_statistics=self.fixed_statistics,
            position=position,
            cached_tokens=self.cached_tokens,
            recomputes=self.recomputes,
            token_mask=mask,
            documents=documents,
            input_masks=masks,
        )
        reads_numbers = any(map(looks_up_rows, self.layers[:1]))
        # Under rules every layer casts its input: the first may compute in float32.
        if not (reads_numbers or self.rules or isinstance(x, Mapping)):
            x = x.astype(self.dtype)
        if self.layout == "chwn":
            _require_batch_last(self.layers, x)
            x = swap_layout(x)
        logits = to_nhwc(apply_layers(self.layers, x, context), self.layout)
        return logits.astype(jnp.float32)


def separate_masks(
    stack: tuple[LayerSpec, ...], inputs: Any | Mapping[str, Any]
) -> tuple[Any, Any | None, Mapping[str, Any]]:
    """Return what the first layer reads, the mask of padding, and the masks of several inputs by
    the names of these. Raises ValueError for several inputs that the first layer doesn't name, and
    for a mask alone."""
    if not isinstance(inputs, Mapping):
        return inputs, None, {}
    first = stack[0] if stack else None
    read = first.inputs if isinstance(first, Branches) else ()
    # A branch may read a column that is named like a mask.
    names = {name: name_mask(name) for name in inputs if name_mask(name) not in read}
    masks = {name: inputs[mask] for name, mask in names.items() if mask in inputs}
    mask_names = {MASK, *map(name_mask, masks)} - set(read)
    others = {name: array for name, array in inputs.items() if name not in mask_names}
    if read:
        return others, None if MASK in read else inputs.get(MASK), masks
    if len(others) > 1:
        raise ValueError(
            f"the network reads {', '.join(others)}; its first layer must be branches with inputs "
            f"{list(others)}"
        )
    if not others:
        raise ValueError(
            f"the network gets {', '.join(inputs)} alone; must get an array besides masks"
        )
    ((name, array),) = others.items()
    return array, inputs.get(MASK, masks.get(name)), {}


def _require_separate_documents(stack: tuple[LayerSpec, ...]) -> None:
    """Raise ValueError with a layer that doesn't keep documents of a window apart."""
    for scope, layer in zip(name_scopes(stack), stack, strict=True):
        for inner in walk_layers((layer,)):
            if inner.mixes_tokens:
                raise ValueError(
                    f"{scope}: layer {inner.name} mixes the tokens of documents that share a "
                    "window, as dataset=documents packs them; remove it, or choose another dataset"
                )


def _require_batch_last(stack: tuple[LayerSpec, ...], images: Any) -> None:
    """Raise ValueError if the images or a layer can't be computed in CHWN."""
    layer = find_layer_without_chwn(stack)
    if layer is not None:
        raise ValueError(f"layer {layer.name} can't be computed in the layout chwn; must be nhwc")
    shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(images)]
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(
            f"the layout chwn is for images, and the input has shape "
            f"{', '.join(map(str, shapes))}; must be nhwc"
        )
