"""A batch, the input of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jax import Array
from jax.tree_util import register_dataclass


@register_dataclass
@dataclass(frozen=True)
class Batch:
    """One batch as it was read, before map ops.

    `columns` are arrays (batch, ...). `seed`, uint32 (2,), `epoch`, an int32 scalar, and `sample`,
    int32 (batch,), are the key of augmentation. The first `count` samples are valid; the others pad
    a short last batch.
    """

    columns: Mapping[str, Array]
    seed: Array
    epoch: Array
    sample: Array
    count: Array
    samples: int | None = field(default=None, metadata={"static": True})
    """The number of samples, if an epoch may repeat samples. Then `sample` differs for each
    repetition, and modulo this number it is the sample's index."""
