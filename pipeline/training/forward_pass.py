"""The forward pass of a training step with its loss, of which all gradients are taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax import Array

from pipeline.models.layers.path_patterns import SAMPLE_LOSSES
from pipeline.training.losses import (
    BatchLoss,
    compute_losses,
    make_label_mask,
    reduce_losses,
)
from pipeline.training.state import Inputs, MappedBatch, TrainState, merge_params, split_params

if TYPE_CHECKING:
    from pipeline.training.step_config import StepConfig


class Outputs(NamedTuple):
    """Results of a forward pass over a batch."""

    logits: Array
    """(B, ..., C)."""
    losses: Array
    """Loss of each sample, float32 (B,); of padding it may have any value."""
    collections: Mapping[str, Any]
    """The network's collections after the pass."""
    sums: Mapping[str, Any]
    """Sums over the samples, by the name of the feature that reads them."""


class PassResults(NamedTuple):
    """Results of a forward pass beside the loss that is differentiated."""

    loss: Array
    """The reported loss, or a microbatch's share of it: a float32 scalar without the loss scale."""
    collections: Mapping[str, Any]
    sums: Mapping[str, Any]
    """As in `Outputs`."""
    readings: Mapping[str, Any]
    """Arrays (B, ...) of the samples, by the name of the feature that reads them."""


def apply_network(
    config: StepConfig, variables: Mapping[str, Any], inputs: Inputs, dropout_key: Array
) -> tuple[Array, Mapping[str, Any]]:
    """Return the logits of a batch in training mode, and the network's collections after it.
    `variables` are its parameters and its collections."""
    logits, after = config.network.apply(
        variables,
        inputs,
        train=True,
        mutable=[name for name in variables if name != "params"],
        rngs={"dropout": dropout_key},
    )
    return logits, after


def compute_loss(
    config: StepConfig, logits: Array, labels: Array, mask: Array, divisor: Array | int
) -> BatchLoss:
    """Return the loss of a batch from its logits, without what features add to it."""
    losses = compute_losses(config, logits, labels)
    return reduce_losses(config, losses, labels, mask, divisor)


@dataclass(frozen=True)
class ForwardPass:
    """The forward pass over a microbatch, with its share of the loss of the whole batch.

    Calling it with the trained parameters returns that share times `scale`, and `PassResults`. A
    mean divides by `divisor`, the number of samples or labels of the whole batch.
    """

    config: StepConfig
    state: TrainState
    collections: Mapping[str, Any]
    """The network's collections before the pass."""
    batch: MappedBatch
    divisor: Array | int
    scale: Array | float

    @cached_property
    def _parts(self) -> tuple[Any, Any]:
        return split_params(self.state.params, self.config.frozen)

    @property
    def trained(self) -> Any:
        """The parameters that the step trains."""
        return self._parts[0]

    def apply(
        self, trained: Any, collections: Mapping[str, Any], inputs: Inputs
    ) -> tuple[Array, Mapping[str, Any]]:
        """Return the logits of inputs in training mode, and the network's collections after it."""
        params = merge_params(trained, self._parts[1])
        variables = {"params": params, **collections}
        return apply_network(self.config, variables, inputs, self.batch.dropout_key)

    def predict(self, inputs: Inputs) -> Array:
        """Return the logits of inputs as an evaluation computes them: without dropout, and with the
        running statistics of batch norm. So the logits of a sample don't depend on others."""
        variables = {"params": self.state.params, **self.collections}

        def apply(inputs: Inputs) -> Array:
            logits: Any = self.config.network.apply(variables, inputs, train=False)
            return logits

        return self.config.apply_lowerings(apply)(inputs)

    def compute_outputs(self, trained: Any) -> Outputs:
        """Return the outputs of the batch, with the losses as the features change them."""
        before = {**self.collections, SAMPLE_LOSSES: {}}
        logits, after = self.apply(trained, before, self.batch.inputs)
        collections = {name: tree for name, tree in after.items() if name != SAMPLE_LOSSES}
        losses = compute_losses(self.config, logits, self.batch.labels)
        for added in jax.tree.leaves(after.get(SAMPLE_LOSSES, {})):
            losses = losses + added
        outputs = Outputs(logits, losses, collections, {})
        for feature in self.config.features:
            outputs = feature.change_outputs(self, trained, outputs)
        return outputs

    def __call__(self, trained: Any) -> tuple[Array, PassResults]:
        config, batch = self.config, self.batch
        outputs = self.compute_outputs(trained)
        loss = reduce_losses(config, outputs.losses, batch.labels, batch.mask, self.divisor)
        readings = {}
        for feature in config.list_acting("read_samples"):
            where = make_label_mask(config, batch.labels)
            valid = batch.mask
            if where is not None:
                valid &= where.any(axis=tuple(range(1, where.ndim)))
            readings[feature.name] = feature.read_samples(outputs, batch, valid)
        results = PassResults(loss.reported, outputs.collections, outputs.sums, readings)
        return loss.minimised * self.scale, results

    def differentiate(self, trained: Any) -> tuple[Any, PassResults]:
        """Return the gradients of the scaled loss by the trained parameters, and the results."""
        gradients: tuple[Any, PassResults] = jax.grad(
            self.config.apply_lowerings(self.__call__), has_aux=True
        )(trained)
        return gradients

    def with_changed_inputs(self) -> ForwardPass:
        """Return the pass over the batch that the features make of this one."""
        changed = self
        for feature in self.config.features:
            changed = replace(changed, batch=feature.change_inputs(changed))
        return changed
