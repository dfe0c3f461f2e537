"""All tensors of a step, of each portion of the batch and of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from pipeline.data.batch import Batch
from pipeline.inspect.dumps.layer_programs import LayerPrograms, LayerTensors, NumpyArrays, Weights
from pipeline.inspect.dumps.portions import Portion, split_batch


@dataclass(frozen=True)
class StepPass:
    """One pass through the network: its inputs and its tensors."""

    weights: Weights
    portion: Portion
    tensors: LayerTensors


@dataclass(frozen=True)
class CapturedStep:
    """The passes of a step: the microbatches of each shard."""

    shards: tuple[tuple[StepPass, ...], ...]

    @property
    def passes(self) -> tuple[StepPass, ...]:
        return tuple(step_pass for microbatches in self.shards for step_pass in microbatches)

    @property
    def inputs(self) -> NumpyArrays:
        """The network's inputs after the map ops, (B, ...) by name; a single one is "0"."""
        parts: list[NumpyArrays] = [
            jax.tree.map(np.asarray, inputs if isinstance(inputs, dict) else {"0": inputs})
            for inputs in (step_pass.portion.inputs for step_pass in self.passes)
        ]
        return _merge_arrays(np.concatenate, parts)

    def merge_passes(self) -> LayerTensors:
        """Join portions, add gradients and losses, and average the shards' statistics."""
        tensors = [step_pass.tensors for step_pass in self.passes]
        statistics = [microbatches[-1].tensors.statistics for microbatches in self.shards]
        return join_passes(tensors, statistics)


def join_passes(passes: Sequence[LayerTensors], statistics: Sequence[NumpyArrays]) -> LayerTensors:
    """Join the tensors of portions; `statistics` are the batch statistics of each shard."""
    if len(passes) == 1:
        return passes[0]
    first = passes[0]
    concatenated: dict[str, Any] = {
        name: _merge_arrays(np.concatenate, [getattr(tensors, name) for tensors in passes])
        for name in ("inputs", "outputs", "input_gradients", "output_gradients")
    }
    return replace(
        first,
        **concatenated,
        parameters=_merge_arrays(
            partial(np.sum, axis=0), [tensors.parameters for tensors in passes]
        ),
        statistics=_merge_arrays(partial(np.mean, axis=0), statistics),
        logits=np.concatenate([tensors.logits for tensors in passes]),
        logits_gradient=np.concatenate([tensors.logits_gradient for tensors in passes]),
        loss=float(np.sum(np.array([tensors.loss for tensors in passes], first.logits.dtype))),
    )


def _merge_arrays(
    combine: Callable[[list[np.ndarray]], Any], parts: Sequence[NumpyArrays]
) -> NumpyArrays:
    return {path: combine([part[path] for part in parts]) for path in parts[0]}


def capture_step(
    programs: LayerPrograms, weights: Weights, batch: Batch, step: int
) -> CapturedStep:
    """Compute the step after `step` steps with the tensors of all layers."""
    shards = []
    for microbatches in split_batch(programs.config, batch, step):
        pass_weights = weights
        passes = list[StepPass]()
        for portion in microbatches:
            tensors = programs.compute_free(pass_weights, portion)
            passes.append(StepPass(pass_weights, portion, tensors))
            pass_weights = pass_weights.replace_statistics(tensors.statistics)
        shards.append(tuple(passes))
    return CapturedStep(tuple(shards))
