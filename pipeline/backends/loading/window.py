"""A window, the input of a compiled loop: consecutive steps whose batches are on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jax import Array
from jax.tree_util import register_dataclass

from pipeline.data.batch import Batch
from pipeline.data.order import Batches
from pipeline.data.random import seed_words
from pipeline.training.parallel.placement import DevicePlacement


@register_dataclass
@dataclass(frozen=True)
class Inputs:
    """The arrays of a window, on the device."""

    columns: Mapping[str, Array]
    """The whole split, (samples, ...), if `resident`, else (window, batch, ...)."""
    indices: Array
    """Indices of samples, int32 (window, batch)."""
    epochs: Array
    """Epoch of each batch, int32 (window,)."""
    counts: Array
    """Number of valid samples of each batch, int32 (window,)."""
    seed: Array
    """Words of the seed, uint32 (2,)."""
    resident: bool = field(metadata={"static": True})
    samples: int | None = field(default=None, metadata={"static": True})
    """Number of samples if an epoch may repeat them, as in `Batches`. An index is then the sample
    plus a multiple of this number, so that repetitions of a sample draw other random numbers."""


def read_batch(inputs: Inputs, position: Array) -> Batch:
    """Return the batch at a position of a window, inside the compiled loop."""
    indices = inputs.indices[position]
    samples = indices if inputs.samples is None else indices % inputs.samples
    rows = samples if inputs.resident else position
    columns = {name: column[rows] for name, column in inputs.columns.items()}
    epochs = inputs.epochs[position]
    counts = inputs.counts[position]
    return Batch(columns, inputs.seed, epochs, indices, counts, inputs.samples)


@dataclass(frozen=True)
class Window:
    """Steps `start + 1 .. stop`, at positions 0, 1, ... of `inputs`, which can have more."""

    start: int
    stop: int
    inputs: Inputs
    is_early: bool = False
    """Whether this window or the one before is a short first window of a reader, so that training
    begins early. Waiting for it isn't starvation."""

    @property
    def max_steps(self) -> int:
        """Largest number of steps of the loader's windows."""
        return int(self.inputs.counts.shape[0])


def put_inputs(
    columns: Mapping[str, Array],
    batches: Batches,
    seed: int,
    placement: DevicePlacement,
    *,
    resident: bool,
) -> Inputs:
    """Return the inputs of a window from columns on the devices and the order of its samples."""
    batch_size = batches.indices.shape[1]
    rows = placement.list_rows(batch_size)
    indices = placement.put_batches(batches.indices[:, rows], batch_size)
    epochs, counts, words = placement.put((batches.epochs, batches.counts, seed_words(seed)))
    return Inputs(columns, indices, epochs, counts, words, resident, batches.samples)
