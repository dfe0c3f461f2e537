"""A plug-in whose networks are flax modules, which their `build` returns."""

from __future__ import annotations

from typing import Any, Literal

from flax import linen as nn

from pipeline.api import ModelSpec, component
from tests.models.imported.imported_networks import TwoConvs, Volume


class TwoDense(nn.Module):
    """Two dense layers, which THOR observes."""

    classes: int

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        return nn.Dense(self.classes)(nn.relu(nn.Dense(8)(x.reshape(x.shape[0], -1))))


@component("model")
class CustomTwoConvs(ModelSpec):
    """The network that `model=flax` imports, as a component."""

    name: Literal["two_convs"] = "two_convs"

    def build(self, classes: int, dtype: str) -> nn.Module:
        return TwoConvs(classes)


@component("model")
class CustomVolume(ModelSpec):
    """A network with a convolution that nothing replaces."""

    name: Literal["volume"] = "volume"

    def build(self, classes: int, dtype: str) -> nn.Module:
        return Volume(classes)


@component("model")
class CustomDense(ModelSpec):
    """Dense layers alone."""

    name: Literal["two_dense"] = "two_dense"

    def build(self, classes: int, dtype: str) -> nn.Module:
        return TwoDense(classes)
