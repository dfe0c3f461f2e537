"""A network that a recipe writes itself, layer by layer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from pipeline.models.blocks import BlockUse, expand_uses
from pipeline.models.layers import CLASSES
from pipeline.models.spec import Layers, LayerSpec, ModelSpec
from pipeline.registry import Seq, part


def _with_uses(schema: dict[str, Any]) -> None:
    schema["items"] = {"anyOf": [BlockUse.model_json_schema(), schema["items"]]}


@part("model")
class LayerList(ModelSpec):
    """Layers as the recipe lists them; `$classes` stands for the dataset's number of classes.

    `{use: name, repeat: n, with: {...}}` stands for the layers that `blocks` has under that name,
    in a scope of their own.
    """

    name: Literal["layers"] = "layers"
    blocks: dict[str, Seq[Any]]
    layers: Annotated[Layers, Field(json_schema_extra=_with_uses)]

    @model_validator(mode="before")
    @classmethod
    def _expand_uses(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("blocks"), dict):
            return values
        layers = expand_uses(values.get("layers"), values["blocks"], ("layers",))
        return {**values, "layers": layers}

    @model_validator(mode="after")
    def _ends_in_classes(self) -> Self:
        if self.layers_for(1) == self.layers:
            raise ValueError(
                f"no layer gives {CLASSES}; the last one must, as in "
                f"{{name: dense, features: {CLASSES}}}"
            )
        return self

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        return tuple(_for_classes(layer, classes) for layer in self.layers)


def _for_classes(layer: LayerSpec, classes: int) -> LayerSpec:
    changes: dict[str, Any] = {}
    for field, value in layer:
        if value == CLASSES:
            changes[field] = classes
        elif isinstance(value, tuple):
            changes[field] = tuple(
                _for_classes(item, classes) if isinstance(item, LayerSpec) else item
                for item in value
            )
    return layer.model_copy(update=changes)
