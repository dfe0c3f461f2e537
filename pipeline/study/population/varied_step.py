"""A step whose program takes numbers of the recipe as arguments, one value for each run.

The arguments come as further columns of the table of learning rates, in which all rows have them,
and with the sums of an evaluation. Each is the double of the run rounded to float32, as the
constant in the program of the run alone is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.backends.base import CompileInputs
from pipeline.backends.feed.window import batch_at
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.study.population.varied_number import (
    CompiledInError,
    ProgramArguments,
    Values,
    VariedNumber,
)
from pipeline.training.state import TrainState
from pipeline.training.step import TrainStep
from pipeline.training.step_record import Record

MakeStep = Callable[[Recipe], TrainStep]
"""The step of a recipe, some of whose numbers are varied ones."""


@dataclass(frozen=True)
class VariedStep:
    """A step with the numbers of several runs, and the keys that they differ in."""

    step: TrainStep
    """For learning rates as `with_columns` makes them, and sums as `with_row`."""
    arguments: ProgramArguments
    keys: tuple[str, ...]
    draws_alike: bool
    """Whether initial states don't depend on the numbers."""

    def row(self, numbers: Values) -> np.ndarray:
        """The arguments of a run with these numbers, float32 (columns,)."""
        return np.array(self.arguments.values(numbers), np.float32)


def varied_step(
    recipe: Recipe,
    members: Sequence[Values],
    make: MakeStep,
    inputs: CompileInputs,
    *,
    groups: bool,
) -> VariedStep:
    """Return the step of runs that differ in the numbers `members`, which `make` makes.

    `inputs` are those of the first run, and `groups` says whether its learning rates have columns
    of their own for groups of parameters. Raises CompiledInError for numbers that decide what is
    compiled.
    """
    keys = tuple(key for key in members[0] if len({own[key] for own in members}) > 1)
    if not keys:
        return VariedStep(inputs.step, ProgramArguments(), (), draws_alike=True)

    def vary(some: tuple[str, ...]) -> VariedStep:
        return _varied(recipe, members, make, inputs, some, groups)

    try:
        return vary(keys)
    except CompiledInError as error:
        if error.is_certain or len(keys) == 1:
            raise
        failing = [key for key in keys if not _succeeds(vary, key)]
        raise CompiledInError(failing or keys, "in a part") from error


def _succeeds(vary: Callable[[tuple[str, ...]], VariedStep], key: str) -> bool:
    try:
        vary((key,))
    except CompiledInError:
        return False
    return True


def _varied(
    recipe: Recipe,
    members: Sequence[Values],
    make: MakeStep,
    inputs: CompileInputs,
    keys: tuple[str, ...],
    groups: bool,
) -> VariedStep:
    """The step of runs with the numbers of these keys as arguments."""
    arguments = ProgramArguments()
    numbers = {key: VariedNumber.of_key(key, members, arguments) for key in keys}
    step = _traced(make, with_values(recipe, numbers), keys)
    draws_alike = _collect(step, inputs, arguments, keys)

    def split(table: jax.Array) -> jax.Array:
        own = table.shape[1] - len(arguments.expressions)
        arguments.row = table[0, own:]
        return table[:, :own] if groups else table[:, 0]

    def train(state: TrainState, batch: Any, table: jax.Array) -> tuple[TrainState, Record]:
        try:
            return step.step(state, batch, split(table))
        finally:
            arguments.row = None

    def evaluate(state: TrainState, batch: Any, sums: Any) -> Any:
        own, row = sums
        arguments.row = row
        try:
            return step.evaluate(state, batch, own), row
        finally:
            arguments.row = None

    blank = jnp.zeros(len(arguments.expressions), jnp.float32)

    def zero_sums() -> Any:
        return step.zero_sums(), blank

    own = TrainStep(inputs.step.init, train, evaluate, zero_sums)
    return VariedStep(own, arguments, keys, draws_alike)


def with_columns(rates: np.ndarray, row: np.ndarray) -> np.ndarray:
    """A table of learning rates with the arguments of a run in every row."""
    if not len(row):
        return rates
    own = rates if rates.ndim == 2 else rates[:, None]
    return np.concatenate([own, np.broadcast_to(row, (len(own), len(row)))], axis=1)


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """A recipe with other values of keys, which are not checked."""
    changed: Any = recipe
    for key, value in values.items():
        changed = _with_value(changed, key.split("."), value)
    assert isinstance(changed, Recipe)
    return changed


def _with_value(spec: Any, path: Sequence[str], value: Any) -> Any:
    name, rest = path[0], path[1:]
    inner = _with_value(getattr(spec, name), rest, value) if rest else value
    return spec.model_copy(update={name: inner})


def _traced(make: MakeStep, recipe: Recipe, keys: Sequence[str]) -> TrainStep:
    try:
        return make(recipe)
    except CompiledInError:
        raise
    except (TypeError, ValueError, RecipeError) as error:
        raise _blamed(error, keys) from error


def _collect(
    step: TrainStep, inputs: CompileInputs, arguments: ProgramArguments, keys: Sequence[str]
) -> bool:
    """Collect the arguments by a trace of the step, and return whether initial states have none."""

    def trained(state: TrainState, window: Any, rates: Any) -> Any:
        return step.step(state, batch_at(window, jnp.int32(0)), rates)

    def evaluated(state: TrainState, window: Any) -> Any:
        return step.evaluate(state, batch_at(window, jnp.int32(0)), step.zero_sums())

    try:
        state = jax.eval_shape(step.init, inputs.seed)
        draws_alike = not arguments.expressions
        arguments.expressions.clear()
        jax.eval_shape(trained, state, inputs.train.window(0).inputs, inputs.learning_rates)
        jax.eval_shape(evaluated, state, inputs.eval.window(0).inputs)
    except CompiledInError:
        raise
    except (TypeError, ValueError) as error:
        raise _blamed(error, keys) from error
    return draws_alike


def _blamed(error: Exception, keys: Sequence[str]) -> CompiledInError:
    """The error of a part that can't compute with varied numbers, as that of its keys."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CompiledInError):
            return CompiledInError(cause.keys, "in a part")
        cause = cause.__cause__
    return CompiledInError(keys, f"{type(error).__name__} in a part", is_certain=False)
