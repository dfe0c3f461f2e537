"""A custom step as a program that runs many steps per dispatch.

It has two parts: the equations of its metrics and gradients, and its state's update.

A step whose loss isn't finite doesn't change the state. So the update is a branch of the program,
in which XLA on the CPU updates arrays in place. Selecting the old or the new state after an update
would copy the arrays, which takes a fifth of the time of an MLP's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.tree_util import register_dataclass

from pipeline.backends.base import CompileReport, Mechanism
from pipeline.backends.compile_program import ProgramSpec, compile_program
from pipeline.backends.loading.loader import Loader
from pipeline.backends.loading.window import Inputs, read_batch
from pipeline.backends.step_loops import (
    LoopCarry,
    make_train_loop,
    run_once,
    run_windows,
    split_at_windows,
    split_positions,
)
from pipeline.core.errors import RunError
from pipeline.core.files.paths import find_user_cache
from pipeline.core.host.jaxpr import (
    ELEMENTWISE,
    bind_equation,
    bind_variables,
    enter_scope,
    find_called_jaxpr,
    join_scope,
)
from pipeline.core.host.platforms import get_platform
from pipeline.data.batch import Batch
from pipeline.engine.step_checks import LOSS, StepSignature, is_key
from pipeline.models.imported.with_lowerings import list_unreplaced, with_lowerings
from pipeline.models.lowerings.problem import Layout, Problem, RecordingPolicy
from pipeline.models.lowerings.tune.rule import choose_step_layout_by_rule
from pipeline.models.lowerings.tune.tuner import LoweringChoice, Tuning, choose_lowerings
from pipeline.training.parallel.state_sharing import DevicePlacement
from pipeline.training.telemetry import Telemetry
from pipeline.training.update import apply_if_finite

NO_RATES = np.zeros(1, np.float32)
"""Argument of the loop in place of learning rates: a custom step doesn't read it."""
Step = Callable[[Any, Any], tuple[Any, Mapping[str, Array]]]
"""Function from a state and a batch to the next state and metrics."""
CHEAP = ELEMENTWISE | {"broadcast_in_dim", "reshape", "squeeze"}
"""Primitives that are as fast in a branch as in the program around it."""


@register_dataclass
@dataclass(frozen=True)
class CustomState:
    """The state of a custom loop. Checkpoints have the names of these fields, and the paths."""

    step: Any
    """Number of steps done, int32 ()."""
    state: dict[str, Any]
    """Leaves of the caller's state by path."""
    # The training loop reads this field of a TrainState.
    features: ClassVar[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True)
class StateLayout:
    """The structure of a custom state. It is stored as leaves by path, random keys as integers."""

    structure: Any
    paths: tuple[str, ...]
    key_types: tuple[str | None, ...]
    """Name of the implementation of each leaf that is a random key; None for other leaves."""

    @staticmethod
    def from_state(state: Any) -> StateLayout:
        """Return the layout of a checked state."""
        flat, structure = jax.tree.flatten_with_path(state)
        paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
        # Paths may have equal texts, and the text of a state that is one array is empty.
        names = [
            path if _is_name(path) and paths.count(path) == 1 else f"{number}:{_make_name(path)}"
            for number, path in enumerate(paths)
        ]
        return StateLayout(structure, tuple(names), tuple(_find_key_type(leaf) for _, leaf in flat))

    def flatten(self, state: Any) -> dict[str, Any]:
        """Return the leaves by path."""
        leaves = jax.tree.leaves(state)
        return {
            path: leaf if key is None else jax.random.key_data(leaf)
            for path, leaf, key in zip(self.paths, leaves, self.key_types, strict=True)
        }

    def arrange(self, leaves: Mapping[str, Any]) -> Any:
        """Return the state with these leaves, given by path."""
        ordered = [
            leaves[path] if key is None else jax.random.wrap_key_data(leaves[path], impl=key)
            for path, key in zip(self.paths, self.key_types, strict=True)
        ]
        return jax.tree.unflatten(self.structure, ordered)


