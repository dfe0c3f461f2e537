"""Parts of several features of a step: a copy of the weights, averages that evaluations use, a
count of labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pipeline.core.errors import RecipeError
from pipeline.training.step_feature import StepFeature

if TYPE_CHECKING:
    from pipeline.training.forward_pass import ForwardPass, Outputs
    from pipeline.training.state import TrainState

EVALUATED: Final = "evaluated"
"""Key, in the state of a feature, of the weights that evaluations use."""


class WeightCopy(StepFeature):
    """A feature whose state has the form of the trained parameters, and is at first a copy."""

    @property
    def is_like_params(self) -> bool:
        return True

    def init(self, trained: Any) -> Any:
        import jax
        import jax.numpy as jnp

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
        import jax

        from pipeline.training.state import select_averaged

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
        from pipeline.training.state import merge_params

        return merge_params(params, state.features[self.name][EVALUATED])


class LabelCount(StepFeature):
    """A feature whose sum is the number of the batch's valid labels, float32 ()."""

    def change_outputs(self, forward: ForwardPass, trained: Any, outputs: Outputs) -> Outputs:
        from pipeline.training.losses import count_batch_labels

        batch = forward.batch
        number = count_batch_labels(forward.config, outputs.logits, batch.labels, batch.mask)
        return outputs._replace(sums={**outputs.sums, self.name: number})
