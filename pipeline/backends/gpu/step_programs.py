"""Programs of a run on one GPU: steps in numbers that are fixed when they are compiled.

XLA's runtime for GPUs copies the condition of a loop to the host before every iteration, unless it
knows how often the loop runs: it would wait for the device before each step. So a sink is made of
a program of some steps, whose number is known, and one of a single step without a loop; or, where
`graphs` is loop, of one whose loop is a CUDA graph, which looks at its condition on the device.

The state stays on the device in the layouts that the compiler prefers, so that no dispatch turns
its weights over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from pipeline.backends.feed.window import Inputs, batch_at
from pipeline.backends.xla import (
    LoopCarry,
    empty_buffers,
    in_blocks,
)
from pipeline.models.modules.name_stack import DATA as DATA_SCOPE
from pipeline.models.modules.name_stack import UPDATE
from pipeline.training.metrics import EvalSums
from pipeline.training.state import TrainState
from pipeline.training.step import TrainStep

Graphs = Literal["auto", "off", "step", "loop"]

LOOP_STEPS = 64
"""The most steps of a program with a loop. A dispatch then costs the host as much as 1/64 of one
for each step, and at most 63 steps of a sink are dispatched by themselves."""
CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION,CONVOLUTION"
"""Operations that XLA may put into a CUDA graph: all that it knows but loops and collectives."""


def compiler_options(graphs: Graphs, *, deterministic: bool) -> dict[str, str | bool]:
    """Return the options of XLA's compiler for CUDA graphs and for operations with fixed bits."""
    buffers = {
        "auto": {},
        "off": {"xla_gpu_enable_command_buffer": ""},
        "step": {
            "xla_gpu_enable_command_buffer": CAPTURED,
            "xla_gpu_graph_min_graph_size": "1",
        },
        "loop": {
            "xla_gpu_enable_command_buffer": f"{CAPTURED},WHILE",
            "xla_gpu_graph_min_graph_size": "1",
        },
    }
    exact = {"xla_gpu_exclude_nondeterministic_ops": True} if deterministic else {}
    return {**buffers[graphs], **exact}


@register_dataclass
@dataclass(frozen=True)
class StepCarry:
    """Values that a program passes on to the next: the position in the window, int32, and those of
    the training loop. A dispatch then needs nothing from the host."""

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
    """On the host's processor where that can be had."""
    train: Mapping[int, Callable[..., StepCarry]]
    """By number of steps, the longest first; 0 is one of any number."""
    evaluate: Callable[..., EvalCarry]
    place: Callable[[TrainState], TrainState] | None
    """Turns a state of the default layouts into that of the programs; None where they agree."""


@dataclass(frozen=True)
class Chip:
    """The device to compile for: one that is there, or the platform of one that is not."""

    device: jax.Device
    host: jax.Device | None
    """The processor that initialises; None where JAX may not use it."""
    platforms: tuple[str, ...] | None = None

    @property
    def whole(self) -> SingleDeviceSharding:
        """Sharding of arrays on the device."""
        return SingleDeviceSharding(self.device)

    def shapes(self, tree: Any) -> Any:
        """Shapes and dtypes of a tree on the device."""
        return _shapes(tree, self.whole)


INIT = "initialisation"
Compile = Callable[[ProgramSpec, ProgressClock], tuple[Any, ProgramReport]]


def compile_for_gpu(
    work: CompileInputs,
    chip: Chip,
    options: dict[str, str | bool],
    graphs: Graphs,
    watch: ProgressClock,
    compile_one: Compile = compile_program,
) -> tuple[GpuPrograms, tuple[ProgramReport, ...]]:
    """Compile the programs of a run. Raises RunError where XLA refuses one."""
    reports: list[ProgramReport] = []

    def compiled(spec: ProgramSpec) -> Any:
        # Initialisation is of the host, which is there.
        platforms = None if spec.name == INIT else chip.platforms
        program, report = compile_one(replace(spec, platforms=platforms), watch)
        reports.append(report)
        return program

    init = compiled(_init_spec(work, chip, options))
    first, *others = _lengths(work.dispatch_steps, graphs)
    program = compiled(train_spec(work, chip, options, first))
    formats, after = program.input_formats[0][0].loop.state, program.output_formats.loop.state
    if formats != after:
        # Else a dispatch could not pass its state to the next one.
        program = compiled(train_spec(work, chip, options, first, formats))
    train = {first: program}
    for steps in others:
        train[steps] = compiled(train_spec(work, chip, options, steps, formats))
    state = carry_shapes(work, chip).loop.state
    evaluate = compiled(_eval_spec(work, chip, state, formats, options))
    return GpuPrograms(init, train, evaluate, _placing(chip, state, formats)), tuple(reports)


def train_spec(
    work: CompileInputs,
    chip: Chip,
    options: dict[str, str | bool],
    steps: int,
    formats: Any = None,
) -> ProgramSpec:
    """Return the program of some training steps; 0: of those before a position that it is given.

    `formats` are the layouts of the state, None those that the compiler chooses.
    """
    carry = carry_shapes(work, chip)
    if formats is None:
        formats = jax.tree.map(lambda _: Format(Layout.AUTO, chip.whole), carry.loop.state)
    whole: Any = chip.whole
    lie = StepCarry(whole, LoopCarry(formats, whole, whole))
    inputs = chip.shapes(work.train.window(0).inputs)
    rates = chip.shapes(in_blocks(work.learning_rates))
    bounds = (carry.position,) if steps == 0 else ()
    return ProgramSpec(
        _name_of(steps),
        _step_function(work.step, steps),
        (carry, inputs, rates, *bounds),
        donated=0,
        in_shardings=(lie, *[whole] * (2 + len(bounds))),
        out_shardings=lie,
        compiler_options=options,
    )


