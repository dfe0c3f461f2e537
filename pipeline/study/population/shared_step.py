"""One step for several runs, which takes the constants that they differ in as arguments.

The steps of runs that differ in numbers of the recipe are traced, and their equations compared.
Steps that differ in constants alone share a program; if the equations differ, a number decides what
is compiled. A run passes the constants of its trace to the program: the constants of its program if
it ran alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from pipeline.backends.base import CompileInputs
from pipeline.backends.loading.window import batch_at
from pipeline.backends.xla import pad_to_block
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.study.population.groups import numbers_of
from pipeline.study.population.traced_constants import bits_of, trace_constants, with_arguments
from pipeline.training.step import TrainStep

Values = Mapping[str, float]
"""The numbers of one run by key."""
MakeStep = Callable[[Recipe], TrainStep]
Arguments = tuple[np.ndarray, ...]
"""Scalars, or arrays, in the types of the constants that they replace."""


class CompiledInError(ValueError):
    """Numbers that decide what is compiled; `keys` are of the recipe."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(f"{', '.join(keys)}: decides what is compiled")
        self.keys = tuple(keys)


class StepTrace(NamedTuple):
    """Trace of a step: training, and after it the evaluation."""

    structure: tuple[Any, Any]
    constants: list[np.ndarray]
    trained: int
    """The number of constants of training."""


NO_TRACE = StepTrace(([], []), [], 0)
"""Of a step that all runs have."""


@dataclass(frozen=True)
class StepTracer:
    """Traces the steps of runs whose data and states have the shapes of one of them."""

    keys: Set[str]
    """Of the numbers that runs differ in."""
    first: Values
    """The numbers of the run whose trace is `base`."""
    base: StepTrace
    shapes: tuple[tuple[Any, ...], tuple[Any, ...]]
    """Of what the step takes, and the evaluation."""
    cache: dict[tuple[float, ...], list[np.ndarray] | None] = field(default_factory=dict)

    def constants_of(self, numbers: Values, step: TrainStep) -> list[np.ndarray] | None:
        """The constants of the step of a run with these numbers; None for other equations."""
        key = tuple(number for name, number in numbers.items() if name in self.keys)
        if key not in self.cache:
            traced = _trace(step, self.shapes)
            is_same = traced.structure == self.base.structure
            self.cache[key] = traced.constants if is_same else None
        return self.cache[key]


@dataclass(frozen=True)
class SharedStep:
    """A step of runs that differ in numbers."""

    step: TrainStep
    """Takes the values of `arguments_of` after its other arguments."""
    tracer: StepTracer
    places: tuple[tuple[int, ...], ...]
    """The constants that each argument stands for, which are equal in every run."""
    draws_alike: bool
    """Whether initial states don't depend on the numbers."""

    def arguments_of(self, numbers: Values, step: TrainStep) -> Arguments:
        """The values that a run with these numbers gives the program; `step` is its step alone.

        Raises CompiledInError if more differs than these values.
        """
        first = self.tracer.first
        if numbers == first:
            return tuple(self.tracer.base.constants[places[0]] for places in self.places)
        constants = self.tracer.constants_of(numbers, step)
        if constants is not None:
            expected = list(self.tracer.base.constants)
            for places in self.places:
                for place in places:
                    expected[place] = constants[places[0]]
            if list(map(bits_of, constants)) == list(map(bits_of, expected)):
                return tuple(constants[places[0]] for places in self.places)
        raise CompiledInError([key for key in numbers if numbers[key] != first[key]])


def share_step(
    recipe: Recipe, members: Sequence[Values], make: MakeStep, inputs: CompileInputs
) -> SharedStep:
    """Return the step of runs that differ in the numbers `members`, which `make` makes.

    `inputs` are of the run of `recipe`, one of them. Raises CompiledInError for numbers that decide
    what is compiled.
    """
    first = numbers_of(recipe)
    step = inputs.step
    keys = {key for key in first if len({member[key] for member in members}) > 1}
    shapes = _shapes_of(inputs)
    tracer = StepTracer(keys, first, _trace(step, shapes) if keys else NO_TRACE, shapes)
    runs = [tracer.base.constants]
    draws_alike = True
    deciding = set[str]()
    values = {(key, member[key]) for key in keys for member in members}
    for key, value in sorted(values - first.items()):
        try:
            variant = make(_with_value(recipe, key.split("."), value))
            constants = tracer.constants_of({**first, key: value}, variant)
            draws_alike &= _initial_bits(variant, inputs) == _initial_bits(step, inputs)
        except (TypeError, ValueError, RecipeError):
            constants = None
        if constants is None:
            deciding.add(key)
        else:
            runs.append(constants)
    if deciding:
        raise CompiledInError(sorted(deciding))
    by_values: dict[tuple[Any, ...], list[int]] = {}
    for place, constant in enumerate(zip(*runs, strict=True)):
        bits = tuple(map(bits_of, constant))
        if len(set(bits)) > 1:
            by_values.setdefault(bits, []).append(place)
    places = tuple(map(tuple, by_values.values()))
    return SharedStep(
        _add_arguments(step, places, tracer.base.trained), tracer, places, draws_alike
    )


def _shapes_of(inputs: CompileInputs) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    step = inputs.step
    loaders = (inputs.train, inputs.eval)
    train, evaluate = (
        jax.eval_shape(batch_at, loader.window(0).inputs, np.int32(0)) for loader in loaders
    )
    state = jax.eval_shape(step.init, inputs.seed)
    sums = jax.eval_shape(step.zero_sums)
    rates = pad_to_block(inputs.learning_rates)
    return (state, train, rates), (state, evaluate, sums)


def _trace(step: TrainStep, shapes: tuple[tuple[Any, ...], tuple[Any, ...]]) -> StepTrace:
    train = trace_constants(step.step, *shapes[0])
    evaluate = trace_constants(step.evaluate, *shapes[1])
    constants = [*train.values, *evaluate.values]
    return StepTrace((train.structure, evaluate.structure), constants, len(train.values))


def _initial_bits(step: TrainStep, inputs: CompileInputs) -> Any:
    traced = trace_constants(step.init, inputs.seed)
    return traced.structure, list(map(bits_of, traced.values))


def _add_arguments(step: TrainStep, places: Sequence[Sequence[int]], trained: int) -> TrainStep:
    """The step with arguments for constants, of which the first `trained` are of training."""
    if not places:
        return step
    train = [[place for place in of_value if place < trained] for of_value in places]
    evaluate = [[place - trained for place in of_value if place >= trained] for of_value in places]
    return replace(
        step,
        step=with_arguments(step.step, train),
        evaluate=with_arguments(step.evaluate, evaluate),
    )


def _with_value(spec: Any, path: Sequence[str], value: float) -> Any:
    """A recipe, or a section of it, with a number that another recipe has there."""
    name = path[0]
    inner_path = path[1:]
    inner = _with_value(getattr(spec, name), inner_path, value) if inner_path else value
    return spec.model_copy(update={name: inner})
