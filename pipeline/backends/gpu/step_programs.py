"""Programs of a run on one GPU, each for a number of steps that is fixed when it is compiled.

XLA's runtime for GPUs copies the condition of a loop to the host before every iteration, unless the
trip count is constant. The host would wait for the device before each step. So a sink is split: the
host dispatches a program of several steps while enough steps remain, then a program of a single
step. If `graphs` is loop, it dispatches one program for the sink. The loop of that program is a
CUDA graph, with the condition on the device.

The state stays on the device in the layouts that the compiler chooses, so that no dispatch
transposes weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding
from jax.tree_util import register_dataclass

from pipeline.backends.base import CompileInputs, ProgramReport, ProgressClock
from pipeline.backends.compile_program import ProgramSpec, compile_program
from pipeline.backends.gpu.chip_target import ChipTarget
from pipeline.backends.gpu.program_figures import compile_for_target
from pipeline.backends.initialisation import UNOPTIMIZED
from pipeline.backends.loading.window import Inputs, read_batch
from pipeline.backends.step_loops import LoopCarry, make_buffers
from pipeline.backends.xla import pad_to_block
from pipeline.models.modules.name_stack import DATA as DATA_SCOPE
from pipeline.models.modules.name_stack import UPDATE
from pipeline.training.metrics import EvalSums
from pipeline.training.state import TrainState
from pipeline.training.step import TrainStep

Graphs = Literal["auto", "off", "step", "loop"]

MAX_PROGRAM_STEPS = 64
"""Largest constant number of steps of a program."""
CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION,CONVOLUTION"
"""Operations that XLA may put into a CUDA graph: all but loops and collectives."""


def make_compiler_options(graphs: Graphs, *, deterministic: bool) -> dict[str, str | bool]:
    """Return XLA's compiler options for CUDA graphs, and for deterministic operations if
    `deterministic` is true."""
    options: dict[str, str | bool] = {}
    if graphs != "auto":
        captured = {"off": "", "step": CAPTURED, "loop": f"{CAPTURED},WHILE"}
        options["xla_gpu_enable_command_buffer"] = captured[graphs]
    if graphs in ("step", "loop"):
        options["xla_gpu_graph_min_graph_size"] = "1"
    if deterministic:
        options["xla_gpu_exclude_nondeterministic_ops"] = True
    return options


@register_dataclass
@dataclass(frozen=True)
class StepCarry:
    """Values that a training program passes to the next: the position in the window, int32, and the
    training loop's values."""

    position: Array
    loop: LoopCarry


@register_dataclass
@dataclass(frozen=True)
class EvalCarry:
    """Position in the window, int32, and the sums of an evaluation."""

    position: Array
    sums: EvalSums


@dataclass(frozen=True)
class GpuPrograms:
    """The programs of a run on one GPU, with the layouts of the state."""

    init: Callable[[Any], TrainState]
    """Initialisation, on the host's processor if JAX may use it."""
    train: Mapping[int, Callable[..., StepCarry]]
    """Training programs by their number of steps, the longest first. 0: any number of steps."""
    evaluate: Callable[..., EvalCarry]
    place: Callable[[TrainState], TrainState] | None
    """Copies a state from the default layouts to the programs' layouts. None if the layouts are
    equal, or the chip is absent."""


@dataclass(frozen=True)
class Chip:
    """The device to compile for, present or absent."""

    device: jax.Device
    host: jax.Device | None
    """The processor that initialises; None if JAX may not use it."""
    target: ChipTarget | None = None
    """The figures of an absent device; None for a present one."""

    @property
    def sharding(self) -> SingleDeviceSharding:
        return SingleDeviceSharding(self.device)

    def to_shapes(self, tree: Any) -> Any:
        """Return the shapes and dtypes of a tree's arrays, placed on the device."""
        return _place_shapes(tree, self.sharding)


INIT = "initialisation"
"""Name of the program that initialises."""


def compile_for_gpu(
    work: CompileInputs,
    chip: Chip,
    options: dict[str, str | bool],
    graphs: Graphs,
    clock: ProgressClock,
) -> tuple[GpuPrograms, tuple[ProgramReport, ...]]:
    """Compile the programs of a run, and return them with their reports.

    `work` has the step's functions, the loaders and the constants of the run. `clock` shows the
    user the time of each compilation. Raises RunError if XLA can't compile a program.
    """
    reports: list[ProgramReport] = []

    def compile_and_report(spec: ProgramSpec) -> Any:
        # If the chip is absent, initialisation is compiled for the host.
        if chip.target is None or spec.name == INIT:
            program, report = compile_program(spec, clock)
        else:
            program, report = compile_for_target(chip.target, spec, clock)
        reports.append(report)
        return program

    init = compile_and_report(_make_init_spec(work, chip, options))
    longest = min(work.dispatch_steps or MAX_PROGRAM_STEPS, MAX_PROGRAM_STEPS)
    steps = 0 if graphs == "loop" and longest > 1 else longest
    program = compile_and_report(make_train_spec(work, chip, options, steps))
    argument_formats, _ = program.input_formats
    carry_formats: StepCarry = argument_formats[0]
    formats = carry_formats.loop.state
    if formats != program.output_formats.loop.state:
        # A dispatch reads the state that the previous dispatch returned, so inputs and outputs must
        # have the same layouts.
        program = compile_and_report(make_train_spec(work, chip, options, steps, formats))
    train = {steps: program}
    if steps != 1:
        train[1] = compile_and_report(make_train_spec(work, chip, options, 1, formats))
    state = make_carry_shapes(work, chip).loop.state
    evaluate = compile_and_report(_make_eval_spec(work, chip, state, formats, options))
    return GpuPrograms(init, train, evaluate, _make_placer(chip, state, formats)), tuple(reports)


