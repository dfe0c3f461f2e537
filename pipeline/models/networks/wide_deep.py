"""Wide & Deep as MindSpore's model zoo has it (Cheng et al. 2016)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from pipeline.models.layers.model_spec import Initializer, ModelSpec
from pipeline.registry import Seq, part

if TYPE_CHECKING:
    from flax import linen as nn


@part("model")
class WideDeep(ModelSpec):
    """A linear model of sparse features beside dense layers on their embeddings, for two classes.

    A sample is an image of shape (fields, 1, 2): of each field the number of its feature and its
    value. The embeddings of Criteo's 39 fields, their vocabulary and the layers are the zoo's.
    """

    name: Literal["wide_deep"] = "wide_deep"
    vocabulary: PositiveInt
    """Number of different features, over all fields."""
    embedding: PositiveInt
    """Numbers that the vector of each feature has."""
    hidden: Seq[PositiveInt]
    """Features of the dense layers but for the last, which gives one."""
    table_init: Initializer
    """Initialiser of the weights and the vectors of the features."""

    def build(self, classes: int, dtype: str) -> nn.Module:
        """The flax module; calling it raises ValueError unless there are two classes."""
        from pipeline.models.modules.wide_deep import WideDeepNetwork

        return WideDeepNetwork(
            classes=classes,
            vocabulary=self.vocabulary,
            embedding=self.embedding,
            hidden=self.hidden,
            table_init=self.table_init,
            initializers=self.init,
            dtype=dtype,
        )
