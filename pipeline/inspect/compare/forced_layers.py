"""Comparison of single layers: the examined side's layers compute from the reference's inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pipeline.inspect.compare.layer_errors import (
    LayerError,
    find_worst_by_layer,
    measure_layer_errors,
)
from pipeline.inspect.dumps.captured_step import CapturedStep, StepPass, join_passes
from pipeline.inspect.dumps.layer_programs import LayerPrograms, LayerTensors, Weights


@dataclass(frozen=True)
class ForcedComparison:
    """Errors of the layers of a side."""

    errors: Sequence[LayerError]

    @property
    def findings(self) -> tuple[LayerError, ...]:
        """The worst error of each layer that has a finding, the largest score first."""
        blamed = [error for error in find_worst_by_layer(self.errors).values() if error.score > 1]
        return tuple(sorted(blamed, key=lambda error: -error.score))


@dataclass
class ReferenceStep:
    """A step of the reference, with which other sides are compared layer by layer."""

    programs: LayerPrograms
    step: CapturedStep
    _wide: LayerTensors | None = None
    """Results in float64."""
    _expected: dict[Any, LayerTensors] = field(default_factory=dict)
    """Results by types and loss scale."""

    def compare(self, examined: LayerPrograms, weights: Weights | None = None) -> ForcedComparison:
        """Compute each layer of `examined` from the reference's inputs, and return the errors.

        `weights` are the examined side's weights, if they differ from the reference's. The expected
        error is always computed with the reference's weights.
        """
        network = examined.config.network
        reference_network = self.programs.config.network
        loss_scale = None if weights is None else weights.loss_scale
        forced = self._compute_passes(examined.compute_forced, weights, loss_scale)
        expected = [self.expected_in(network, loss_scale)]
        if (network.dtype, network.rules) == (reference_network.dtype, reference_network.rules):
            expected.append(self.step.merge_passes())
        lowerings = getattr(network.policy, "chosen", ())
        errors = measure_layer_errors(
            forced,
            expected,
            self.compute_float64(),
            self.step.merge_passes(),
            has_winograd=any(lowering.family.startswith("winograd") for _, lowering in lowerings),
        )
        return ForcedComparison(errors)

    def compute_float64(self) -> LayerTensors:
        """Return the layers' results in float64, computed once."""
        if self._wide is None:
            network = self.programs.config.network.clone(dtype="float32", rules=())
            compute = self.programs.with_types_of(network).compute_forced
            self._wide = self._compute_passes(partial(compute, wide=True))
        return self._wide

    def expected_in(self, network: Any, loss_scale: Any = None) -> LayerTensors:
        """Return the reference's results in the types of `network`, with `loss_scale`; cached."""
        key = network.dtype, network.rules, None if loss_scale is None else float(loss_scale)
        if key not in self._expected:
            compute = self.programs.with_types_of(network).compute_forced
            self._expected[key] = self._compute_passes(compute, None, loss_scale)
        return self._expected[key]

    def _compute_passes(
        self,
        compute: Callable[..., LayerTensors],
        weights: Weights | None = None,
        loss_scale: Any = None,
    ) -> LayerTensors:
        """Compute all portions with `weights`, or the reference's weights if None."""

        def compute_pass(step_pass: StepPass) -> LayerTensors:
            # Weights of the reference's passes have the batch statistics after earlier passes.
            pass_weights = step_pass.weights
            if weights is not None and weights.params is not self.step.passes[0].weights.params:
                pass_weights = weights
            if loss_scale is not None:
                pass_weights = replace(pass_weights, loss_scale=loss_scale)
            return compute(pass_weights, step_pass.portion, step_pass.tensors)

        shards = [
            [compute_pass(step_pass) for step_pass in microbatches]
            for microbatches in self.step.shards
        ]
        parts = [tensors for shard in shards for tensors in shard]
        return join_passes(parts, [shard[-1].statistics for shard in shards])
