"""Components that describe a network: layers with their fields, initialisers and models.

Types of fields have the expected values for error messages.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, GetJsonSchemaHandler, NonNegativeInt, PositiveInt, Strict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from pipeline.core.registry import ComponentOf, Expected, Seq, Spec

if TYPE_CHECKING:
    from flax import linen as nn

    from pipeline.data.columns import Targets
    from pipeline.data.tables.encode_table import TableLayout

CLASSES: Final = "$classes"

Features = Annotated[
    PositiveInt | Literal["$classes"],  # A type can't have the name CLASSES here.
    Expected(f"a whole number above 0, or {CLASSES}"),
]
"""Number of features of a layer's output; `$classes` is the dataset's number of classes."""
MAX_LAYERS = 10_000


def map_texts(change: Callable[[str], Any], value: Any) -> Any:
    """Apply `change` to the texts in nested values; tuples become lists."""
    if isinstance(value, Mapping):
        return {key: map_texts(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(change, item) for item in value]
    return change(value) if isinstance(value, str) else value


def replace_classes(value: Any, classes: int) -> Any:
    """Return nested values with the number of classes for `$classes`; tuples become lists."""
    return map_texts(lambda text: classes if text == CLASSES else text, value)


Size = Annotated[
    PositiveInt | Annotated[tuple[PositiveInt, PositiveInt], Strict(False)],
    Expected("a whole number above 0, or [height, width]"),
]

VolumeSize = Annotated[
    PositiveInt | Annotated[tuple[PositiveInt, PositiveInt, PositiveInt], Strict(False)],
    Expected("a whole number above 0, or [depth, height, width]"),
]


def pair(size: Size) -> tuple[int, int]:
    """Return a size as height and width."""
    return (size, size) if isinstance(size, int) else size


def triple(size: VolumeSize) -> tuple[int, int, int]:
    """Return a size as depth, height and width."""
    return (size, size, size) if isinstance(size, int) else size


Count = Annotated[PositiveInt, Field(le=1000)]
"""Number of repetitions of layers, limited because each repetition is traced."""

AdaptiveSize = Annotated[
    Count | Annotated[tuple[Count, Count], Strict(False)],
    Expected("a whole number from 1 to 1000, or [height, width]"),
]

Edges = Annotated[tuple[NonNegativeInt, NonNegativeInt], Strict(False)]
Padding = Annotated[
    Literal["same", "valid", "symmetric"]
    | NonNegativeInt
    | Annotated[tuple[Edges, Edges], Strict(False)],
    Expected("same, valid, symmetric, a whole number or [[top, bottom], [left, right]]"),
]
"""same: ceil(size / stride) results; valid: no padding; a number: that many zeros on each side;
symmetric: (window - 1) // 2 zeros on each side. symmetric differs from same for even windows, and
for a stride above 1 at even sizes."""


class InitializerSpec(Spec):
    """Base of distributions of initial weights: the component of kind "initializer"."""

    name: str

    @abstractmethod
    def build(self) -> Any:
        """Return a function (key, shape, dtype) -> array, as of `jax.nn.initializers`."""


Initializer = Annotated[InitializerSpec, ComponentOf("initializer")]


ScopeName = Annotated[str, Field(pattern=r"^\w+$")]
"""Name of a layer or of a use of a block, a part of the paths of its parameters."""


class LayerSpec(Spec):
    """Base of layers: the component of kind "layer"."""

    reads_whole_numbers: ClassVar[bool] = False
    """Whether the input is whole numbers, which 16-bit activations can't hold."""
    mixes_tokens: ClassVar[bool] = False
    """Whether the result of a token depends on other tokens, also on tokens of other documents in
    its window."""
    name: str
    scope: ScopeName | None = None
    """The layer's name in parameter paths; null: its kind and a number (`conv_0`, `conv_1`,
    ...)."""

    def count_repetitions(self) -> int:
        """How often the layers inside it are applied, each time with other weights."""
        return 1

    @property
    def adds_losses(self) -> bool:
        """Whether its computation calls `add_sample_losses` in training."""
        return False

    def compute(self, x: Any, context: Any) -> Any:
        """Return the output of a custom layer for input x. It is called while the network is
        traced, inside a flax module, so it may apply a flax module with `name=context.name`.
        `context` is a `LayerContext`: path, dtype and `train`."""
        raise TypeError(
            f"{context}: layer {self.name} has no computation; its class must have a method "
            "`compute(self, x, context)`"
        )


class BlockUse(Spec):
    """Use of a block: its layers, repeated `repeat` times, in a separate scope."""

    block: str = Field(alias="use")
    """The block's name under `blocks`."""
    values: dict[str, Any] = Field({}, alias="with")
    """Values of the block's parameters."""
    repeat: Count = 1
    scope: ScopeName | None = None
    """null: the block's name and a number."""


