"""Parts of several features of a step: a copy of the weights, a count of labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.training.step_feature import StepFeature

if TYPE_CHECKING:
    from pipeline.training.forward_pass import ForwardPass, Outputs


class WeightCopy(StepFeature):
    """A feature whose state has the form of the trained parameters, and is at first a copy."""

    @property
    def is_like_params(self) -> bool:
        return True

    def init(self, trained: Any) -> Any:
        import jax
        import jax.numpy as jnp

        return jax.tree.map(jnp.copy, trained)


class LabelCount(StepFeature):
    """A feature whose sum is the number of the batch's valid labels, float32 ()."""

    def change_outputs(self, forward: ForwardPass, trained: Any, outputs: Outputs) -> Outputs:
        from pipeline.training.losses import count_batch_labels

        batch = forward.batch
        number = count_batch_labels(forward.config, outputs.logits, batch.labels, batch.mask)
        return outputs._replace(sums={**outputs.sums, self.name: number})
