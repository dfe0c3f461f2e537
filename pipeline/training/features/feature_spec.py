"""Features that a recipe lists in `train.features`: the components of kind "feature"."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.core.registry import Spec

if TYPE_CHECKING:
    import jax
    from flax import linen as nn

    from pipeline.training.state import Inputs
    from pipeline.training.step_feature import StepFeature


@dataclass(frozen=True)
class TrainedNetwork:
    """The network of another run, with its weights."""

    apply: Callable[[Mapping[str, Any], Inputs], jax.Array]
    """(variables, the network's inputs after the map ops) -> logits, as an evaluation computes
    them."""
    variables: Mapping[str, Any]


@dataclass(frozen=True)
class FeatureContext:
    """Facts of a run from which a feature is built."""

    batch_size: int
    samples: int
    """Samples of the training split."""
    steps_per_epoch: int
    total_steps: int
    """Planned steps of the run."""
    reads_tokens: bool
    """Whether the network reads tokens, else images or numbers."""
    params: Mapping[str, Any]
    """Shapes and dtypes of the network's parameters."""
    count_flops: Callable[[], float]
    """Returns the floating-point operations of the network's forward pass on one batch."""
    load_network: Callable[[Path], TrainedNetwork]
    """Returns the network of a run. Raises RecipeError if it has other inputs or outputs."""


class FeatureSpec(Spec):
    """A feature of the step in a recipe: the component of kind "feature".

    Its `build` returns a `StepFeature`, whose methods are the moments at which it acts.
    """

    applies_network: ClassVar[bool] = False
    """Whether the feature applies the network, or another one, besides the step's forward pass."""
    frozen: ClassVar[tuple[str, ...]] = ()
    """Patterns over parameters that the feature freezes."""
    completes: ClassVar[str | None] = None
    """`module:function` that completes the weights of a saved run; None if checkpoints have all."""
    name: str

    def check(self, recipe: Any) -> Iterator[str]:
        """Yield the problems of a recipe with this feature: texts `KEY = VALUE: must be ...`."""
        yield from ()

    def change_network(self, network: nn.Module) -> nn.Module:
        """Return the network that the step applies, such as with further parameters."""
        return network

    def merge_params(self, params: Any) -> Any:
        """Return the parameters of the network without `change_network` from those of a step."""
        return params

    @abstractmethod
    def build(self, context: FeatureContext) -> StepFeature:
        """Return the feature of a run's step. Raises ValueError if the run can't have it."""