def _is_name(path: str) -> bool:
    """Return whether a checkpoint can have an array of this name."""
    return path == _make_name(path) != ""


def _make_name(path: str) -> str:
    """Return a path without `..`, which would lead out of a checkpoint, and in UTF-8."""
    text = path.encode("utf-8", "backslashreplace").decode("utf-8")
    return "/".join("__" if part == ".." else part for part in text.split("/"))


def _find_key_type(leaf: Any) -> str | None:
    """Return the name of a random key's implementation; None for another leaf."""
    is_random_key = hasattr(leaf, "dtype") and is_key(leaf.dtype)
    return str(jax.random.key_impl(leaf)) if is_random_key else None


class MetricsRow(tuple[Array, ...]):
    """Metrics of a step as float32 scalars, then 1 if its loss is finite, else 0."""

    __slots__ = ()

    @property
    def should_continue(self) -> Array:
        """Whether the loop continues after this step, bool ()."""
        return self[-1] > 0

    def stack_row(self) -> Array:
        """Return the metrics as one array."""
        return jnp.stack(self)


@dataclass(frozen=True)
class UserTelemetry(Telemetry):
    """The metrics that a custom step returned, by name."""

    ends_non_finite: bool
    """Whether the loss of the last step isn't finite."""

    def join(self, later: Telemetry) -> UserTelemetry:
        """Return these steps, followed by `later`."""
        assert isinstance(later, UserTelemetry), "it continues this telemetry"
        return UserTelemetry(self.start, super().join(later).columns, later.ends_non_finite)

    @property
    def loss(self) -> np.ndarray:
        return self._column(LOSS)

    @property
    def learning_rate(self) -> np.ndarray:
        return self._column("learning_rate")

    @property
    def grad_norm(self) -> np.ndarray:
        return self._column("grad_norm")

    def _column(self, name: str) -> np.ndarray:
        """Return a metric by step; NaN if the step doesn't return it."""
        return self.columns.get(name, np.full(len(self), np.nan, np.float32))

    @cached_property
    def non_finite_step(self) -> int | None:
        """The last step, counted from 1, if its loss isn't finite."""
        return self.start + len(self) if self.ends_non_finite else None


@dataclass(frozen=True)
class UserStep:
    """A checked step, with the layouts of its state and its batch."""

    function: Step
    signature: StepSignature
    state_layout: StateLayout
    batch_spec: Any
    """A batch with `jax.ShapeDtypeStruct` as leaves."""

    def __call__(
        self, before: CustomState, batch: Batch, rates: Array
    ) -> tuple[CustomState, MetricsRow]:
        """Return the state after a step, or `before` if the loss isn't finite, and the metrics."""
        layout = self.state_layout
        argument = self.arrange_batch(batch)
        metrics, compute_state = begin_step(self.function, layout.arrange(before.state), argument)
        finite = jnp.isfinite(metrics[LOSS]) if LOSS in metrics else jnp.asarray(True)

        def update(state: CustomState) -> CustomState:
            after = compute_state(layout.arrange(state.state))
            return CustomState(state.step + 1, layout.flatten(after))

        values = [jnp.asarray(metrics[name], jnp.float32) for name in self.signature.metrics]
        row = MetricsRow((*values, finite.astype(jnp.float32)))
        return apply_if_finite(finite, update, before), row

    def arrange_batch(self, batch: Batch) -> Any:
        """Return a batch as an argument of the step function."""
        columns = [batch.columns[str(number)] for number in range(len(batch.columns))]
        return jax.tree.unflatten(jax.tree.structure(self.batch_spec), columns)


