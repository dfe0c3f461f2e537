"""Features that add a term to the loss: distillation, and a penalty on the inputs' gradient.

By distillation the network learns the outputs of a teacher besides the labels (Hinton, Vinyals and
Dean, Distilling the knowledge in a neural network, 2015, arXiv 1503.02531). The teacher may be an
average of the network (Tarvainen and Valpola, Mean teachers are better role models, 2017, arXiv
1703.01780).

The penalty is on the gradient of the loss by the inputs (Drucker and LeCun, Improving
generalization performance using double backpropagation, 1992).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat

from pipeline.core.registry import component
from pipeline.training.step_feature import FeatureContext, FeatureSpec, StepFeature, TrainedNetwork

if TYPE_CHECKING:
    from jax import Array

    from pipeline.training.forward_pass import ForwardPass, Outputs
    from pipeline.training.state import Gradients, Inputs, TrainState
    from pipeline.training.telemetry import StepOutcome

AVERAGE = "ema"


@component("feature")
class DistillSpec(FeatureSpec):
    """The loss of a sample is (1 - `weight`) times its loss, plus `weight` times T^2 times the
    divergence KL(teacher || network) of the predictions at temperature T.

    `teacher` is a run directory, or ema: the moving average of this network, with `decay`.
    """

    applies_network: ClassVar[bool] = True
    name: Literal["distill"] = "distill"
    teacher: str
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    temperature: PositiveFloat = 2.0
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999

    def check(self, recipe: Any) -> Iterator[str]:
        tasks = recipe.train.loss.tasks
        if "classification" not in tasks and "next_token" not in tasks:
            name = recipe.train.loss.name
            yield f"train.loss = {name}: must be a loss of classes with train.features.distill"

    def build(self, context: FeatureContext) -> StepFeature:
        network = None if self.teacher == AVERAGE else context.load_network(Path(self.teacher))
        return Distillation(self, network)


@dataclass(frozen=True, eq=False)
class Distillation(StepFeature):
    """The teacher; its state is the teacher's parameters and collections, or the average."""

    name: ClassVar[str] = "distill"
    spec: DistillSpec
    network: TrainedNetwork | None
    """The teacher; None: the average of the network."""
    columns: tuple[str, ...] = ("teacher_divergence",)

    @property
    def predicts(self) -> bool:  # type: ignore[override]
        return self.network is None

    @property
    def is_like_params(self) -> bool:
        return self.network is None

    def init(self, trained: Any) -> Any:
        import jax
        import jax.numpy as jnp

        teacher = trained if self.network is None else self.network.variables
        return jax.tree.map(jnp.array, teacher)

    def change_outputs(self, forward: ForwardPass, trained: Any, outputs: Outputs) -> Outputs:
        import jax
        import jax.numpy as jnp

        from pipeline.training.losses import make_label_mask
        from pipeline.training.masks import masked_mean

        teacher_logits = jax.lax.stop_gradient(self._predict(forward))
        temperature = self.spec.temperature
        log_p = jax.nn.log_softmax(teacher_logits.astype(jnp.float32) / temperature)
        log_q = jax.nn.log_softmax(outputs.logits.astype(jnp.float32) / temperature)
        divergence = (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)
        where = make_label_mask(forward.config, forward.batch.labels)
        positions = tuple(range(1, divergence.ndim))
        if where is None:
            divergence = divergence.mean(axis=positions)
        else:  # As in the loss, positions without a label don't count.
            divergence = masked_mean(divergence, where, positions)
        weight = self.spec.weight
        losses = (1 - weight) * outputs.losses + weight * temperature**2 * divergence
        mask = forward.batch.mask
        sums = jnp.where(mask, divergence, 0).sum(), mask.sum().astype(jnp.float32)
        return outputs._replace(losses=losses, sums={**outputs.sums, self.name: sums})

    def _predict(self, forward: ForwardPass) -> Array:
        from pipeline.training.state import merge_params

        part = forward.state.features[self.name]
        if self.network is not None:
            return self.network.apply(part, forward.batch.inputs)
        state = replace(forward.state, params=merge_params(forward.state.params, part))
        return replace(forward, state=state).predict(forward.batch.inputs)

    def make_columns(
        self, state: TrainState, gradients: Gradients, outcome: StepOutcome
    ) -> tuple[Array, ...]:
        import jax.numpy as jnp

        total, count = gradients.sums[self.name]
        return (total / jnp.maximum(count, 1),)

    def change_update(
        self, before: TrainState, after: TrainState, gradients: Gradients, count: Array | int
    ) -> TrainState:
        import jax

        from pipeline.training.state import select_averaged

        if self.network is not None:
            return after
        average = before.features[self.name]
        params = select_averaged(average, after.params)
        rate = 1 - self.spec.decay
        moved = jax.tree.map(lambda a, p: a + rate * (p - a), average, params)
        return after.replace_part(self.name, moved)


@component("feature")
class GradientPenaltySpec(FeatureSpec):
    """Adds `weight` / 2 times the squared norm of the gradient of each sample's loss by its inputs,
    as the network reads them."""

    applies_network: ClassVar[bool] = True
    name: Literal["gradient_penalty"] = "gradient_penalty"
    weight: PositiveFloat = 0.1

    def build(self, context: FeatureContext) -> StepFeature:
        if context.reads_tokens:
            raise ValueError("tokens have no gradients; must be left out for texts")
        return GradientPenalty(self.weight)


@dataclass(frozen=True)
class GradientPenalty(StepFeature):
    """The penalty, which is a part of each sample's loss."""

    name: ClassVar[str] = "gradient_penalty"
    weight: float

    def change_outputs(self, forward: ForwardPass, trained: Any, outputs: Outputs) -> Outputs:
        import jax
        import jax.numpy as jnp

        from pipeline.training.losses import compute_losses

        def sum_losses(inputs: Inputs) -> Array:
            logits, _ = forward.apply(trained, forward.collections, inputs)
            losses = compute_losses(forward.config, logits, forward.batch.labels)
            return jnp.where(forward.batch.mask, losses, 0).sum()

        by_inputs = jax.tree.leaves(jax.grad(sum_losses)(forward.batch.inputs))
        squares = sum(jnp.square(leaf).sum(axis=tuple(range(1, leaf.ndim))) for leaf in by_inputs)
        return outputs._replace(losses=outputs.losses + self.weight / 2 * squares)
