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
    """A window on the device.

    `columns` are (samples, ...) when resident, else (window, batch, ...). `indices` are int32
    (window, batch), `passes` and `counts` int32 (window,), `seed` uint32 (2,).
    """

    columns: Mapping[str, Array]
    indices: Array
    passes: Array
    counts: Array
    seed: Array
    resident: bool = field(metadata={"static": True})
    samples: int | None = field(default=None, metadata={"static": True})
    """As in `Batches`."""


def batch_at(inputs: Inputs, position: Array) -> Batch:
    """The batch at a position of a window; runs inside the compiled loop."""
    sample = inputs.indices[position]
    rows = sample if inputs.samples is None else sample % inputs.samples
    rows = rows if inputs.resident else position
    columns = {name: column[rows] for name, column in inputs.columns.items()}
    passes, counts = inputs.passes[position], inputs.counts[position]
    return Batch(columns, inputs.seed, passes, sample, counts, inputs.samples)


@dataclass(frozen=True)
class Window:
    """Steps `start + 1 .. stop`, at positions 0 .. of `inputs`, which may have room for more."""

    start: int
    stop: int
    inputs: Inputs
    early: bool = False
    """Whether it is one of the short windows after a jump, or follows the last of them: to wait for
    it is no starvation."""

    @property
    def most_steps(self) -> int:
        """Steps that a window of this feed can have."""
        return int(self.inputs.counts.shape[0])


def put_inputs(
    columns: Mapping[str, Array],
    batches: Batches,
    seed: int,
    placement: DevicePlacement,
    *,
    resident: bool,
) -> Inputs:
    """Make a window of columns that are on the devices already, and of the order of its samples."""
    own = placement.rows(batches.indices.shape[1])
    indices = placement.put_batches(batches.indices[:, own])
    plan = (batches.passes, batches.counts, seed_words(seed))
    passes, counts, seed_on_device = placement.put(plan)
    return Inputs(columns, indices, passes, counts, seed_on_device, resident, batches.samples)