class _AllowUse:
    """Lets the JSON schema of an item in a list of layers be a use of a block as well. Values need
    no such choice: uses are replaced before layers are validated."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [BlockUse.model_json_schema(), handler(schema)]}


Layer = Annotated[LayerSpec, ComponentOf("layer")]
Layers = Seq[Annotated[Layer, _AllowUse()]]


class InitRule(Spec):
    """Initialiser of the parameters that a pattern covers, such as `dense_2/kernel`."""

    pattern: str
    init: Initializer


class InitRules(Spec):
    """Initialisers of single parameters."""

    rules: Seq[InitRule] = ()
    """The last rule that covers a parameter applies, instead of all other settings."""


class InitSpec(InitRules):
    """Initialiser of each kind of weight, for layers without a setting of their own."""

    conv: Initializer
    dense: Initializer
    bias: Initializer


ColumnName = Annotated[str, Field(pattern=r"^\w+$")]
InputColumns = ColumnName | Seq[ColumnName] | dict[str, str] | None


class ModelSpec(Spec):
    """Base of every network: the component of kind "model" that a recipe names."""

    table_input: ClassVar[Literal["features", "fields", "rows"]] = "features"
    """Input of the network for a table. features: numbers and one-hot categories; fields: for each
    column, the index of its feature and the feature's value; rows: numbers and the numbers of
    categories."""
    reads_masks: ClassVar[bool] = False
    """Whether the network reads masks of tokens, such as `query_mask`, without naming them."""
    two_outputs_are_classes: ClassVar[bool] = False
    """Whether two outputs are always the logits of two classes, never two numbers or labels."""
    name: str
    init: InitSpec
    inputs: InputColumns = None
    """The columns that the network reads: a name, a list of names, or a column for each name of the
    network, such as {query: text_a, passage: text_b}. null: the columns that have the names of the
    network's inputs, or the dataset's samples if it reads one array."""

    def list_inputs(self) -> tuple[str, ...] | None:
        """Return the network's names for several inputs; None if it reads one array of any name."""
        return None

    def require_code(self) -> None:
        """Raise ValueError, which begins with the key, if the network is custom code that no
        plug-in has."""

    def fit(self, layout: TableLayout | None, targets: Targets) -> ModelSpec:
        """Return the model for a table with these columns, or None for other data, and for what is
        predicted. Raises ValueError as `fit_to_table`."""
        return self.fit_to_table(layout).fit_to_targets(targets)

    def fit_to_table(self, layout: TableLayout | None) -> ModelSpec:
        """Return the model for a table with these columns; None for other data. Raises ValueError
        if the model has another number of features."""
        return self

    def fit_to_targets(self, targets: Targets) -> ModelSpec:
        """Return the model for what is predicted. This base class returns it unchanged."""
        return self

    @property
    def has_members(self) -> bool:
        """Whether outputs in training are (B, members, C), of which `wrap_loss` makes one loss."""
        return False

    def wrap_loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return the loss (logits, labels) -> (B,) of the outputs in training, from the loss of
        outputs (B, ..., C). This base class returns it unchanged."""
        return loss

    @abstractmethod
    def build(self, classes: int, dtype: str) -> nn.Module:
        """Return the flax module, `module(inputs, train=bool) -> logits (batch, classes)`. Inputs
        are one array, such as images NHWC, or several by the names of `list_inputs`. `dtype` is the
        type of activations; parameters are float32."""


def walk_layers(value: Spec | tuple[object, ...]) -> Iterator[LayerSpec]:
    """Yield the layers of a layer, a model or a tuple, and their inner layers."""
    for layer in _find_layers(value if isinstance(value, tuple) else _list_fields(value)):
        yield layer
        yield from walk_layers(_list_fields(layer))


def looks_up_rows(layer: LayerSpec) -> bool:
    """Return whether a layer, or one inside it, looks up rows of a table by whole numbers."""
    return any(inner.reads_whole_numbers for inner in walk_layers((layer,)))


def _list_fields(spec: Spec) -> tuple[object, ...]:
    return tuple(value for _, value in spec)


def count_layers(layers: tuple[object, ...], counted: int = 0) -> int:
    """Return `counted` plus the number of layers, with inner layers and repetitions. Raises
    ValueError above `MAX_LAYERS`, which would take many minutes to trace."""
    for layer in _find_layers(layers):
        counted += 1
        if counted > MAX_LAYERS:
            raise ValueError(f"more than {MAX_LAYERS:,} layers, including inner layers")
        for _ in range(layer.count_repetitions()):
            counted = count_layers(_list_fields(layer), counted)
    return counted


def _find_layers(value: object) -> Iterator[LayerSpec]:
    if isinstance(value, LayerSpec):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _find_layers(item)
