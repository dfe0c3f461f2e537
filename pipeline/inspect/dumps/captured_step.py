"""All tensors of a step: those of its portions, and joined to those of the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from flax.traverse_util import unflatten_dict

from pipeline.inspect.dumps.layer_programs import LayerPrograms, LayerTensors, NumpyArrays, Weights
from pipeline.inspect.dumps.portions import BatchPortions, Portion


@dataclass(frozen=True)
class StepPass:
    """One pass through the network: what it was computed from, and its tensors."""

    weights: Weights
    portion: Portion
    tensors: LayerTensors


@dataclass(frozen=True)
class CapturedStep:
    """The passes of a step, microbatches by shard."""

    shards: tuple[tuple[StepPass, ...], ...]

    @property
    def passes(self) -> tuple[StepPass, ...]:
        """All passes in their order."""
        return tuple(one for microbatches in self.shards for one in microbatches)

    @property
    def images(self) -> np.ndarray:
        """The images of the batch after the map ops, (B, H, W, C) float32."""
        return np.concatenate([np.asarray(one.portion.images) for one in self.passes])

    def joined(self) -> LayerTensors:
        """Return the tensors of the whole batch: portions one after the other, gradients of
        parameters and losses added, batch statistics averaged over shards."""
        every = [one.tensors for one in self.passes]
        last = [microbatches[-1].tensors.statistics for microbatches in self.shards]
        return join(every, last)


def join(every: Sequence[LayerTensors], statistics: Sequence[NumpyArrays]) -> LayerTensors:
    """Join the tensors of portions; `statistics` are those that each shard leaves."""
    if len(every) == 1:
        return every[0]
    first = every[0]
    return replace(
        first,
        inputs=_concatenated([one.inputs for one in every]),
        outputs=_concatenated([one.outputs for one in every]),
        input_gradients=_concatenated([one.input_gradients for one in every]),
        output_gradients=_concatenated([one.output_gradients for one in every]),
        parameters=_summed([one.parameters for one in every]),
        statistics=_averaged(statistics),
        logits=np.concatenate([one.logits for one in every]),
        logits_gradient=np.concatenate([one.logits_gradient for one in every]),
        loss=float(np.sum(np.array([one.loss for one in every], first.logits.dtype))),
    )


def _concatenated(parts: Sequence[NumpyArrays]) -> NumpyArrays:
    return {path: np.concatenate([part[path] for part in parts]) for path in parts[0]}


def _summed(parts: Sequence[NumpyArrays]) -> NumpyArrays:
    return {path: np.sum([part[path] for part in parts], axis=0) for path in parts[0]}


def _averaged(parts: Sequence[NumpyArrays]) -> NumpyArrays:
    return {path: np.mean([part[path] for part in parts], axis=0) for path in parts[0]}


def capture(programs: LayerPrograms, weights: Weights, portions: BatchPortions) -> CapturedStep:
    """Compute a step, and keep the tensors of all layers."""
    return CapturedStep(
        tuple(tuple(_captured(programs, weights, shard)) for shard in portions.shards)
    )


def _captured(
    programs: LayerPrograms, weights: Weights, microbatches: Iterable[Portion]
) -> Iterable[StepPass]:
    for portion in microbatches:
        tensors = programs.free(weights, portion)
        yield StepPass(weights, portion, tensors)
        weights = replace(weights, batch_stats=unflatten_dict(tensors.statistics, sep="/"))
