"""Wide & Deep (Cheng et al. 2016), as in MindSpore's model zoo."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveInt

from pipeline.core.registry import Seq, component
from pipeline.data.tables.encode_table import FIELD_COLUMNS, TableLayout
from pipeline.models.layers.model_spec import Initializer, ModelSpec

if TYPE_CHECKING:
    from flax import linen as nn


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
        from pipeline.models.modules.wide_deep import WideDeepNetwork

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
