"""One step for several runs; the constants in which the runs differ are its arguments.

The steps of runs that differ in numbers of the recipe are traced, and their equations compared. If
only constants differ, the steps share a program. If equations differ, a number decides what is
compiled. A run passes the constants of its trace, so it has the results of a separate program.

Constants of a traced function, and the function with some constants as arguments.

A number of a recipe becomes constants of a program, such as Adam's `1 - b1`, which is computed in
float64 and rounded once. Functions that differ only in such numbers differ only in constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from pipeline.backends.base import CompileInputs
from pipeline.backends.loading.window import read_batch
from pipeline.backends.xla import pad_to_block
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.host.jaxpr import (
    FLOW,
    as_closed,
    bind_equation,
    compute_flow,
    evaluate_traced,
    find_called_jaxpr,
    interpret_jaxpr,
)
from pipeline.models.imported.with_lowerings import CHECKPOINTS, CUSTOM_RULES
from pipeline.study.population.groups import FOLD, collect_numbers
from pipeline.training.step import TrainStep

Values = Mapping[str, float]
"""The numbers of a run by key."""
MakeStep = Callable[[Recipe], TrainStep]
Arguments = tuple[np.ndarray, ...]
"""Scalars, or arrays, in the types of the constants that they replace."""
StepShapes = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Shapes of the arguments of a step, and of its evaluation."""


class CompiledInError(ValueError):
    """Error for numbers that decide what is compiled; `keys` are their keys in the recipe."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(f"{', '.join(keys)}: decides what is compiled; must be equal in all runs")
        self.keys = tuple(keys)


class StepTrace(NamedTuple):
    """Trace of a step."""

    structure: tuple[Any, Any]
    """Equations without constants, of training and of evaluation."""
    constants: list[np.ndarray]
    """The constants of training, then of evaluation."""
    num_train: int
    """The number of constants of training."""


NO_TRACE = StepTrace(([], []), [], 0)
"""Placeholder for a step that is the same for all runs, and needn't be traced."""


@dataclass(frozen=True)
class StepTracer:
    """Traces the steps of runs whose data and states have equal shapes."""

    keys: Set[str]
    """Keys of the numbers in which runs differ."""
    first: Values
    """Numbers of the run whose trace is `base`."""
    base: StepTrace
    shapes: StepShapes
    cache: dict[tuple[float, ...], list[np.ndarray] | None] = field(default_factory=dict)

    def trace_constants(self, numbers: Values, step: TrainStep) -> list[np.ndarray] | None:
        """Return the constants of a run's step; None if its equations differ from `base`."""
        key = tuple(number for name, number in numbers.items() if name in self.keys)
        if key not in self.cache:
            traced = _trace_step(step, self.shapes)
            is_same = traced.structure == self.base.structure
            self.cache[key] = traced.constants if is_same else None
        return self.cache[key]


@dataclass(frozen=True)
class SharedStep:
    """The step of runs that differ in numbers."""

    step: TrainStep
    """Step with the values of `list_arguments` as its last arguments."""
    tracer: StepTracer
    positions: tuple[tuple[int, ...], ...]
    """Positions of the constants that each argument replaces; they are equal within a run."""
    has_same_init: bool
    """Whether initial states don't depend on the numbers."""

    def list_arguments(self, numbers: Values, step: TrainStep) -> Arguments:
        """Return the values that a run passes to the program; `step` is the run's step.

        Raises CompiledInError if the steps differ in more than these values.
        """
        first = self.tracer.first
        if numbers == first:
            return tuple(self.tracer.base.constants[group[0]] for group in self.positions)
        constants = self.tracer.trace_constants(numbers, step)
        if constants is not None:
            arguments = tuple(constants[group[0]] for group in self.positions)
            # With these arguments, the program's constants must be the run's, bit for bit.
            replaced = list(self.tracer.base.constants)
            for group, argument in zip(self.positions, arguments, strict=True):
                for position in group:
                    replaced[position] = argument
            if [read_bits(array) for array in constants] == [read_bits(a) for a in replaced]:
                return arguments
        raise CompiledInError([key for key in numbers if numbers[key] != first[key]])


