"""Networks for the rows of a table: embeddings of columns with an ensemble that shares layers, and
Wide & Deep (Cheng et al. 2016), as in MindSpore's model zoo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, PrivateAttr

from pipeline.core.registry import Seq, component
from pipeline.data.columns import Targets, Task
from pipeline.data.tables.encode_table import FIELD_COLUMNS, TableLayout
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.layers.model_spec import Initializer, LayerSpec, ModelSpec
from pipeline.models.layers.standard import Dropout
from pipeline.models.layers.tables import (
    ColumnFeatures,
    MemberActivation,
    MemberDense,
    MemberHead,
    TableColumns,
)

if TYPE_CHECKING:
    from flax import linen as nn

AVERAGES: Mapping[Task, Literal["probabilities", "labels", "numbers"]] = {
    "classification": "probabilities",
    "multi_label": "labels",
    "regression": "numbers",
}
"""Quantities as which the members' outputs are averaged, by task."""


@component("model")
class TableModel(ColumnFeatures, LayeredModelSpec):
    """Members that share the weights of dense layers, TabM (Gorishniy et al. 2024, arXiv
    2410.24210), with embeddings, activations and parametrisation of RealMLP (Holzmüller et al.
    2024, arXiv 2407.04491).

    A number becomes itself and PBLD features: a linear layer of `frequencies` cosines; with `bins`
    also its place among bins (PLE). Categories
    of at most `one_hot_up_to` values become 0 and 1, two values -1 and 1, others learnt vectors.
    Training minimises the mean of the members' losses; predictions are the mean of the members'
    probabilities or numbers.
    """

    table_input: ClassVar[Literal["features", "fields", "rows"]] = "rows"
    name: Literal["table"] = "table"
    members: PositiveInt = 16
    """Networks of the ensemble. 1: a single network."""
    hidden: Annotated[Seq[PositiveInt], Field(min_length=1)] = (128, 128)
    activation: MemberActivation = "selu"
    parametric: bool = True
    """Whether an activation is x + a (f(x) - x), with a learnt a, from 1, for each feature."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.15
    _layout: TableLayout | None = PrivateAttr(default=None)
    _targets: Targets | None = PrivateAttr(default=None)

    def fit_to_table(self, layout: TableLayout | None) -> Self:
        fitted = self.model_copy()
        fitted._layout = layout
        return fitted

    def fit_to_targets(self, targets: Targets) -> Self:
        fitted = self.model_copy()
        fitted._targets = targets
        return fitted

    @property
    def has_members(self) -> bool:
        return self.members > 1

    def wrap_loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return the mean of the members' losses, of outputs (B, members, C) and labels (B, ...).
        Outputs (B, C), of evaluations, have the loss itself."""

        def average(logits: Any, labels: Any, *where: Any) -> Any:
            if logits.ndim == 2:
                return loss(logits, labels, *where)
            batch, members, outputs = logits.shape
            rows = logits.reshape(batch * members, outputs)
            repeated = (labels, *where)
            losses = loss(rows, *(array.repeat(members, axis=0) for array in repeated))
            return losses.reshape(batch, members).mean(axis=1)

        return average

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        """Return the layers. Raises ValueError if the data aren't a table."""
        if self._layout is None:
            raise ValueError("reads the rows of a table, of dataset=csv or dataset=parquet")
        columns = TableColumns(
            numbers=self._layout.numbers,
            categories=self._layout.categories,
            **self.model_dump(include=set(ColumnFeatures.model_fields)),
        )
        layers: list[LayerSpec] = [columns]
        for number, features in enumerate(self.hidden):
            layers.append(
                MemberDense(
                    features=features,
                    members=self.members,
                    columns=columns.sizes if number == 0 else (),
                    draws_signs=not self.frequencies,
                    activation=self.activation,
                    parametric=self.parametric,
                    slow_factor=self.slow_factor,
                )
            )
            layers += [Dropout(rate=self.dropout)] if self.dropout else []
        targets = self._targets
        is_positive = targets is not None and targets.is_positive
        ratios = _divide(targets.mean, targets.std) if targets is not None and is_positive else ()
        task = "classification" if targets is None else targets.task
        head = MemberHead(
            features=classes, average=AVERAGES[task], ratios=ratios, slow_factor=self.slow_factor
        )
        return (*layers, head)

    def list_inputs(self) -> tuple[str, ...] | None:
        return None


def _divide(means: tuple[float, ...], stds: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(mean / std for mean, std in zip(means, stds, strict=True))


@component("model")
class WideDeep(ModelSpec):
    """A linear model of sparse features beside dense layers on their embeddings, for two classes.

    It reads two columns: for each field the index of its feature, `field_index` int32 (fields,),
    and the feature's value, `field_value` float32 (fields,). The embeddings of Criteo's 39 fields,
    their vocabulary and the layers are the zoo's.
    """

    table_input: ClassVar[Literal["features", "fields"]] = "fields"
    two_outputs_are_classes: ClassVar[bool] = True
    name: Literal["wide_deep"] = "wide_deep"
    vocabulary: PositiveInt | None
    """Number of different features in all fields; null: the number in the table of
    `dataset=csv`."""
    embedding: PositiveInt
    """Length of the vector of each feature."""
    hidden: Seq[PositiveInt]
    """Features of the dense layers, except the last layer, which has one feature."""
    table_init: Initializer
    """Initialiser of the weights and the vectors of the features."""

    def list_inputs(self) -> tuple[str, ...]:
        return FIELD_COLUMNS

    def fit_to_table(self, layout: TableLayout | None) -> WideDeep:
        if layout is None:
            return self
        features = layout.features
        if self.vocabulary is not None and self.vocabulary < features:
            raise ValueError(
                f"vocabulary = {self.vocabulary:,}: must be null, or at least the {features:,} "
                "features of the table"
            )
        return self.model_copy(update={"vocabulary": self.vocabulary or features})

    def build(self, classes: int, dtype: str) -> nn.Module:
        """Return the flax module. Raises ValueError without a vocabulary."""
        from pipeline.models.modules.tables import WideDeepNetwork

        if self.vocabulary is None:
            raise ValueError("vocabulary = null: must be a number, since the data are not a table")
        return WideDeepNetwork(
            classes=classes,
            vocabulary=self.vocabulary,
            embedding=self.embedding,
            hidden=self.hidden,
            table_init=self.table_init,
            initializers=self.init,
            dtype=dtype,
        )
