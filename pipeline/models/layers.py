"""What a network can be made of, with MindSpore's defaults; `network` says what each computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Strict,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from pipeline.models.spec import Initializer, Layers, LayerSpec
from pipeline.registry import part

CLASSES = "$classes"


class _Expected:
    """Says in one sentence what a field of several types takes, instead of once for each type."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        message = f"must be {self.text}"
        return core_schema.custom_error_schema(
            handler(source), "expected", custom_error_message=message
        )


Features = Annotated[
    PositiveInt | Literal["$classes"], _Expected(f"a whole number above 0, or {CLASSES}")
]
"""How many features a layer gives; `$classes` stands for the dataset's number of classes."""

Size = Annotated[
    PositiveInt | Annotated[tuple[PositiveInt, PositiveInt], Strict(False)],
    _Expected("a whole number above 0, or [height, width]"),
]

Edges = Annotated[tuple[NonNegativeInt, NonNegativeInt], Strict(False)]
Padding = Annotated[
    Literal["same", "valid"] | NonNegativeInt | Annotated[tuple[Edges, Edges], Strict(False)],
    _Expected("same, valid, a whole number or [[top, bottom], [left, right]]"),
]
"""`same` gives ceil(size / stride) positions, `valid` adds nothing."""


@part("layer")
class Conv(LayerSpec):
    """Two-dimensional convolution of images (batch, height, width, channels)."""

    name: Literal["conv"] = "conv"
    features: Features
    kernel: Size
    stride: Size = 1
    padding: Padding = "same"
    dilation: Size = 1
    groups: PositiveInt = 1
    bias: bool = False
    kernel_init: Initializer | None = None
    bias_init: Initializer | None = None

    @model_validator(mode="after")
    def _groups_divide_features(self) -> Self:
        if self.features != CLASSES and self.features % self.groups:
            raise ValueError(
                f"features {self.features} is not a multiple of groups {self.groups}; "
                "every group must give as many features"
            )
        return self


@part("layer")
class Dense(LayerSpec):
    """Linear map of (batch, features)."""

    name: Literal["dense"] = "dense"
    features: Features
    bias: bool = True
    kernel_init: Initializer | None = None
    bias_init: Initializer | None = None


@part("layer")
class BatchNorm(LayerSpec):
    """Normalise each channel over the batch; `momentum` is what the running statistics keep."""

    name: Literal["batch_norm"] = "batch_norm"
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.9
    epsilon: PositiveFloat = 1e-5
    scale_init: float = 1.0
    """What the scale starts at; 0 in the last of a residual body makes a fresh block the identity
    (Goyal et al. 2017, sec. 5.1)."""


@part("layer")
class LayerNorm(LayerSpec):
    """Normalise each sample over its channels."""

    name: Literal["layer_norm"] = "layer_norm"
    epsilon: PositiveFloat = 1e-7


@part("layer")
class GroupNorm(LayerSpec):
    """Normalise each sample over its positions and each group of channels."""

    name: Literal["group_norm"] = "group_norm"
    groups: PositiveInt
    epsilon: PositiveFloat = 1e-5


class Activation(LayerSpec):
    """Base of the layers that map each value on its own."""


@part("layer")
class Relu(Activation):
    """max(x, 0)."""

    name: Literal["relu"] = "relu"


@part("layer")
class Relu6(Activation):
    """min(max(x, 0), 6)."""

    name: Literal["relu6"] = "relu6"


@part("layer")
class Gelu(Activation):
    """Gaussian error linear unit, in the tanh form with 0.044715 (G-03)."""

    name: Literal["gelu"] = "gelu"


@part("layer")
class Tanh(Activation):
    """Hyperbolic tangent."""

    name: Literal["tanh"] = "tanh"


@part("layer")
class Sigmoid(Activation):
    """1 / (1 + exp(-x))."""

    name: Literal["sigmoid"] = "sigmoid"


@part("layer")
class Swish(Activation):
    """x * sigmoid(x)."""

    name: Literal["swish"] = "swish"


class Pool(LayerSpec):
    """Base of the layers that reduce a moving window of the image."""

    kernel: Size
    stride: Size | None = None
    """null moves the window by its own size."""
    padding: Padding = "valid"


@part("layer")
class MaxPool(Pool):
    """Largest value of every window; padding never wins."""

    name: Literal["max_pool"] = "max_pool"


@part("layer")
class AvgPool(Pool):
    """Mean of every window; padding does not count."""

    name: Literal["avg_pool"] = "avg_pool"


@part("layer")
class GlobalAvgPool(LayerSpec):
    """Mean over all positions: (batch, height, width, channels) -> (batch, channels)."""

    name: Literal["global_avg_pool"] = "global_avg_pool"


@part("layer")
class Flatten(LayerSpec):
    """All values of a sample in one row: (batch, ...) -> (batch, features)."""

    name: Literal["flatten"] = "flatten"


@part("layer")
class Dropout(LayerSpec):
    """Zero a share `rate` of the values in training and scale up the others to match."""

    name: Literal["dropout"] = "dropout"
    rate: Annotated[float, Field(ge=0, lt=1)] = 0.5


@part("layer")
class Sequence(LayerSpec):
    """Layers in a scope of their own, `repeat` times over, each time with weights of their own."""

    name: Literal["sequence"] = "sequence"
    body: Layers
    repeat: PositiveInt = 1


@part("layer")
class Residual(LayerSpec):
    """body(x) + shortcut(x) (He et al. 2016); an empty shortcut is the identity."""

    name: Literal["residual"] = "residual"
    body: Layers
    shortcut: Layers = ()


def scope_names(layers: Iterable[LayerSpec]) -> list[str]:
    """What sibling layers are called in parameter paths: their scope, or their kind numbered.

    Raises ValueError where two of them would share a name.
    """
    counts: Counter[str] = Counter()
    names: list[str] = []
    for layer in layers:
        name = layer.scope or f"{layer.name}_{counts[layer.name]}"
        counts[layer.name] += layer.scope is None
        if name in names:
            raise ValueError(f"two layers share the scope {name!r}; each must have its own")
        names.append(name)
    return names