def share_step(
    recipe: Recipe, members: Sequence[Values], make_step: MakeStep, inputs: CompileInputs
) -> SharedStep:
    """Return the step of runs that differ in numbers; `members` has the numbers of each run.

    `make_step` makes the step of a recipe. `recipe` and `inputs` belong to one of the runs. Raises
    CompiledInError for numbers that decide what is compiled.
    """
    first = collect_numbers(recipe)
    step = inputs.step
    keys = {key for key in first if len({member[key] for member in members}) > 1}
    shapes = _compute_shapes(inputs)
    tracer = StepTracer(keys, first, _trace_step(step, shapes) if keys else NO_TRACE, shapes)
    runs = [tracer.base.constants]
    has_same_init = True
    deciding = set[str]()
    # A step is traced for each value of a key, with the other numbers of the first run. Steps of
    # other folds are traced with their data, in `list_arguments`.
    values = {(key, member[key]) for key in keys - {FOLD} for member in members}
    for key, value in sorted(values - first.items()):
        try:
            variant = make_step(_replace_value(recipe, key.split("."), value))
            constants = tracer.trace_constants({**first, key: value}, variant)
            has_same_init &= _trace_init(variant, inputs) == _trace_init(step, inputs)
        except (TypeError, ValueError, RecipeError):
            constants = None
        if constants is None:
            deciding.add(key)
        else:
            runs.append(constants)
    if deciding:
        raise CompiledInError(sorted(deciding))
    positions_by_bits: dict[tuple[Any, ...], list[int]] = {}
    for position in range(len(tracer.base.constants)):
        bits = tuple(read_bits(constants[position]) for constants in runs)
        if len(set(bits)) > 1:
            positions_by_bits.setdefault(bits, []).append(position)
    positions = tuple(tuple(group) for group in positions_by_bits.values())
    shared = _add_arguments(step, positions, tracer.base.num_train)
    return SharedStep(shared, tracer, positions, has_same_init)


def _compute_shapes(inputs: CompileInputs) -> StepShapes:
    state = jax.eval_shape(inputs.step.init, inputs.seed)
    batch, eval_batch = (
        jax.eval_shape(read_batch, loader.get_window(0).inputs, np.int32(0))
        for loader in (inputs.train, inputs.eval)
    )
    sums = jax.eval_shape(inputs.step.zero_sums)
    return (state, batch, pad_to_block(inputs.learning_rates)), (state, eval_batch, sums)


def _trace_step(step: TrainStep, shapes: StepShapes) -> StepTrace:
    train_shapes, eval_shapes = shapes
    train = read_constants(jax.make_jaxpr(step.step)(*train_shapes))
    evaluate = read_constants(jax.make_jaxpr(step.evaluate)(*eval_shapes))
    constants = [*train.values, *evaluate.values]
    return StepTrace((train.structure, evaluate.structure), constants, len(train.values))


def _trace_init(step: TrainStep, inputs: CompileInputs) -> Any:
    traced = read_constants(jax.make_jaxpr(step.init)(inputs.seed))
    return traced.structure, list(map(read_bits, traced.values))


def _add_arguments(step: TrainStep, groups: Sequence[Sequence[int]], num_train: int) -> TrainStep:
    """Return the step with arguments for constants; the first `num_train` belong to training."""
    if not groups:
        return step
    train = [[position for position in group if position < num_train] for group in groups]
    evaluate = [
        [position - num_train for position in group if position >= num_train] for group in groups
    ]
    return replace(
        step,
        step=with_arguments(step.step, train),
        evaluate=with_arguments(step.evaluate, evaluate),
    )


def _replace_value(spec: Any, path: Sequence[str], value: float) -> Any:
    """Return a recipe, or a section of one, with another value at a path of names."""
    name = path[0]
    inner_path = path[1:]
    section = _replace_value(getattr(spec, name), inner_path, value) if inner_path else value
    return spec.model_copy(update={name: section})


