"""Averages of the trained parameters, which evaluations use, moving or schedule-free, and parts
that several features have: a copy of the weights, a count of labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.core.errors import RecipeError
from pipeline.training.component_specs import AverageSpec, IterateAverage
from pipeline.training.state import Gradients, TrainState, merge_params, select_averaged
from pipeline.training.step_feature import AVERAGE, EVALUATED, StepFeature
from pipeline.training.telemetry import count_updates

if TYPE_CHECKING:
    from pipeline.training.forward_pass import ForwardPass, Outputs


class WeightCopy(StepFeature):
    """A feature whose state has the form of the trained parameters, and is at first a copy."""

    @property
    def is_like_params(self) -> bool:
        return True

    def init(self, trained: Any) -> Any:
        return jax.tree.map(jnp.copy, trained)


class EvaluatedWeights(WeightCopy):
    """A feature whose state has weights that evaluations use in place of the trained parameters:
    {"evaluated": a tree in their form, ...}.

    Running statistics, such as batch norm's, belong to the evaluated weights: each step applies the
    network to its batch with these too. Without such statistics there is no second pass.
    """

    def init(self, trained: Any) -> dict[str, Any]:
        return {EVALUATED: super().init(trained)}

    def change_outputs(self, forward: ForwardPass, trained: Any, outputs: Outputs) -> Outputs:
        if not jax.tree.leaves(forward.collections):
            return outputs
        for feature in forward.config.features:
            if feature.predicts:
                raise RecipeError(
                    f"{self.name} and {feature.name}: the running statistics are those of the "
                    f"averaged weights, and {feature.name} predicts by others; leave one out, or "
                    "choose a network without batch norm"
                )
        evaluated = forward.state.features[self.name][EVALUATED]
        # `trained` leaves out what is still frozen.
        weights = select_averaged(trained, evaluated)
        inputs = forward.batch.inputs
        _, collections = forward.apply(weights, forward.collections, inputs)
        return outputs._replace(collections=jax.lax.stop_gradient(collections))

    def change_weights(self, state: TrainState, params: Any) -> Any:
        return merge_params(params, state.features[self.name][EVALUATED])


class LabelCount(StepFeature):
    """A feature whose sum is the number of the batch's valid labels, float32 ()."""

    def change_outputs(self, forward: ForwardPass, trained: Any, outputs: Outputs) -> Outputs:
        from pipeline.training.losses import count_batch_labels

        batch = forward.batch
        number = count_batch_labels(forward.config, outputs.logits, batch.labels, batch.mask)
        return outputs._replace(sums={**outputs.sums, self.name: number})


@dataclass(frozen=True)
class MovingAverage(WeightCopy):
    """An exponential moving average of the trained parameters. Its state is the average."""

    name: ClassVar[str] = AVERAGE
    spec: AverageSpec

    def change_update(
        self, before: TrainState, after: TrainState, gradients: Gradients, count: Array | int
    ) -> TrainState:
        average = before.features[AVERAGE]
        params = select_averaged(average, after.params)
        updated = update_ema(average, params, self.spec, count_updates(before))
        return after.replace_part(AVERAGE, updated)

    def change_weights(self, state: TrainState, params: Any) -> Any:
        return merge_params(params, state.features[AVERAGE])


def update_ema(average: Any, params: Any, spec: AverageSpec, updates: Array) -> Any:
    """Return the moving average after an update. `updates`, int32 (), is the number of updates
    before it."""
    assert spec.decay is not None, "callers have an average, so its decay is set"
    count = updates.astype(jnp.float32)
    ramp = (1 + count) / (10 + count)
    decay = jnp.minimum(spec.decay, ramp) if spec.warmup else jnp.float32(spec.decay)
    return jax.tree.map(lambda a, p: a + (1 - decay) * (p - a), average, params)


def find_evaluated(features: Mapping[str, Any]) -> Any:
    """Return the trained parameters that evaluations use, from the states of features; None if they
    use those of the training."""
    # The moving average is a tree of weights, which may have a part of the name `EVALUATED` too.
    parts = [part for name, part in features.items() if name != AVERAGE and isinstance(part, dict)]
    evaluated = [part[EVALUATED] for part in parts if EVALUATED in part]
    return evaluated[0] if evaluated else features.get(AVERAGE)


@dataclass(frozen=True)
class ScheduleFree(EvaluatedWeights):
    """The sequences of Defazio et al.: x is averaged for evaluations, z is what the optimizer
    moves, and gradients are taken at y, which the parameters are.

    Its state is {"evaluated": x, "moved": z, "max_rate": the largest learning rate so far,
    "weight": the sum of the weights of all updates}; the last two are float32 ().
    """

    name: ClassVar[str] = "schedule_free"
    rule: IterateAverage

    def init(self, trained: Any) -> dict[str, Any]:
        zero = jnp.float32(0)
        moved = jax.tree.map(jnp.copy, trained)
        return {**super().init(trained), "moved": moved, "max_rate": zero, "weight": zero}

    def move_parameters(
        self, before: TrainState, after: TrainState, rates: Array | float
    ) -> TrainState:
        part = before.features[self.name]
        # The first of the rates is the main schedule's.
        max_rate = jnp.maximum(part["max_rate"], jnp.ravel(jnp.asarray(rates, jnp.float32))[0])
        number = count_updates(before).astype(jnp.float32) + 1
        weight = number**self.rule.step_power * max_rate**self.rule.rate_power
        total = part["weight"] + weight
        share = jnp.where(total > 0, weight / jnp.where(total > 0, total, 1), 0)

        moves = jax.tree.map(lambda new, old: new - old, after.params, before.params)
        moved = jax.tree.map(jnp.add, part["moved"], select_averaged(part["moved"], moves))
        average = jax.tree.map(lambda x, z: x + share * (z - x), part[EVALUATED], moved)
        params = jax.tree.map(lambda x, z: z + self.rule.b1 * (x - z), average, moved)
        after = replace(after, params=merge_params(after.params, params))
        part = {EVALUATED: average, "moved": moved, "max_rate": max_rate, "weight": total}
        return after.replace_part(self.name, part)