def lower_step(
    step: UserStep, state: Any, device: jax.Device, earlier: LoweringChoice | None
) -> tuple[UserStep, LoweringChoice]:
    """Return the step with the fastest lowerings of its convolutions and matrix products, and the
    choice of lowerings.

    A resumed run keeps its `earlier` choice. On devices other than CPUs, the step is unchanged.
    Raises RunError if the device can't compute the earlier choice.
    """
    has_choice = get_platform(device.platform).chooses_lowerings
    layout = "nhwc" if earlier is None else earlier.layout
    if layout != "nhwc" and not has_choice:
        raise RunError(f"the saved run has images in {layout.upper()}, which this device can't use")
    problems = _list_problems(step, state, layout)
    if earlier is None and choose_step_layout_by_rule(problems, device.platform) == "chwn":
        layout = "chwn"
        problems = _list_problems(step, state, layout)
    fixed = None if earlier is None else earlier.lowerings
    tuning = Tuning("bank", "exhaustive", find_user_cache() / "autotune", fixed)
    lowerings = choose_lowerings(problems, device, tuning, lambda _: nullcontext()).lowerings
    choice = LoweringChoice(lowerings, layout=layout)
    if not has_choice:
        return step, choice
    lowered = with_lowerings(step.function, lowerings, differentiated=True, layout=layout)
    return replace(step, function=lowered), choice


def _list_problems(step: UserStep, state: Any, layout: Layout) -> tuple[Problem, ...]:
    """Return the problems of a step's convolutions and matrix products, with images in `layout`."""
    listing = RecordingPolicy()
    traced = with_lowerings(step.function, listing, differentiated=True, layout=layout)
    jax.eval_shape(traced, state, step.batch_spec)
    return tuple(listing.problems)


def has_slow_loop(step: UserStep, state: Any, device: jax.Device) -> bool:
    """Return whether loops are slow here and a convolution of the step has no lowering."""
    if not get_platform(device.platform).has_slow_loops:
        return False
    traced = jax.make_jaxpr(step.function)(state, step.batch_spec)
    unchanged = list_unreplaced(traced, differentiated=True)
    return any(operation.is_convolution for operation in unchanged)


class SinkProgram:
    """A compiled custom step, whose `run` does many steps, with one call each if `single_steps`."""

    def __init__(
        self,
        step: UserStep,
        state: CustomState,
        loader: Loader,
        placement: DevicePlacement,
        *,
        single_steps: bool,
    ) -> None:
        self._step = step
        self.loader = loader
        self._placement = placement
        self.single_steps = single_steps
        self._window_steps = loader.get_window(int(state.step)).max_steps
        self._rates = placement.put(NO_RATES)
        self._non_finite_step: int | None = None
        self._reset()
        repeat = run_once if single_steps else jax.lax.while_loop
        inputs = loader.get_window(int(state.step)).inputs
        bound = placement.put(np.int32(0))
        carry = LoopCarry(state, *self._buffers)
        args = carry, inputs, self._rates, bound, bound, ()
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), args
        )
        spec = ProgramSpec("step", make_train_loop(step, repeat), shapes, donated=0)
        self.program, facts = compile_program(spec, lambda _: nullcontext(), placement.devices)
        """The compiled loop, as jax returns it."""
        self.report = CompileReport((facts,), single_steps)
        self.latest = state
        """The newest state, until the next dispatch."""

    def _reset(self) -> None:
        """Make new buffers of the loop: metrics of a window's steps, and whether it continues."""
        rows = np.zeros((self._window_steps, len(self._step.signature.metrics) + 1), np.float32)
        self._buffers = self._placement.put(rows), self._placement.put(np.asarray(True))

    def run(
        self, state: CustomState, start: int, stop: int, mechanism: Mechanism
    ) -> tuple[CustomState, UserTelemetry]:
        """Run steps `start + 1 .. stop`, at most up to a step whose loss isn't finite.

        Returns the state, and the telemetry of the steps that ran.
        """
        carry = LoopCarry(state, *self._buffers)
        carry, rows = run_windows(self.loader, start, stop, carry, self._run_window)
        self._buffers = carry.telemetry_buffer, carry.should_continue
        self.latest = carry.state
        is_finite = rows[:, -1] > 0
        ends_non_finite = not is_finite.all()
        if ends_non_finite:
            rows = rows[: is_finite.argmin() + 1]
            self._non_finite_step = start + len(rows)
            self._reset()
        columns = Telemetry.from_rows(start, rows[:, :-1], self._step.signature.metrics).columns
        return carry.state, UserTelemetry(start, columns, ends_non_finite)

    def _run_window(self, carry: LoopCarry, inputs: Inputs, positions: range) -> LoopCarry:
        """Run the steps at some positions of a window."""
        for begin, end in split_positions(positions, one_by_one=self.single_steps):
            carry = self.program(carry, inputs, self._rates, begin, end, ())
        return carry

    @property
    def program_text(self) -> str:
        """The loop as XLA compiled it."""
        return str(self.program.as_text())

    def read_non_finite_batch(self) -> Any:
        """Return the batch whose loss isn't finite, as an argument of the step function."""
        step = self._non_finite_step
        assert step is not None, "the newest dispatch ended with a non-finite step"
        inputs, positions = next(split_at_windows(self.loader, step - 1, step))
        return self._step.arrange_batch(read_batch(inputs, jnp.int32(positions.start)))

    def put(self, state: CustomState) -> CustomState:
        """Copy a state to the device, into new arrays."""
        return copy_state(state, self._placement)


