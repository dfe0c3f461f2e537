"""A batch, the input of a training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from pipeline.data.columns import Split
from pipeline.data.random import seed_words


@register_dataclass
@dataclass(frozen=True)
class Batch:
    """One batch before map ops. Seed, epoch and sample are the key of their random numbers."""

    columns: Mapping[str, Array]
    """Arrays (batch, ...)."""
    seed: Array
    """uint32 (2,), from `seed_words`."""
    epoch: Array
    """int32 scalar."""
    sample: Array
    """int32 (batch,): the index of each sample in the split."""
    count: Array
    """int32 scalar: the first `count` samples are valid, the others pad a short last batch."""
    num_samples: int | None = field(default=None, metadata={"static": True})
    """The number of samples in the split if an epoch may repeat samples, else None. `sample` then
    has multiples of this number added to the indices, a different one for each repetition."""


def read_chunks(
    split: Split, rows: np.ndarray, seed: int, size: int
) -> Iterator[tuple[Batch, int]]:
    """Yield the samples at `rows`, int (n,), in batches of `size` with their number of different
    samples. All batches are full, so that one compiled program computes them: the last one repeats
    its samples. They have the random draws of epoch 0."""
    words = jnp.asarray(seed_words(seed))
    for first in range(0, len(rows), size):
        chunk = rows[first : first + size]
        full_chunk = np.resize(chunk, size).astype(np.int32)  # repeats the chunk up to `size`
        batch = Batch(
            columns={
                name: jnp.asarray(column[full_chunk]) for name, column in split.columns.items()
            },
            seed=words,
            epoch=jnp.int32(0),
            sample=jnp.asarray(full_chunk),
            count=jnp.int32(size),
        )
        yield batch, len(chunk)


def shape_batch(split: Split, count: int) -> Any:
    """Return the shapes and dtypes of a batch of `count` samples."""

    def make_shape(*shape: int, dtype: object = np.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    columns = {
        name: make_shape(count, *column.shape[1:], dtype=column.dtype)
        for name, column in split.columns.items()
    }
    return Batch(
        columns=columns,
        seed=make_shape(2, dtype=np.uint32),
        epoch=make_shape(),
        sample=make_shape(count),
        count=make_shape(),
    )
