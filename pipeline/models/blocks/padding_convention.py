"""Base of networks whose strided windows are padded by one of several conventions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from pipeline.models.blocks.common_blocks import Stack, map_layers
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import Conv, Pool


class StridedModelSpec(LayeredModelSpec):
    """Base of the networks in which convolutions or pools with a stride are padded.

    At odd sizes all conventions are the same. At even sizes a window of 3 with a stride of 2 needs
    one row of zeros, either after the image or before it.
    """

    padding: Literal["same", "symmetric", "symmetric_convs"] = "same"
    """same: as in MindSpore's pad_mode="same" and TensorFlow; symmetric: as many zeros before as
    after, as in torchvision; symmetric_convs: symmetric for convolutions only, as in mindcv."""

    @abstractmethod
    def same_layers_for(self, classes: int) -> Stack:
        """The network with `same` padding, as a list of layers that ends in `classes` logits."""

    def layers_for(self, classes: int) -> Stack:
        layers = self.same_layers_for(classes)
        if self.padding == "same":
            return layers
        kinds = (Conv,) if self.padding == "symmetric_convs" else (Conv, Pool)

        def padded(layer: LayerSpec) -> LayerSpec:
            if isinstance(layer, kinds) and layer.padding == "same":
                return layer.model_copy(update={"padding": "symmetric"})
            return layer

        return map_layers(padded, layers)
