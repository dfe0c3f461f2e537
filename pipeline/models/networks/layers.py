"""A network whose layers are listed in the recipe."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from pipeline.core.registry import Seq, component
from pipeline.models.blocks.common_blocks import map_layers
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.blocks.recipe_blocks import expand_uses
from pipeline.models.layers.fields import CLASSES
from pipeline.models.layers.model_spec import Layers, LayerSpec
from pipeline.models.layers.standard import Branches


@component("model")
class LayerList(LayeredModelSpec):
    """Layers from the recipe's list; `$classes` stands for the dataset's number of classes.

    `{use: name, repeat: n, with: {...}}` stands for the layers of block `name` in `blocks`, in a
    separate scope.
    """

    name: Literal["layers"] = "layers"
    blocks: dict[str, Seq[Any]]
    layers: Layers

    @model_validator(mode="before")
    @classmethod
    def _expand_uses(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("blocks"), dict):
            return values
        layers = expand_uses(values.get("layers"), values["blocks"], ("layers",))
        return {**values, "layers": layers}

    @model_validator(mode="after")
    def _check_classes(self) -> Self:
        # Towers return embeddings, whatever the classes.
        last = self.layers[-1] if self.layers else None
        are_towers = isinstance(last, Branches) and bool(last.inputs)
        if not are_towers and self.layers_for(1) == self.layers:
            raise ValueError(
                f"no layer has {CLASSES}; must end in a layer such as "
                f"{{name: dense, features: {CLASSES}}}, or to match pairs in branches with inputs"
            )
        return self

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        def set_classes(layer: LayerSpec) -> LayerSpec:
            changes = {field: classes for field, value in layer if value == CLASSES}
            return layer.model_copy(update=changes)

        return map_layers(set_classes, self.layers)
