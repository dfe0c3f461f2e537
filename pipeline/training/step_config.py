"""The configuration of a training step: what is computed, its features, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import optax
from flax import linen as nn

from pipeline.data.padding.buckets import NO_PADDING, Padding
from pipeline.training.state import split_params
from pipeline.training.step_feature import StepFeature, has_moment

if TYPE_CHECKING:
    from pipeline.data.columns import Targets
    from pipeline.data.dataset_spec import Ops
    from pipeline.data.inputs import NetworkInputs
    from pipeline.models.layers.model_spec import InitRule
    from pipeline.models.lowerings.problem import Layout, LoweringPolicy
    from pipeline.training.component_specs import MetricSpec
    from pipeline.training.losses import TrainingObjective
    from pipeline.training.parallel.parallel_spec import Shards
    from pipeline.training.parallel.state_sharing import StateSharing
    from pipeline.training.state import TrainState

Feature = TypeVar("Feature", bound=StepFeature)
Lowered = TypeVar("Lowered", bound=Callable[..., Any])
GRADIENT_MOMENTS = (
    *("change_inputs", "change_outputs", "differentiate", "get_loss_scale"),
    *("sum_part", "exchange_sums", "change_gradients"),
)
"""Moments at which a feature may read its state before the gradients are complete."""


@dataclass(frozen=True)
class TracedLowerings:
    """The computation of the layers of a traced network."""

    policy: LoweringPolicy
    """Policy by which they get lowerings."""
    layout: Layout = "nhwc"
    """Order of the axes of images in convolutions."""


@dataclass(frozen=True)
class StepConfig:
    """Configuration of a step's functions."""

    network: nn.Module
    inputs: NetworkInputs
    """The arrays that the network reads after the map ops."""
    targets: Targets
    """The meaning of the network's outputs."""
    train_ops: Ops
    eval_ops: Ops
    objective: TrainingObjective
    """The loss of a batch."""
    optimizer: optax.GradientTransformation
    metrics: tuple[MetricSpec, ...] = ()
    """Metrics of evaluations, besides the standard ones for classes."""
    features: tuple[StepFeature, ...] = ()
    """Privacy, averages and the like, in the order in which the step calls them."""
    padding: Padding = NO_PADDING
    """Padding of samples of several sizes."""
    init_rules: tuple[InitRule, ...] = ()
    shards: Shards | None = None
    """Shards of a batch, also across devices; None if a batch isn't split."""
    sharing: StateSharing | None = None
    """Sharing of the state between devices; None if each has all of it."""
    lowerings: TracedLowerings | None = None
    """Lowerings of the layers of a traced network; None: the network's layers choose theirs
    themselves, or none is replaced."""

    def find(self, kind: type[Feature]) -> Feature | None:
        """Return the feature of a type; None if the step has none."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    def list_acting(self, moment: str) -> list[StepFeature]:
        """Return the features that act at a moment, by the name of its method."""
        return [feature for feature in self.features if has_moment(feature, moment)]

    def list_read(self) -> list[str]:
        """Return the names of the features whose states the gradients may depend on."""
        return [
            feature.name
            for feature in self.features
            if any(has_moment(feature, moment) for moment in GRADIENT_MOMENTS)
        ]

    def select_gradient_state(self, state: TrainState) -> TrainState:
        """Return the part of a state that the gradients depend on."""
        parts = {name: state.features[name] for name in self.list_read() if name in state.features}
        return replace(state, opt_state=(), features=parts)

    def apply_lowerings(self, function: Lowered) -> Lowered:
        """Return `function`, which applies the network, with the lowerings of `lowerings`."""
        if self.lowerings is None:
            return function
        from pipeline.models.imported.with_lowerings import scope_root, with_lowerings

        traced, root = self.lowerings, scope_root(self.network)
        return with_lowerings(function, traced.policy, root, layout=traced.layout)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Patterns over parameters that this step doesn't train."""
        return tuple(pattern for feature in self.features for pattern in feature.frozen)

    @property
    def never_trained(self) -> tuple[str, ...]:
        """Patterns over parameters that no step trains."""
        return tuple(pattern for feature in self.features for pattern in feature.never_trained)

    @property
    def unsaved(self) -> tuple[str, ...]:
        """Patterns over parameters that checkpoints lack."""
        return tuple(pattern for feature in self.features for pattern in feature.unsaved)

    def select_saved(self, state: TrainState) -> TrainState:
        """Return the part of a state that checkpoints have."""
        return replace(state, params=split_params(state.params, self.unsaved)[0])

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the features' columns of a step's record."""
        return tuple(name for feature in self.features for name in feature.columns)
