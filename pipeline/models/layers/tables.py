"""Specs of the layers that read rows of a table, and of ensembles that share weights.

TabM is Gorishniy et al. 2024, arXiv 2410.24210; RealMLP is Holzmüller et al. 2024, arXiv
2407.04491. A parameter that learns slower or faster by a factor f is stored divided by f, since
Adam moves every stored parameter alike. Weights are stored times the square root of the number of
inputs, so that initial ones are N(0, 1) (NTK parametrisation, as in RealMLP).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pipeline.core.registry import Seq, Spec, component
from pipeline.models.layers.model_spec import Features, LayerSpec

MemberActivation = Literal["relu", "selu", "mish"]


class ColumnFeatures(Spec):
    """Settings of the features of columns, which a layer and a network have."""

    frequencies: NonNegativeInt = 16
    """Cosines of each number; 0: numbers aren't embedded."""
    frequency_scale: PositiveFloat = 0.1
    """Standard deviation of the initial frequencies w."""
    number_size: PositiveInt = 3
    """Features of a number's cosines."""
    bins: NonNegativeInt = 0
    """Bins of each number, equally likely if scaled numbers are normal; 0: none."""
    category_size: PositiveInt = 8
    """Length of a learned vector."""
    one_hot_up_to: NonNegativeInt = 9
    scale_factor: NonNegativeFloat = 6.0
    """Factor of the learning rate of the scale of each feature, 1 at first; 0: no scales."""
    slow_factor: PositiveFloat = 0.1
    """Factor of the learning rate of w, b, V and c, and of a network's biases and parametric
    activations."""

    def is_one_hot(self, values: int) -> bool:
        """Return whether a column of `values` categories has fixed features, not learned vectors.
        With at most two it has, whatever `one_hot_up_to` is."""
        return values <= max(2, self.one_hot_up_to)


@component("layer")
class TableColumns(ColumnFeatures, LayerSpec):
    """Features of encoded rows of a table: (batch, columns) -> (batch, features).

    A number becomes PBLD features and itself, [V cos(2 pi w x + b) + c, x] (RealMLP), and the
    shares of bins that lie below it, 1 below its bin and 0 above (TabM's PLE). A column of
    at most two categories becomes -1 or 1, of at most `one_hot_up_to` a 0 or 1 for each, of more a
    learned vector. A category that the training split lacks is zeros, or a learned vector too.
    """

    reads_whole_numbers: ClassVar[bool] = True
    name: Literal["table_columns"] = "table_columns"
    numbers: NonNegativeInt
    """Columns of numbers, which precede columns of categories."""
    categories: Seq[NonNegativeInt] = ()
    """Number of values of each column of categories."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of features of each column."""
        number_size = (self.number_size if self.frequencies else 0) + 1 + self.bins
        return (
            *(number_size for _ in range(self.numbers)),
            *map(self.count_features, self.categories),
        )

    def count_features(self, values: int) -> int:
        """Return the number of features of a column of categories."""
        if not self.is_one_hot(values):
            return self.category_size
        return 1 if values <= 2 else values


@component("layer")
class MemberDense(LayerSpec):
    """A dense layer and an activation of each member of an ensemble, ((x r) W) s + b (TabM).

    (batch, inputs) or (batch, members, inputs) -> (batch, members, features). Members share W, and
    have separate r, s and b, which are equal at first. With `columns`, of a first layer, r is drawn
    for each member and column.
    """

    name: Literal["member_dense"] = "member_dense"
    features: PositiveInt
    members: PositiveInt
    """1: a dense layer without r and s."""
    columns: Seq[PositiveInt] = ()
    """Number of features of each column that the layer reads; (): r is 1 at first."""
    draws_signs: bool = False
    """Whether r is -1 or 1 at first, as in TabM without embeddings, in place of N(0, 1)."""
    activation: MemberActivation = "relu"
    parametric: bool = False
    """Whether the activation is x + a (f(x) - x), with a learned a of each feature, 1 at first."""
    slow_factor: PositiveFloat = 1.0
    """Factor of the learning rate of b and a."""


@component("layer")
class MemberHead(LayerSpec):
    """The outputs of each member, by separate dense layers: (batch, members, inputs) -> (batch,
    members, features) in training. Otherwise their average, (batch, features). Weights are 0 at
    first, as in RealMLP-TD-S."""

    name: Literal["member_head"] = "member_head"
    features: Features
    average: Literal["probabilities", "labels", "numbers"] = "probabilities"
    """The mean of softmax or sigmoid, as logits, or of the outputs."""
    ratios: Seq[float] = ()
    """Mean over deviation of each number that must be positive: it becomes ratio * (exp(output) -
    1), which is mean * exp(output), standardised. (): outputs are unchanged."""
    slow_factor: PositiveFloat = 1.0
    """Factor of the learning rate of biases."""
