"""A batch, the input of a training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from pipeline.data.columns import Split
from pipeline.data.random import seed_words


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
    num_samples: int | None = field(default=None, metadata={"static": True})
    """The number of samples in the split, if an epoch may repeat samples: `sample` is then the
    sample's index plus a different multiple of this number for each repetition. None: the index."""


def read_chunks(
    split: Split, rows: np.ndarray, seed: int, size: int
) -> Iterator[tuple[Batch, int]]:
    """Yield the samples at `rows`, (n,), in batches of `size`, each with its number of new samples.
    The last batch repeats its samples, and all of them are valid, so that one compiled program
    computes all batches."""
    words = jnp.asarray(seed_words(seed))
    for first in range(0, len(rows), size):
        chunk = np.resize(rows[first : first + size], size).astype(np.int32)
        columns = {name: jnp.asarray(column[chunk]) for name, column in split.columns.items()}
        batch = Batch(columns, words, jnp.int32(0), jnp.asarray(chunk), jnp.int32(size))
        yield batch, min(size, len(rows) - first)