def copy_state(state: CustomState, placement: DevicePlacement) -> CustomState:
    """Return a copy of a state on the device."""
    copied: CustomState = jax.tree.map(lambda leaf: placement.put(np.array(leaf)), state)
    return copied


def begin_step(
    function: Callable[..., Any], state: Any, batch: Any
) -> tuple[Mapping[str, Array], Callable[[Any], Any]]:
    """Compute the metrics of a step; return them, and a function that updates the state.

    The returned function takes the state before the step and returns the state after it. It
    computes the remaining equations: cheap ones, which no metric needs.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(state, batch)
    leaves, structure = jax.tree.flatten(shapes[0])
    jaxpr = closed.jaxpr
    state_atoms = jaxpr.outvars[: len(leaves)]
    metric_atoms = jaxpr.outvars[len(leaves) :]
    first_equations, update_equations = _split_equations(jaxpr, metric_atoms)
    operands = jax.tree.leaves((state, batch))
    values = bind_variables(closed, operands, lambda _, constant: constant)
    _compute_equations(first_equations, values)
    metrics = jax.tree.unflatten(
        jax.tree.structure(shapes[1]), [_read(atom, values) for atom in metric_atoms]
    )

    def compute_state(state: Any) -> Any:
        leaves = jax.tree.leaves(state)
        update_values = values | dict(zip(jaxpr.invars[: len(leaves)], leaves, strict=True))
        _compute_equations(update_equations, update_values)
        return jax.tree.unflatten(structure, [_read(atom, update_values) for atom in state_atoms])

    return metrics, compute_state


def _split_equations(
    jaxpr: Jaxpr, metric_atoms: Iterable[Any]
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Return the equations to compute first, then the equations of the update.

    The first are the costly equations, and all that they or the metrics depend on.
    """
    needed = {atom for atom in metric_atoms if not isinstance(atom, Literal)}
    first: list[JaxprEqn] = []
    update: list[JaxprEqn] = []
    for equation in reversed(jaxpr.eqns):
        if needed.isdisjoint(equation.outvars) and _is_cheap(equation):
            update.append(equation)
        else:
            first.append(equation)
            needed |= {atom for atom in equation.invars if not isinstance(atom, Literal)}
    return first[::-1], update[::-1]


def _is_cheap(equation: JaxprEqn) -> bool:
    called = find_called_jaxpr(equation)
    if called is not None:
        return all(map(_is_cheap, called.jaxpr.eqns))
    return equation.primitive.name in CHEAP


def _compute_equations(equations: Iterable[JaxprEqn], values: dict[Var, Any]) -> None:
    """Compute equations in order, and add their results to `values`."""
    for equation in equations:
        operands = [_read(atom, values) for atom in equation.invars]
        with enter_scope(join_scope(equation)), equation.ctx.manager:
            results = bind_equation(equation, operands)
        values |= dict(zip(equation.outvars, results, strict=True))


def _read(atom: Any, values: Mapping[Var, Any]) -> Any:
    return atom.val if isinstance(atom, Literal) else values[atom]
