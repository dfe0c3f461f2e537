"""Gradients of a batch, computed microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.training.parallel.microbatches import stack_microbatches
from pipeline.training.state import Gradients, MappedBatch
from pipeline.training.step_feature import ComputeGradients, StepFeature


@dataclass(frozen=True)
class Accumulation(StepFeature):
    """The split of a batch into `count` microbatches, whose gradients are added one after the
    other.

    Except for rounding, the sum differs from the gradients of the whole batch only by batch norm,
    which normalizes each microbatch by itself, and by dropout.
    """

    name: ClassVar[str] = "accumulation"
    count: int

    def split_batch(self, compute: ComputeGradients) -> ComputeGradients:
        def compute_batch(collections: Mapping[str, Any], batch: MappedBatch) -> Gradients:
            no_key: Any = None
            samples = batch._replace(dropout_key=no_key)
            stacked = stack_microbatches(samples, batch.dropout_key, self.count)
            if not isinstance(batch.labels, jax.core.Tracer):
                return _add_in_python(compute, collections, stacked)
            return _add_in_loop(compute, collections, stacked)

        return compute_batch


def count_microbatches(features: tuple[StepFeature, ...]) -> int:
    """Return the number of microbatches that a step with these features splits a batch into."""
    counts = [feature.count for feature in features if isinstance(feature, Accumulation)]
    return counts[0] if counts else 1


def _compute_microbatch(
    compute: ComputeGradients, collections: Mapping[str, Any], microbatch: tuple[MappedBatch, Array]
) -> Gradients:
    samples, key = microbatch
    return compute(collections, samples._replace(dropout_key=key))


def _add(total: Gradients, added: Gradients) -> Gradients:
    """Return the sum of two parts' gradients, with the collections after the second part, and
    without readings."""
    sums: Gradients = jax.tree.map(
        jnp.add,
        total._replace(collections={}, readings={}),
        added._replace(collections={}, readings={}),
    )
    return sums._replace(collections=added.collections)


def _add_in_loop(
    compute: ComputeGradients, collections: Mapping[str, Any], stacked: tuple[MappedBatch, Array]
) -> Gradients:
    def add(total: Gradients, microbatch: Any) -> tuple[Gradients, Mapping[str, Any]]:
        added = _compute_microbatch(compute, total.collections, microbatch)
        return _add(total, added), added.readings

    def compute_first() -> Gradients:
        first = jax.tree.map(lambda x: x[0], stacked)
        return _compute_microbatch(compute, collections, first)

    shapes = jax.eval_shape(compute_first)
    zero: Gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    zero = zero._replace(collections=collections, readings={})
    total, readings = jax.lax.scan(add, zero, stacked)
    joined = jax.tree.map(lambda rows: rows.reshape(-1, *rows.shape[2:]), readings)
    return total._replace(readings=joined)


def _add_in_python(
    compute: ComputeGradients, collections: Mapping[str, Any], stacked: tuple[MappedBatch, Array]
) -> Gradients:
    """Return the sum over stacked microbatches outside of jit, where a scan would be compiled, and
    custom code couldn't read values."""
    total: Gradients | None = None
    readings = []
    for number in range(len(jax.tree.leaves(stacked)[0])):
        microbatch = jax.tree.map(lambda x, number=number: x[number], stacked)
        before = collections if total is None else total.collections
        added = _compute_microbatch(compute, before, microbatch)
        readings.append(added.readings)
        total = added if total is None else _add(total, added)
    assert total is not None, "a batch has at least one microbatch"
    joined = jax.tree.map(lambda *rows: jnp.concatenate(rows), *readings)
    return total._replace(readings=joined)
