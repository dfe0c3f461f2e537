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

    `columns` hold arrays (batch, ...). `seed` is uint32 (2,), `epoch` an int32 scalar and `sample`
    int32 (batch,): the key of augmentation. The first `count` samples are valid, the
    others pad a short last batch.
    """

    columns: Mapping[str, Array]
    seed: Array
    epoch: Array
    sample: Array
    count: Array
    samples: int | None = field(default=None, metadata={"static": True})
    """The number of samples, if one may come several times in an epoch: `sample` is another key
    each time, whose remainder is the sample."""