def carry_shapes(work: CompileInputs, chip: Chip) -> StepCarry:
    """Return the shapes of what a training program is given and returns."""
    state = jax.eval_shape(work.step.init, _seed_shape(work))
    buffers = jax.eval_shape(empty_buffers, work.train.window(0).inputs)
    return StepCarry(chip.shapes(np.int32(0)), LoopCarry(chip.shapes(state), *chip.shapes(buffers)))


def _lengths(dispatch_steps: int | None, graphs: Graphs) -> tuple[int, ...]:
    """Return the numbers of steps of the programs: the longest first, a single step last."""
    longest = LOOP_STEPS if dispatch_steps is None else min(dispatch_steps, LOOP_STEPS)
    if longest == 1:
        return (1,)
    return (0, 1) if graphs == "loop" else (longest, 1)


def _name_of(steps: int) -> str:
    if steps == 0:
        return "training loop"
    return "training step" if steps == 1 else f"{steps} training steps"


def _step_function(step: TrainStep, steps: int) -> Callable[..., StepCarry]:
    """Return the function of some steps; 0: of those before a position that it is given."""

    def train_step(carry: StepCarry, inputs: Inputs, learning_rates: Array) -> StepCarry:
        return _advanced(step, carry, inputs, learning_rates)

    def train_steps(carry: StepCarry, inputs: Inputs, learning_rates: Array) -> StepCarry:
        def body(_: int, before: StepCarry) -> StepCarry:
            return _advanced(step, before, inputs, learning_rates)

        return jax.lax.fori_loop(0, steps, body, carry)

    def train_loop(
        carry: StepCarry, inputs: Inputs, learning_rates: Array, last: Array
    ) -> StepCarry:
        def unfinished(before: StepCarry) -> Array:
            return (before.position < last) & before.loop.should_continue

        def body(before: StepCarry) -> StepCarry:
            return _advanced(step, before, inputs, learning_rates)

        return jax.lax.while_loop(unfinished, body, carry)

    if steps == 0:
        return train_loop
    return train_step if steps == 1 else train_steps


def _advanced(
    step: TrainStep, carry: StepCarry, inputs: Inputs, learning_rates: Array
) -> StepCarry:
    """Return the values after a step; after one that has ended the run they stay as they are."""
    position, before = carry.position, carry.loop
    with jax.named_scope(DATA_SCOPE):
        batch = batch_at(inputs, position)
    state, record = step.step(before.state, batch, learning_rates)
    with jax.named_scope(UPDATE):
        runs, rows = before.should_continue, before.telemetry_buffer
        kept = jax.tree.map(lambda new, old: jnp.where(runs, new, old), state, before.state)
        row = jnp.where(runs, jnp.stack(record), rows[position])
        rows = rows.at[position].set(row)
        after = LoopCarry(kept, rows, runs & record.should_continue)
    return StepCarry(position + 1, after)


def _init_spec(work: CompileInputs, chip: Chip, options: dict[str, str | bool]) -> ProgramSpec:
    """Initialisation, on the host: it runs once, and gives every device the same weights."""
    if chip.host is None:
        seed = chip.shapes(_seed_shape(work))
        return ProgramSpec(INIT, work.step.init, (seed,), compiler_options=options)
    seed = _shapes(_seed_shape(work), SingleDeviceSharding(chip.host))
    quick: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
    return ProgramSpec(INIT, work.step.init, (seed,), compiler_options=quick)


def _eval_spec(
    work: CompileInputs,
    chip: Chip,
    state: Any,
    formats: Any,
    options: dict[str, str | bool],
) -> ProgramSpec:
    """One batch of an evaluation, without a loop; the state lies as training leaves it."""

    def evaluate(carry: EvalCarry, state: TrainState, inputs: Inputs) -> EvalCarry:
        batch = batch_at(inputs, carry.position)
        return EvalCarry(carry.position + 1, work.step.evaluate(state, batch, carry.sums))

    sums = chip.shapes(jax.eval_shape(work.step.zero_sums))
    inputs = chip.shapes(work.eval.window(0).inputs)
    return ProgramSpec(
        "evaluation",
        evaluate,
        (EvalCarry(chip.shapes(np.int32(0)), sums), state, inputs),
        donated=0,
        in_shardings=(chip.whole, formats, chip.whole),
        out_shardings=chip.whole,
        compiler_options=options,
    )


def _placing(chip: Chip, state: Any, formats: Any) -> Callable[[TrainState], TrainState] | None:
    """Return the function that lays a state out as the programs have it; None where it is so."""
    plain = all(
        tuple(one.layout.major_to_minor) == tuple(range(len(array.shape)))
        for one, array in zip(jax.tree.leaves(formats), jax.tree.leaves(state), strict=True)
    )
    if plain or chip.platforms is not None:
        return None
    placed: Callable[[TrainState], TrainState] = jax.jit(lambda whole: whole, out_shardings=formats)
    return placed


def _seed_shape(work: CompileInputs) -> Any:
    return jax.ShapeDtypeStruct(work.seed.shape, work.seed.dtype)


def _shapes(tree: Any, sharding: SingleDeviceSharding) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype, sharding=sharding), tree
    )
