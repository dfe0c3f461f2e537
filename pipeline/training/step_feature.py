"""Features of a training step: its actions besides computing a loss and updating parameters.

A feature is an object that overrides the methods of the moments of a step at which it acts. The
step calls the features in the order of `StepConfig.features`, which is the order of
`stages/step_features.py` for a recipe. Components of kind "feature" are listed in `train.features`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from pipeline.core.registry import Spec

if TYPE_CHECKING:
    import jax
    import numpy as np

    from pipeline.data.batch import Batch
    from pipeline.training.forward_pass import ForwardPass, Outputs, PassResults
    from pipeline.training.state import Gradients, Inputs, MappedBatch, TrainState
    from pipeline.training.step_config import StepConfig
    from pipeline.training.telemetry import StepOutcome, Telemetry

    Array = jax.Array
    from flax import linen as nn

EVALUATED: Final = "evaluated"
"""Key, in the state of a feature, of the weights that evaluations use."""
AVERAGE: Final = "average"
"""Name of the moving average, whose whole state is such weights."""
T = TypeVar("T")
ComputeGradients = Callable[[Mapping[str, Any], "MappedBatch"], "Gradients"]
"""(network's collections, batch after its map ops) -> gradients of the batch."""
UpdateOptimizer = Callable[[Any], tuple[Any, Any]]
"""(gradients) -> directions, by which the parameters are moved, and the optimizer's state."""


class StepFeature:
    """Base of the features of a step. A feature has its state in `state.features[self.name]`."""

    name: ClassVar[str]
    """Key of its state, of its sums and of its readings."""
    frozen: tuple[str, ...] = ()
    """Patterns over parameters that this step doesn't train."""
    unsaved: tuple[str, ...] = ()
    """Patterns over parameters that checkpoints lack, since a feature of the run restores them."""
    predicts: bool = False
    """Whether it calls `ForwardPass.predict`, which has the running statistics."""
    columns: tuple[str, ...] = ()
    """Names of its columns of metrics.jsonl."""

    @property
    def never_trained(self) -> tuple[str, ...]:
        """Patterns over parameters that no step trains."""
        return self.frozen

    @property
    def is_like_params(self) -> bool:
        """Whether its state has arrays of the parameters' shapes, which devices share as they share
        the parameters."""
        return False

    def init(self, trained: Any) -> Any:
        """Return its state at step 0 from the trained parameters; None if it has no state."""
        return None

    def choose_config(
        self, config: StepConfig, step: Array, compute: Callable[[StepConfig], T]
    ) -> T:
        """Return `compute` of the configuration of a step. `step`, int32 (), is the number of steps
        before it."""
        return compute(config)

    def draw(self, batch: Batch, inputs: Inputs) -> Any:
        """Return random numbers of the samples, (B, ...), for `MappedBatch.extras`. They are drawn
        before the batch is split. `inputs` are what the network reads of the batch."""
        return None

    def keep_samples(self, batch: Batch) -> Array:
        """Return the samples of a batch that count, a mask, bool (B,): the loss of others is left
        out, and the mean divides by the number of those that count. By default all count."""
        import jax.numpy as jnp

        return jnp.ones_like(batch.sample, bool)

    def split_batch(self, compute: ComputeGradients) -> ComputeGradients:
        """Return a function that computes the gradients of a batch from parts of it."""
        return compute

    def change_inputs(self, forward: ForwardPass) -> MappedBatch:
        """Return the batch for the forward pass, such as with attacked images."""
        return forward.batch

    def change_outputs(self, forward: ForwardPass, trained: Any, outputs: Outputs) -> Outputs:
        """Return the outputs of the forward pass with other losses of samples, or with sums."""
        return outputs

    def select_samples(self, losses: Array, valid: Array) -> Array:
        """Return the samples that the loss is reduced over, a mask, bool (B,). `valid`, bool (B,),
        marks those that may be selected."""
        return valid

    def read_samples(self, outputs: Outputs, batch: MappedBatch, valid: Array) -> Any:
        """Return arrays (B, ...) of the samples, for `add_readings`. `valid`, bool (B,), marks the
        samples with a label."""
        return None

    def differentiate(self, forward: ForwardPass, trained: Any) -> tuple[Any, PassResults]:
        """Return gradients by the trained parameters, and the results of the forward pass. Only
        one feature of a step can have this method."""
        return forward.differentiate(trained)

    def sum_part(self, forward: ForwardPass, values: Any) -> Any:
        """Return sums over a part of the batch, a shard or a microbatch, from its gradients. They
        are added over the parts to `Gradients.sums`. `values` are of the scaled loss."""
        return None

    def exchange_sums(self, state: TrainState, sums: Any, add: Callable[[Any], Any]) -> Any:
        """Return its sums over all devices; `add` sums a pytree over devices. Without this method,
        they are added together with the gradients."""
        return add(sums)

    def change_gradients(self, state: TrainState, gradients: Gradients) -> Any:
        """Return other gradients of the whole batch, in the form of `gradients.values`."""
        return gradients.values

    def get_loss_scale(self, state: TrainState) -> Array | float:
        """Return a factor on the loss that the update divides by. Factors of several features are
        multiplied."""
        return 1.0

    def decide(
        self, state: TrainState, outcome: StepOutcome, loss: Array, grad_norm: Array
    ) -> StepOutcome:
        """Return the outcome of a step whose loss or gradient may not be finite."""
        return outcome

    def make_columns(
        self, state: TrainState, gradients: Gradients, outcome: StepOutcome
    ) -> tuple[Array, ...]:
        """Return its columns of the step's record, float32 scalars in the order of `columns`.
        `gradients` are of the scaled loss."""
        return ()

    def list_optimizer_arguments(
        self, state: TrainState, gradients: Gradients, count: Array | int, unscale: Array | float
    ) -> Mapping[str, Any]:
        """Return further arguments of the optimizer's update, by name. `count` is the number of
        samples, and `unscale` the inverse of the loss scale."""
        return {}

    def change_optimizer(
        self, update: UpdateOptimizer, state: TrainState, gradients: Gradients
    ) -> UpdateOptimizer:
        """Return another update of the optimizer. `gradients` are unscaled."""
        return update

    def find_rate(self, path: tuple[str, ...], rate: Array) -> Array:
        """Return the learning rate of the parameter at `path`. `rate` is what the feature before
        returned, at first the step's rate or rates."""
        return rate

    def move_parameters(
        self, before: TrainState, after: TrainState, rates: Array | float
    ) -> TrainState:
        """Return the state after an update with the parameters moved otherwise. In `after` they are
        those before, less the directions times the learning rates. `rates`, float32, is the rate,
        (), or with groups of parameters the rate without a group, then each group's rate."""
        return after

    def change_update(
        self, before: TrainState, after: TrainState, gradients: Gradients, count: Array | int
    ) -> TrainState:
        """Return the state after an update with its state, or the parameters, changed. It isn't
        called for a step whose update is skipped."""
        return after

    def change_step(self, state: TrainState, outcome: StepOutcome) -> TrainState:
        """Return the state after a step, whether or not its update was applied."""
        return state

    def add_readings(
        self, part: Any, rows: Array, readings: Any, outcome: StepOutcome, *, repeats: bool
    ) -> Any:
        """Return its state `part` with the readings of the samples `rows`, int32 (B,). `repeats` is
        whether a batch may contain a sample twice. A state with this method isn't an argument of
        the other moments, since XLA would copy it, and it may be as large as the data."""
        return part

    def measure(self, telemetry: Telemetry, seconds: float) -> Mapping[str, np.ndarray]:
        """Return further columns of metrics.jsonl, (steps,), of the steps that the device computed
        in `seconds`. The host calls it."""
        return {}

    def change_weights(self, state: TrainState, params: Any) -> Any:
        """Return the parameters that an evaluation uses. Its state is a dict, which has the
        trained ones as `evaluated`, since checkpoints are read without the feature."""
        return params


def has_moment(feature: StepFeature, moment: str) -> bool:
    """Return whether a feature acts at a moment: whether it overrides the method."""
    return getattr(type(feature), moment) is not getattr(StepFeature, moment)


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
    """Returns the network of a run. Raises ValueError if it has other inputs or outputs."""


class FeatureSpec(Spec):
    """A feature of the step in a recipe, a component of kind "feature"."""

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
