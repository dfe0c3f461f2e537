"""Training in phases within one program; each phase trains more parameters.

The program has a branch for each phase. The number of steps so far selects the branch, so a sink
may begin in one phase and end in another, and checkpoints needn't record the phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from pipeline.training.state import split_params
from pipeline.training.step_config import StepConfig
from pipeline.training.step_feature import StepFeature

T = TypeVar("T")


@dataclass(frozen=True)
class FreezePhase:
    """A phase of a run. It begins after `start` steps and doesn't train the parameters that the
    patterns `frozen` cover."""

    start: int
    frozen: tuple[str, ...]


@dataclass(frozen=True)
class Freezing(StepFeature):
    """Parameters that aren't trained, or only from a later phase on.

    The optimizer has a separate state for the new parameters of a phase (`optimize_by_phase`).
    """

    name: ClassVar[str] = "freezing"
    frozen: tuple[str, ...] = ()
    """Patterns over parameters that aren't trained until the first of `phases`."""
    phases: tuple[FreezePhase, ...] = ()
    """Later phases, each with more trained parameters."""
    fixes_statistics: bool = False
    """Whether batch norm with frozen parameters uses its running statistics and doesn't update
    them. It applies to `phases`; before them, `network.fixed_statistics` applies."""

    @property
    def never_trained(self) -> tuple[str, ...]:
        return self.phases[-1].frozen if self.phases else self.frozen

    def choose_config(
        self, config: StepConfig, step: Array, compute: Callable[[StepConfig], T]
    ) -> T:
        """Apply `compute` to the configuration of a step's phase. The results of all phases must
        have the same shapes. Outside of jit Python selects the phase, since jax would compile all
        branches again in every step."""
        starts = [phase.start for phase in self.phases]
        if not starts:
            return compute(config)
        if not isinstance(step, jax.core.Tracer):
            return compute(select_phase(config, int(step)))
        phase_number = jnp.sum(step >= jnp.array(starts, jnp.int32), dtype=jnp.int32)
        branches = [partial(compute, select_phase(config, start)) for start in (0, *starts)]
        return jax.lax.switch(phase_number, branches)


NO_FREEZING = Freezing()


def get_freezing(config: StepConfig) -> Freezing:
    """Return what a step's configuration freezes."""
    return config.find(Freezing) or NO_FREEZING


def select_phase(config: StepConfig, step: int) -> StepConfig:
    """Return the configuration of the phase that `step`, the number of steps so far, is in. It has
    no further phases."""
    freezing = get_freezing(config)
    started = [phase for phase in freezing.phases if phase.start <= step]
    if not started:
        return _replace_freezing(config, replace(freezing, phases=()))
    frozen = started[-1].frozen
    if freezing.fixes_statistics:
        config = replace(config, network=config.network.clone(fixed_statistics=frozen))
    return _replace_freezing(config, replace(freezing, phases=(), frozen=frozen))


def _replace_freezing(config: StepConfig, freezing: Freezing) -> StepConfig:
    features = [
        freezing if isinstance(feature, Freezing) else feature for feature in config.features
    ]
    return replace(config, features=tuple(features))


def optimize_by_phase(
    clip: optax.GradientTransformation,
    phases: Sequence[tuple[tuple[str, ...], optax.GradientTransformation]],
) -> optax.GradientTransformation:
    """Use a separate optimizer for the new parameters of each phase, or for groups of parameters.

    Each entry of `phases` has the patterns of frozen parameters, and an optimizer. The optimizer
    updates the parameters that its patterns don't cover, except parameters of earlier entries.
    Until a phase begins, its optimizer keeps the state of `init`, so its parameters start as in a
    new run. For groups of parameters, all entries begin with the first step. `clip` clips all
    gradients together.
    """

    def split_groups(tree: Any) -> Iterator[Any]:
        for patterns, _ in phases:
            group, tree = split_params(tree, patterns)
            yield group

    def init(params: Any) -> tuple[Any, ...]:
        pairs = zip(phases, split_groups(params), strict=True)
        return tuple(optimizer.init(group) for (_, optimizer), group in pairs)

    def update(gradients: Any, state: tuple[Any, ...], params: Any = None) -> tuple[Any, Any]:
        clipped, _ = clip.update(gradients, clip.init(params), params)
        directions: dict[Any, Any] = {}
        new_states = []
        groups = zip(phases, split_groups(clipped), state, split_groups(params), strict=True)
        for (_, optimizer), group_gradients, group_state, group_params in groups:
            if not group_gradients:  # The phase hasn't begun: its parameters have no gradients.
                new_states.append(group_state)
                continue
            direction, new_state = optimizer.update(group_gradients, group_state, group_params)
            directions |= flatten_dict(dict(direction))
            new_states.append(new_state)
        return unflatten_dict(directions), tuple(new_states)

    return optax.GradientTransformation(init, update)
