"""The private gradients of a step: clipped by sample, summed, and with noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from pipeline.models.modules.layer_capture import grad_observing_layers
from pipeline.training.forward_pass import ForwardPass, PassResults
from pipeline.training.privacy.add_noise import PrivacyRule, PrivacyState, adapt_clip, add_noise
from pipeline.training.privacy.clip_samples import sum_clipped
from pipeline.training.state import Gradients, TrainState
from pipeline.training.step_feature import StepFeature

PRIVACY = "privacy"


@dataclass(frozen=True)
class PrivateGradients(StepFeature):
    """Clips the gradient of each sample, and adds noise to the sum. Losses that aren't finite are
    left out."""

    name: ClassVar[str] = PRIVACY
    rule: PrivacyRule

    def init(self, trained: Any) -> PrivacyState:
        return self.rule.init()

    def differentiate(self, forward: ForwardPass, trained: Any) -> tuple[Any, PassResults]:
        """Return the clipped sum of the samples' gradients, without noise, and the microbatch's
        share of the mean loss."""
        batch = forward.batch

        def sum_losses(trained: Any) -> tuple[Array, Array]:
            losses = jnp.where(batch.mask, forward.compute_outputs(trained).losses, 0.0)
            return losses.sum(), losses

        _, losses, captures = grad_observing_layers(
            sum_losses, trained, forward.config.apply_lowerings, all_modules=True
        )
        clip = get_privacy(forward.state).clip
        values, within = sum_clipped(captures, trained, batch.mask, clip)
        total = jnp.where(jnp.isfinite(losses), losses, 0.0).sum()
        loss = total / jnp.maximum(forward.divisor, 1)
        return values, PassResults(loss, forward.collections, {self.name: within}, {})

    def change_gradients(self, state: TrainState, gradients: Gradients) -> Any:
        return add_noise(self.rule, get_privacy(state), state.step, gradients.values)

    def change_update(
        self, before: TrainState, after: TrainState, gradients: Gradients, count: Array | int
    ) -> TrainState:
        within = gradients.sums[self.name]
        part = adapt_clip(self.rule, get_privacy(before), before.step, within, count)
        return after.replace_part(PRIVACY, part)


def get_privacy(state: TrainState) -> PrivacyState:
    """Return the secret and the clip of a private run's state."""
    part: PrivacyState = state.features[PRIVACY]
    return part