@dataclass(eq=False)
class TracedConstants:
    """The constants of a function in the order of its equations, and the equations without them."""

    values: list[np.ndarray] = field(default_factory=list)
    structure: list[Any] = field(default_factory=list)
    """Equations without constants: equal for functions that differ only in constants."""
    positions: dict[int, int] = field(default_factory=dict)
    """Position of a constant in `values`, by the identity of its literal or variable."""
    holders: list[set[int]] = field(default_factory=list)
    """Identities of the equations that contain each constant."""
    _enclosing: tuple[int, ...] = ()
    """Identities of the equations around the equation that is read."""
    _is_fixed: bool = False
    """Whether the constants of the equation that is read can't become arguments."""

    def read(self, jaxpr: ClosedJaxpr) -> None:
        """Add the equations of a jaxpr and of the jaxprs inside it."""
        operands = [("operand", number) for number in range(len(jaxpr.jaxpr.invars))]
        self.structure.append(("types", jaxpr.in_avals, jaxpr.out_avals))
        self.structure.append(
            interpret_jaxpr(jaxpr, operands, self._read_equation, self._read_constant)
        )

    def _read_equation(self, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Add an equation and the jaxprs inside it; return names of its results."""
        enclosing = self._enclosing
        is_fixed = self._is_fixed
        number = len(self.structure)
        params = equation.params
        is_call = find_called_jaxpr(equation) is not None
        self.structure.append((equation.primitive, operands))
        if equation.primitive.name in CUSTOM_RULES:
            # The rules for derivatives are left out: they are new objects in every trace.
            params = {"called": find_called_jaxpr(equation)}
        self._enclosing = (*enclosing, id(equation))
        # Constants can become arguments only in calls and control flow, except in checkpoints.
        can_vary = is_call or equation.primitive.name in FLOW
        self._is_fixed |= not can_vary or equation.primitive.name in CHECKPOINTS
        self.structure.append({name: self._to_comparable(value) for name, value in params.items()})
        self._enclosing = enclosing
        self._is_fixed = is_fixed
        return [(number, result) for result in range(len(equation.outvars))]

    def _to_comparable(self, param: Any) -> Any:
        """Return a parameter of an equation in a form that can be compared between traces."""
        if isinstance(param, Jaxpr | ClosedJaxpr):
            self.read(as_closed(param))
            return "jaxpr"
        if isinstance(param, tuple | list):
            return [self._to_comparable(item) for item in param]
        return read_bits(param) if isinstance(param, np.ndarray | Array) else param

    def _read_constant(self, atom: Any, value: Any) -> Any:
        """Add a constant; return its position in `values`, or its bits if it can't be an
        argument."""
        if jax.dtypes.issubdtype(atom.aval.dtype, jax.dtypes.prng_key):
            with jax.ensure_compile_time_eval():
                return read_bits(jax.random.key_data(value))
        # A literal may be a number of Python; this rounds it as the program does.
        array = np.asarray(value, atom.aval.dtype)
        if self._is_fixed:
            return read_bits(array)
        position = self.positions.setdefault(id(atom), len(self.values))
        if position == len(self.values):
            self.values.append(array)
            self.holders.append(set())
        self.holders[position].update(self._enclosing)
        return ("constant", position, array.shape, array.dtype)


def read_bits(array: Any) -> tuple[Any, ...]:
    """Return shape, type and bytes of an array, to compare arrays bit for bit."""
    array = np.asarray(array)
    return array.shape, array.dtype, array.tobytes()


def read_constants(jaxpr: ClosedJaxpr) -> TracedConstants:
    """Return the constants of a traced function."""
    traced = TracedConstants()
    traced.read(jaxpr)
    return traced


def with_arguments(
    function: Callable[..., Any], positions: Sequence[Sequence[int]]
) -> Callable[..., Any]:
    """Return a function whose last arguments are values of constants.

    Each value replaces the constants at one group of positions, and has their shape and type.
    """
    numbers = {position: number for number, group in enumerate(positions) for position in group}

    def evaluate(values: Sequence[Any], closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        traced = read_constants(closed)
        value_by_atom = {
            atom: values[numbers[position]]
            for atom, position in traced.positions.items()
            if position in numbers
        }
        holders = set[int]().union(*(traced.holders[position] for position in numbers))
        return _Evaluation(value_by_atom, holders).evaluate(closed, operands)

    def call(*arguments_and_values: Any) -> Any:
        arguments = arguments_and_values[: -len(positions)]
        values = arguments_and_values[-len(positions) :]
        return evaluate_traced(function, arguments, partial(evaluate, values))

    return call


@dataclass(frozen=True)
class _Evaluation:
    """Evaluates jaxprs with other values of some constants."""

    values: Mapping[int, Array]
    """Values by the identity of a constant's literal or variable."""
    holders: Set[int]
    """Identities of the equations that contain these constants."""

    def evaluate(self, jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        """Return the results of a jaxpr for its operands."""
        return interpret_jaxpr(jaxpr, operands, self._compute_equation, self._read_constant)

    def _read_constant(self, atom: Any, constant: Any) -> Any:
        return self.values.get(id(atom), constant)

    def _compute_equation(self, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        with equation.ctx.manager:
            called = find_called_jaxpr(equation)
            if id(equation) not in self.holders:
                return bind_equation(equation, operands)
            if called is not None:
                return self.evaluate(called, operands)
            return compute_flow(equation, operands, self.evaluate)
