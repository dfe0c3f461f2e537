"""Networks that are a list of layers."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from pipeline.models.layers.model_spec import LayerSpec, ModelSpec, count_layers

if TYPE_CHECKING:
    from flax import linen as nn


class LayeredModelSpec(ModelSpec):
    """Base of the networks that are a list of layers, which other backends can read."""

    @abstractmethod
    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        """The network as a list of layers that ends in `classes` logits."""

    def build(self, classes: int, dtype: str) -> nn.Module:
        """A `Network` of the layers. Raises ValueError where there are too many."""
        from pipeline.models.modules.standard import Network

        layers = self.layers_for(classes)
        count_layers(layers)
        return Network(layers, initializers=self.init, dtype=dtype)
