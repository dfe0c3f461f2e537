"""A network for the rows of a table: embeddings of columns, and an ensemble that shares layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, PrivateAttr

from pipeline.core.registry import Seq, component
from pipeline.data.tables.encode_table import TableLayout
from pipeline.data.targets import Targets
from pipeline.models.layers.model_spec import ModelSpec

if TYPE_CHECKING:
    from flax import linen as nn


@component("model")
class TableModel(ModelSpec):
    """Members that share the weights of dense layers, TabM (Gorishniy et al. 2024, arXiv
    2410.24210), with embeddings, activations and parametrisation of RealMLP (Holzmüller et al.
    2024, arXiv 2407.04491).

    A number becomes itself and PBLD features: a linear layer of `frequencies` cosines. Categories
    of at most `one_hot_up_to` values become 0 and 1, two values -1 and 1, others learnt vectors.
    Training minimises the mean of the members' losses; predictions are the mean of the members'
    probabilities or numbers.
    """

    table_input: ClassVar[Literal["features", "fields", "rows"]] = "rows"
    name: Literal["table"] = "table"
    members: PositiveInt = 16
    """Networks of the ensemble. 1: a single network."""
    hidden: Seq[PositiveInt] = (128, 128)
    activation: Literal["relu", "selu", "mish"] = "selu"
    parametric: bool = True
    """Whether an activation is x + a (f(x) - x), with a learnt a, from 1, for each feature."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.15
    frequencies: NonNegativeInt = 16
    """Cosines of the embedding of each number; 0: numbers aren't embedded."""
    frequency_scale: PositiveFloat = 0.1
    """Standard deviation of the initial frequencies."""
    number_size: PositiveInt = 3
    """Features of a number, besides itself."""
    category_size: PositiveInt = 8
    """Length of the vectors of categories."""
    one_hot_up_to: NonNegativeInt = 9
    scale_factor: NonNegativeFloat = 6.0
    """Factor of the learning rate of the scales of all features, which are 1 at first; 0: features
    aren't scaled."""
    slow_factor: PositiveFloat = 0.1
    """Factor of the learning rate of biases, embeddings of numbers and parametric activations."""
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

    def build(self, classes: int, dtype: str) -> nn.Module:
        """Return the flax module. Raises ValueError if the data aren't a table."""
        from pipeline.models.modules.table import TableModule

        if self._layout is None:
            raise ValueError("reads the rows of a table, of dataset=csv or dataset=parquet")
        return TableModule(
            spec=self,
            layout=self._layout,
            targets=self._targets or Targets(tuple(map(str, range(classes)))),
            dtype=dtype,
        )
