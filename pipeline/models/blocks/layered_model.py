"""Base classes of networks that are a list of layers, with stages of blocks and padding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import model_validator

from pipeline.models.blocks.common_blocks import Stack, map_layers
from pipeline.models.layers.model_spec import LayerSpec, ModelSpec, count_layers
from pipeline.models.layers.standard import Branches, Conv, Pool

if TYPE_CHECKING:
    from flax import linen as nn


class LayeredModelSpec(ModelSpec):
    """Base of the networks that are a list of layers, which backends other than XLA read."""

    reads_masks: ClassVar[bool] = True
    stage_fields: ClassVar[tuple[str, ...]] = ()
    """Names of fields that are lists with one entry per stage."""

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        lists = {name: list(getattr(self, name)) for name in self.stage_fields}
        lengths = {len(entries) for entries in lists.values()}
        if len(lengths) > 1 or 0 in lengths:
            text = " and ".join(f"{name} {entries}" for name, entries in lists.items())
            raise ValueError(f"{text} must have one entry per stage each")
        return self

    @abstractmethod
    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        """Return the network's layers, which end in `classes` logits."""

    def list_inputs(self) -> tuple[str, ...] | None:
        """Return the inputs of the first layer if it is `branches` with inputs."""
        # The layers of other numbers of classes have the same first layer.
        first = next(iter(self.layers_for(2)), None)
        return first.inputs or None if isinstance(first, Branches) else None

    def build(self, classes: int, dtype: str) -> nn.Module:
        """Return a `Network` of the layers. Raises ValueError for too many layers."""
        from pipeline.models.modules.network import Network

        layers = self.layers_for(classes)
        count_layers(layers)
        return Network(layers, initializers=self.init, dtype=dtype)


class StridedModelSpec(LayeredModelSpec):
    """Base of the networks in which convolutions or pools with a stride are padded.

    At odd sizes all values of `padding` are equal. At even sizes a window of 3 with a stride of 2
    needs one row of zeros, which is either after the image or before it.
    """

    padding: Literal["same", "symmetric", "symmetric_convs"] = "same"
    """same: as in MindSpore's pad_mode="same" and TensorFlow; symmetric: as many zeros before the
    image as after it, as in torchvision; symmetric_convs: symmetric only for convolutions, as in
    mindcv."""

    @abstractmethod
    def same_layers_for(self, classes: int) -> Stack:
        """Return the network's layers with `same` padding, which end in `classes` logits."""

    def layers_for(self, classes: int) -> Stack:
        layers = self.same_layers_for(classes)
        if self.padding == "same":
            return layers
        kinds = (Conv,) if self.padding == "symmetric_convs" else (Conv, Pool)

        def pad_symmetrically(layer: LayerSpec) -> LayerSpec:
            is_padded = isinstance(layer, kinds) and layer.padding == "same"
            return layer.model_copy(update={"padding": "symmetric"}) if is_padded else layer

        return map_layers(pad_symmetrically, layers)


@dataclass(frozen=True)
class StageBlock:
    """A block: the number of its stage, from 1, and its index in the stage, from 0."""

    stage: int
    index: int
    channels: int
    """Channels of the block's input."""
    width: int
    """Features of the stage, before `expansion`."""
    stride: int

    @property
    def scope(self) -> str:
        """Scope of the block's layers in parameter paths."""
        return f"stage{self.stage}_block{self.index}"


def plan_blocks(
    counts: Sequence[int],
    widths: Sequence[int],
    channels: int,
    *,
    expansion: int = 1,
    halve_first: bool = True,
) -> Iterator[StageBlock]:
    """Yield the blocks of all stages; the first block reads `channels`. The output of a block has
    `expansion` times the width of its stage as features. The first block of a stage halves the
    image; in the first stage only if `halve_first` is set."""
    for stage, (count, width) in enumerate(zip(counts, widths, strict=True), start=1):
        for index in range(count):
            halves = index == 0 and (halve_first or stage > 1)
            yield StageBlock(stage, index, channels, width, 2 if halves else 1)
            channels = width * expansion
