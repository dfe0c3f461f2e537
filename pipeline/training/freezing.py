"""Training in phases within one program; each phase trains more parameters.

The program has a branch for each phase, chosen by the number of steps so far. So a sink may begin
in one phase and end in another, and a resumed run needs no further state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from pipeline.training.state import StepConfig, split_params

T = TypeVar("T")


def apply_phase(config: StepConfig, step: Array, compute: Callable[[StepConfig], T]) -> T:
    """Apply `compute` to the configuration of a step's phase.

    `step`, int32 (), is the number of steps so far. The results of all phases must have the same
    shapes. In eager mode Python branches, since jax would compile the branches again in every step.
    """
    starts = [phase.start for phase in config.phases]
    if not isinstance(step, jax.core.Tracer):
        return compute(select_phase(config, int(step)))
    number = jnp.sum(step >= jnp.array(starts, jnp.int32), dtype=jnp.int32)
    branches = [partial(compute, select_phase(config, start)) for start in (0, *starts)]
    return jax.lax.switch(number, branches)


def select_phase(config: StepConfig, step: int) -> StepConfig:
    """Return the configuration of a step's phase, without other phases."""
    started = [phase for phase in config.phases if phase.start <= step]
    if not started:
        return replace(config, phases=())
    frozen = started[-1].frozen
    network = config.network
    if config.fix_statistics:
        network = network.clone(fixed_statistics=frozen)
    return replace(config, phases=(), frozen=frozen, network=network)


def optimize_by_phase(
    clip: optax.GradientTransformation,
    phases: Sequence[tuple[tuple[str, ...], optax.GradientTransformation]],
) -> optax.GradientTransformation:
    """Use a separate optimizer for the new parameters of each phase, or for groups of parameters.

    `phases` are the frozen patterns of each phase, and the optimizer for its new parameters. Until
    a phase begins, the state of its optimizer, including the count of updates, stays as `init` made
    it. So its parameters start as in a new run. Groups are phases that begin together: each updates
    the parameters that earlier groups left and its patterns don't cover. All gradients are clipped
    together.
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
        after = []
        pairs = zip(phases, split_groups(clipped), state, split_groups(params), strict=True)
        for (_, optimizer), group, before, trained in pairs:
            if not group:  # The phase hasn't begun: its parameters have no gradients.
                after.append(before)
                continue
            direction, new = optimizer.update(group, before, trained)
            directions |= flatten_dict(dict(direction))
            after.append(new)
        return unflatten_dict(directions), tuple(after)

    return optax.GradientTransformation(init, update)