def make_train_spec(
    work: CompileInputs, chip: Chip, options: dict[str, str | bool], steps: int, formats: Any = None
) -> ProgramSpec:
    """Return the specification of a training program of `steps` steps.

    If `steps` is 0, the program's last argument is the position before which it stops. `formats`
    are the layouts of the state; None: the compiler chooses them.
    """
    carry = make_carry_shapes(work, chip)
    if formats is None:
        formats = jax.tree.map(lambda _: Format(Layout.AUTO, chip.sharding), carry.loop.state)
    # Arrays outside of the state are placed on the chip in default layouts. jax takes placements as
    # a tree of the arguments' structure, so they are in the carry's classes.
    sharding: Any = chip.sharding
    carry_formats = StepCarry(
        position=sharding,
        loop=LoopCarry(state=formats, telemetry_buffer=sharding, should_continue=sharding),
    )
    inputs = chip.to_shapes(work.train.get_window(0).inputs)
    rates = chip.to_shapes(pad_to_block(work.learning_rates))
    arguments: tuple[Any, ...] = (carry, inputs, rates)
    if steps == 0:
        arguments += (carry.position,)
    names = {0: "training loop", 1: "training step"}
    return ProgramSpec(
        names.get(steps, f"{steps} training steps"),
        _make_step_function(work.step, steps),
        arguments,
        donated=0,
        in_shardings=(carry_formats, *(sharding for _ in arguments[1:])),
        out_shardings=carry_formats,
        compiler_options=options,
    )


def make_carry_shapes(work: CompileInputs, chip: Chip) -> StepCarry:
    """Return the shapes and dtypes of a `StepCarry`, placed on the device."""
    state = jax.eval_shape(work.step.init, work.seed)
    rows, should_continue = jax.eval_shape(
        partial(make_buffers, columns=len(work.step.columns)), work.train.get_window(0).inputs
    )
    carried = LoopCarry(state, rows, should_continue)
    return StepCarry(chip.to_shapes(np.int32(0)), chip.to_shapes(carried))


def _make_step_function(step: TrainStep, steps: int) -> Callable[..., StepCarry]:
    """Return a function of `steps` steps. If `steps` is 0, the function is a loop, and its last
    argument is the position before which it stops."""

    def train_step(carry: StepCarry, inputs: Inputs, learning_rates: Array) -> StepCarry:
        """Return the carry after a step. If the run has ended, only the position changes."""
        position = carry.position
        before = carry.loop
        with jax.named_scope(DATA_SCOPE):
            batch = read_batch(inputs, position)
        state, record = step.step(before.state, batch, learning_rates)
        with jax.named_scope(UPDATE):
            proceed = before.should_continue
            rows = before.telemetry_buffer
            state = jax.tree.map(lambda new, old: jnp.where(proceed, new, old), state, before.state)
            rows = rows.at[position].set(jnp.where(proceed, record.stack_row(), rows[position]))
            after = LoopCarry(state, rows, proceed & record.should_continue)
        return StepCarry(position + 1, after)

    def train_steps(
        carry: StepCarry, inputs: Inputs, learning_rates: Array, last: Array | None = None
    ) -> StepCarry:
        def body(before: StepCarry) -> StepCarry:
            return train_step(before, inputs, learning_rates)

        if last is None:
            return jax.lax.fori_loop(0, steps, lambda _, before: body(before), carry)
        return jax.lax.while_loop(
            lambda before: (before.position < last) & before.loop.should_continue, body, carry
        )

    return train_step if steps == 1 else train_steps


def _make_init_spec(work: CompileInputs, chip: Chip, options: dict[str, str | bool]) -> ProgramSpec:
    """Return the specification of the initialisation, on the host if JAX may use it, else on the
    chip."""
    seed = _place_shapes(work.seed, SingleDeviceSharding(chip.host or chip.device))
    init_options = options if chip.host is None else UNOPTIMIZED
    return ProgramSpec(INIT, work.step.init, (seed,), compiler_options=init_options)


def _make_eval_spec(
    work: CompileInputs, chip: Chip, state: Any, formats: Any, options: dict[str, str | bool]
) -> ProgramSpec:
    """Return the specification of the evaluation of one batch. `state` are the shapes of the state,
    `formats` its layouts in training."""

    def evaluate(carry: EvalCarry, state: TrainState, inputs: Inputs) -> EvalCarry:
        batch = read_batch(inputs, carry.position)
        return EvalCarry(carry.position + 1, work.step.evaluate(state, batch, carry.sums))

    sums = chip.to_shapes(jax.eval_shape(work.step.zero_sums))
    inputs = chip.to_shapes(work.eval.get_window(0).inputs)
    return ProgramSpec(
        "evaluation",
        evaluate,
        (EvalCarry(chip.to_shapes(np.int32(0)), sums), state, inputs),
        donated=0,
        in_shardings=(chip.sharding, formats, chip.sharding),
        out_shardings=chip.sharding,
        compiler_options=options,
    )


def _make_placer(chip: Chip, state: Any, formats: Any) -> Callable[[TrainState], TrainState] | None:
    """Return `GpuPrograms.place`, from the shapes and the layouts of the state."""
    is_default = all(
        tuple(format_.layout.major_to_minor) == tuple(range(len(array.shape)))
        for format_, array in zip(jax.tree.leaves(formats), jax.tree.leaves(state), strict=True)
    )
    if is_default or chip.target is not None:
        return None
    return jax.jit(lambda state: state, out_shardings=formats)


def _place_shapes(tree: Any, sharding: SingleDeviceSharding) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype, sharding=sharding), tree
    )
