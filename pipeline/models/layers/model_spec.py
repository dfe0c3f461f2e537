"""Components that describe a network: layers, initialisers and models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from pipeline.core.registry import ComponentOf, Seq, Spec

if TYPE_CHECKING:
    from flax import linen as nn


MAX_LAYERS = 10_000


class InitializerSpec(Spec):
    """Distribution of fresh weights: the component of kind "initializer"."""

    name: str

    @abstractmethod
    def build(self) -> Any:
        """A `jax.nn.initializers`-style function (key, shape, dtype) -> array."""


Initializer = Annotated[InitializerSpec, ComponentOf("initializer")]


class LayerSpec(Spec):
    """One layer of a network: the component of kind "layer"."""

    name: str
    scope: Annotated[str, Field(pattern=r"^\w+$")] | None = None
    """The layer's name in parameter paths; null numbers it by kind (`conv_0`, `conv_1`, ...)."""

    def compute(self, x: Any, context: Any) -> Any:
        """Compute a custom layer, for which no function is registered.

        Called while the network is traced, inside a flax module, so it may call modules named
        `context.name`. `context` is a `LayerContext`: path, dtype and whether this is training.
        """
        raise TypeError(
            f"{context}: nothing computes layer {self.name}; give its class a method "
            "`compute(self, x, context)`"
        )


Layer = Annotated[LayerSpec, ComponentOf("layer")]
Layers = Seq[Layer]


class InitRule(Spec):
    """Initialiser of the parameters that a pattern covers, such as `dense_2/kernel`."""

    pattern: str
    init: Initializer


class InitRules(Spec):
    """Initialisers of single parameters."""

    rules: Seq[InitRule] = ()
    """The last rule that covers a parameter decides, before all other settings."""


class InitSpec(InitRules):
    """Initialiser of each kind of weight, if the layer names none."""

    conv: Initializer
    dense: Initializer
    bias: Initializer


class ModelSpec(Spec):
    """Base of every network: the component of kind "model" that a recipe names."""

    table_input: ClassVar[Literal["features", "fields"]] = "features"
    """Input that it takes of a table: numbers and one-hot categories, or the number and the value
    of the feature of each column."""
    two_outputs_are_classes: ClassVar[bool] = False
    """Whether two outputs are always the logits of two classes, never two numbers or labels."""
    name: str
    init: InitSpec

    def fit_to_table(self, features: int | None) -> ModelSpec:
        """Return the model for a table of that number of features; None for other data.

        Raises ValueError if the model is for another number.
        """
        return self

    @abstractmethod
    def build(self, classes: int, dtype: str) -> nn.Module:
        """The flax module, called as `module(images NHWC, train=bool) -> logits (batch, classes)`.

        `dtype` is the type of activations; parameters stay float32.
        """


def count_layers(layers: Any, counted: int = 0) -> int:
    """Add the number of layers to `counted`, with inner layers and repetitions.

    Raises ValueError above `MAX_LAYERS`, which would take longer than minutes to trace.
    """
    for layer in _layers_in(layers):
        counted += 1
        if counted > MAX_LAYERS:
            raise ValueError(f"more than {MAX_LAYERS:,} layers, those inside of others among them")
        for _ in range(getattr(layer, "repeat", 1)):
            counted = count_layers(tuple(value for _, value in layer), counted)
    return counted


def _layers_in(value: Any) -> Iterator[LayerSpec]:
    if isinstance(value, LayerSpec):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _layers_in(item)
