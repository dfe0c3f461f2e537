"""The XLA backend: CPUs and GPUs.

The training program is a loop over the batches of a window. Its trip count is an argument, so sinks
of any length, parts of sinks and single steps run the same machine code. One compilation is enough,
and losses are equal bit for bit for all sink sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from jax import Array
from jax.sharding import PartitionSpec, SingleDeviceSharding

from pipeline.backends.base import (
    CompileInputs,
    CompileReport,
    Estimate,
    Executable,
    Mechanism,
    ProgramReport,
    ProgressClock,
    StepToPrice,
)
from pipeline.backends.compile_program import (
    LaterProgram,
    ProgramSpec,
    compile_later,
    compile_program,
    count_temporary_bytes,
    find_cache_outcome,
    watch_compiler,
)
from pipeline.backends.initialisation import UNOPTIMIZED, compile_initialisation
from pipeline.backends.loading.loader import Loader
from pipeline.backends.loading.window import Inputs
from pipeline.backends.step_loops import (
    LoopCarry,
    make_buffers,
    make_eval_loop,
    make_train_loop,
    run_once,
    run_python_loop,
    run_windows,
    split_at_windows,
    split_positions,
)
from pipeline.core.host.array_values import allow_reads
from pipeline.core.host.jaxpr import inline_calls
from pipeline.core.host.platforms import Platform, get_platform
from pipeline.models.lowerings.problem import Problem
from pipeline.models.lowerings.tune.tuner import LoweringChoice, Tuning, choose_lowerings
from pipeline.models.modules.jit_layers import compile_layers
from pipeline.training.metrics import EvalSums
from pipeline.training.parallel.parallel_spec import DATA
from pipeline.training.parallel.ranks import is_readable
from pipeline.training.parallel.state_sharing import DevicePlacement, StateSharing
from pipeline.training.state import FLAGS, TrainState
from pipeline.training.step import TrainStep
from pipeline.training.telemetry import Telemetry

RATES_BLOCK = 1 << 14
"""The number of rows of a table of learning rates on the device is a multiple of this number."""
KEEP_RECOMPUTED: dict[str, str | bool] = {"xla_disable_hlo_passes": "cse_barrier_expander"}
"""Options for a step that recomputes activations. Without them, XLA:CPU merges the recomputed
operations with the original ones, whose results it stores."""


class XlaBackend:
    """The devices that XLA compiles a run for."""

    def __init__(
        self, placement: DevicePlacement, options: Mapping[str, str | bool] | None = None
    ) -> None:
        self.placement = placement
        self.device = placement.device
        self.options = dict(options or {})
        """Options of the compiler, for every program."""

    @property
    def platform(self) -> Platform:
        return get_platform(self.device.platform)

    def describe(self) -> Mapping[str, str]:
        count = len(self.placement.devices)
        device = self.device
        name = f"{count} x {device.platform}" if count > 1 else f"{device.platform}:{device.id}"
        return {
            "device": f"{name} {device.device_kind}",
            "jax": version("jax"),
            "jaxlib": version("jaxlib"),
        }

    def choose_mechanism(
        self, requested: Literal["auto", "loop", "soft"], *, sink: bool
    ) -> tuple[Mechanism, str]:
        if not sink:
            return "none", "sink is false: the host reads every step"
        if requested == "soft":
            return "soft", "requested: one asynchronous dispatch per step, no host read in a sink"
        return "loop", "one XLA program loops over the steps of a sink, its trip count an argument"

    def choose_lowerings(
        self, problems: Sequence[Problem], tuning: Tuning, watch: ProgressClock
    ) -> LoweringChoice:
        """Choose lowerings: on the CPU from the banks, the tuner or a rule, elsewhere XLA's."""
        return choose_lowerings(problems, self.device, tuning, watch)

    def compile(self, work: CompileInputs, watch: ProgressClock) -> Executable:
        """Compile initialisation, the training loop and the evaluation loop.

        In eager mode the three are Python functions, and the layers of `jit_layers` are compiled at
        their first call. Raises RunError if XLA refuses a program.
        """
        rates = self.placement.put(pad_to_block(work.learning_rates))
        init, train, evaluation = _make_specs(work, rates, self.placement)
        if work.eager:
            read = allow_reads(is_eager=True)
            programs = Programs(*(read(spec.function) for spec in (init, train, evaluation)))
            report = CompileReport(())
        else:
            if work.recomputes and self.platform.removes_recomputation:
                train = replace(train, compiler_options=KEEP_RECOMPUTED)
            key = work.key if self.placement.mesh is None and self.platform.keeps_programs else None
            init, train, evaluation = (
                replace(spec.with_options(self.options), key=key)
                for spec in (init, train, evaluation)
            )
            devices = self.placement.devices
            init_program, init_report = _compile_initialisation(work, init, self.placement, watch)
            train_program, train_report = compile_program(train, watch, devices)
            eval_program, eval_report = compile_later(
                evaluation, watch, devices, work.when_evaluation_compiled
            )
            programs = Programs(init_program, train_program, eval_program)
            reports = (init_report, train_report, eval_report)
            compiled = tuple(report for report in reports if report is not None)
            report = CompileReport(compiled, work.single_steps)
        inputs = work.train.get_window(0).inputs
        buffers = self.placement.put(make_buffers(inputs, len(work.step.columns)))
        return XlaExecutable(work, self.placement, report, programs, rates, buffers)

    def estimate(self, proposal: StepToPrice) -> Estimate | None:
        """Return None: the time of a step is measured, not modelled."""
        return None


class Programs(NamedTuple):
    """The compiled programs of a run; in eager mode, Python functions."""

    init: Callable[..., TrainState]
    train: Callable[..., LoopCarry]
    evaluate: Callable[..., EvalSums]


@dataclass(eq=False)
class XlaExecutable:
    """A run compiled for its devices."""

    work: CompileInputs
    placement: DevicePlacement
    report: CompileReport
    programs: Programs
    rates: Array
    """Learning rates on the device, a row for each update, padded to blocks of `RATES_BLOCK`."""
    buffers: tuple[Array, Array]
    """Telemetry buffer and `should_continue`, which each call of `programs.train` replaces."""

    @property
    def loader(self) -> Loader:
        return self.work.train

    @property
    def program_text(self) -> str:
        train: Any = self.programs.train
        return "" if self.work.eager else train.as_text()

    def init(self) -> TrainState:
        return self.programs.init(self.placement.put(self.work.seed))

    def put(self, state: TrainState) -> TrainState:
        """Copy a state to the device, array by array."""
        shardings = _find_state_shardings(self.work, state, self.placement)
        if shardings is None:
            return jax.tree.map(lambda array: self.placement.put(np.asarray(array)), state)
        host = jax.tree.map(lambda array: np.array(array) if is_readable(array) else array, state)
        return self.placement.put(host, shardings)

    def set_learning_rates(self, rates: np.ndarray) -> None:
        self.rates = self.placement.put(pad_to_block(rates))

    def run(
        self, state: TrainState, start: int, stop: int, mechanism: Mechanism
    ) -> tuple[TrainState, Telemetry]:
        begin = LoopCarry(self._place_state(state), *self.buffers)
        run_window = partial(self._run_window, mechanism)
        carry, rows = run_windows(self.work.train, start, stop, begin, run_window)
        overlaps = self.work.evaluates and not get_platform(self.placement.device.platform).is_host
        if isinstance(self.programs.evaluate, LaterProgram) and overlaps:
            # A thread of the host compiles the evaluation while the device trains. If the host
            # trained, this would slow the steps.
            self.programs.evaluate.begin()
        return carry.state, self._read_telemetry(start, carry, rows)

    def _place_state(self, state: TrainState) -> TrainState:
        """Return the state on the device, as it is. A subclass may have to copy it there."""
        return state

    def _run_window(
        self, mechanism: Mechanism, carry: LoopCarry, inputs: Inputs, positions: range
    ) -> LoopCarry:
        """Run the steps at consecutive positions of a window, in one dispatch or one for each."""
        for begin, end in split_positions(
            positions, one_by_one=self.work.single_steps or mechanism != "loop"
        ):
            carry = self.programs.train(carry, inputs, self.rates, begin, end, self.work.constants)
        return carry

    def _read_telemetry(self, start: int, carry: LoopCarry, rows: np.ndarray) -> Telemetry:
        """Return the telemetry of the steps that ran, and store the buffers for the next call."""
        self.buffers = carry.telemetry_buffer, carry.should_continue
        telemetry = Telemetry.from_rows(start, rows, self.work.step.columns, FLAGS)
        if telemetry.non_finite_step is None:
            return telemetry
        # Set `should_continue` again, since a measurement of speed goes on after such a step.
        inputs = self.work.train.get_window(start).inputs
        self.buffers = self.placement.put(make_buffers(inputs, len(self.work.step.columns)))
        return telemetry.take_first(telemetry.non_finite_step - start)

    def evaluate(
        self,
        state: TrainState,
        start: int,
        stop: int,
        before: EvalSums | None = None,
        *,
        on_train: bool = False,
    ) -> EvalSums:
        """Add the batches to `before` one by one, so that windows don't change the bits."""
        sums = self.placement.put(self.work.step.zero_sums()) if before is None else before
        state = self._place_state(state)
        loader = self.work.train_sample if on_train else self.work.eval
        assert loader is not None, "the recipe asks for training samples"
        for inputs, positions in split_at_windows(loader, start, stop):
            sums = self._evaluate_window(state, sums, inputs, positions)
        return jax.block_until_ready(sums)

    def _evaluate_window(
        self, state: TrainState, sums: EvalSums, inputs: Inputs, positions: range
    ) -> EvalSums:
        """Add the batches at consecutive positions of a window to sums."""
        for begin, end in split_positions(positions, one_by_one=self.work.single_steps):
            sums = self.programs.evaluate(state, sums, inputs, begin, end, self.work.constants)
        return sums


def _make_specs(
    work: CompileInputs, rates: Array, placement: DevicePlacement
) -> tuple[ProgramSpec, ProgramSpec, ProgramSpec]:
    """Return initialisation, training loop and evaluation loop, in the order of `Programs`."""
    step = work.step
    seed = placement.put(work.seed)
    train_inputs = work.train.get_window(0).inputs
    eval_inputs = work.eval.get_window(0).inputs
    state = jax.eval_shape(step.init, seed) if work.state is None else work.state
    rules = work.sharding_rules
    sharing = work.sharing
    shardings = _find_state_shardings(work, state, placement)
    state = placement.make_shapes(state, shardings)
    make_carried = partial(make_buffers, columns=len(step.columns))
    carry = LoopCarry(state, *placement.make_shapes(jax.eval_shape(make_carried, train_inputs)))
    sums = placement.make_shapes(jax.eval_shape(step.zero_sums))
    position, constants = placement.make_shapes((np.int32(0), work.constants))
    step = _intercept_layers(work, placement)
    repeat = _choose_repeat(work)
    init: Callable[..., Any] = step.init
    training: Callable[..., Any] = make_train_loop(step.step, repeat)
    evaluation: Callable[..., Any] = make_eval_loop(step, repeat)
    result_shardings: tuple[Any, Any, Any] = (None, None, None)
    init_options: dict[str, str | bool] | None = None
    # How XLA rewrites divisions and sums depends on how often a value is read. Before that, it
    # merges equal operations, but only in a program for several devices. Here all programs merge
    # them.
    merges = work.equal_on_devices and not work.eager
    if rules is not None:
        # XLA divides the global batch among the devices.
        replicated: Any = placement.replicated
        result_shardings = (shardings, LoopCarry(shardings, replicated, replicated), replicated)
    else:
        # Every device runs the programs on its rows of a batch.
        replicated = PartitionSpec()
        state_parts: Any = replicated
        if sharing is not None:
            state_parts = sharing.specs
            init, evaluation = _share_state(sharing, init, evaluation)
        init = _map_over_mesh(init, placement, (replicated,), state_parts)
        if merges:
            training, evaluation = map(inline_calls, (training, evaluation))
        range_and_constants = [replicated] * 3
        carry_parts = LoopCarry(state_parts, replicated, replicated)
        inputs_parts = _partition_window(train_inputs)
        train_parts = (carry_parts, inputs_parts, replicated, *range_and_constants)
        training = _map_over_mesh(training, placement, train_parts, carry_parts)
        eval_parts = (state_parts, replicated, _partition_window(eval_inputs), *range_and_constants)
        evaluation = _map_over_mesh(evaluation, placement, eval_parts, replicated)
        if get_platform(placement.device.platform).optimizes_slowly:
            init_options = UNOPTIMIZED
    carry_index, sums_index = (None, None) if work.keeps_arguments else (0, 1)
    train_args = (carry, train_inputs, rates, position, position, constants)
    eval_args = (state, sums, eval_inputs, position, position, constants)
    init_sharding, train_sharding, eval_sharding = result_shardings
    init_spec = ProgramSpec("initialisation", init, (seed,), None, init_sharding, init_options)
    make_spec = partial(ProgramSpec, merges_operations=merges)
    train_spec = make_spec("training step", training, train_args, carry_index, train_sharding)
    eval_spec = make_spec("evaluation", evaluation, eval_args, sums_index, eval_sharding)
    return init_spec, train_spec, eval_spec


def _intercept_layers(work: CompileInputs, placement: DevicePlacement) -> TrainStep:
    """Return the step with its layers' outputs sharded by rules, or single layers compiled."""
    if work.sharding_rules is not None:
        return _intercept_step(work.step, work.sharding_rules.constrain(placement))
    if work.jit_layers:
        return _intercept_step(work.step, compile_layers(work.jit_layers))
    return work.step


def _choose_repeat(work: CompileInputs) -> Callable[..., Any]:
    """Return the loop over steps: XLA's, Python's in eager mode, or none for single steps."""
    if work.single_steps:
        return run_once
    return run_python_loop if work.eager else jax.lax.while_loop


def _intercept_step(step: TrainStep, interceptor: Callable[..., Any]) -> TrainStep:
    """Return the step with `interceptor` called in place of methods of the network's modules."""
    intercept = nn.intercept_methods(interceptor)
    return replace(step, step=intercept(step.step), evaluate=intercept(step.evaluate))


def _find_state_shardings(
    work: CompileInputs, state: TrainState, placement: DevicePlacement
) -> Any:
    """Return the sharding of each array of a state; None if every device has the whole state."""
    if work.sharding_rules is not None:
        return work.sharding_rules.make_state_shardings(state, placement)
    if work.sharing is not None:
        return jax.tree.map(placement.make_sharding, work.sharing.specs)
    return None


def _share_state(
    sharing: StateSharing, init: Callable[..., Any], evaluate: Callable[..., EvalSums]
) -> tuple[Callable[..., Any], Callable[..., EvalSums]]:
    """Return an initialisation that returns the device's part of a shared state, and an evaluation
    that gathers the weights first."""

    def gather_and_evaluate(state: TrainState, *arguments: Any) -> EvalSums:
        return evaluate(sharing.gather_weights(state, sharing.sharded_features), *arguments)

    return lambda seed: sharing.take_parts(init(seed)), gather_and_evaluate


def _map_over_mesh(
    function: Callable[..., Any],
    placement: DevicePlacement,
    partition: tuple[Any, ...],
    results: Any,
) -> Callable[..., Any]:
    """Return a function that every device of a mesh runs on its part of each argument."""
    if placement.mesh is None:
        return function
    return jax.shard_map(
        function, mesh=placement.mesh, in_specs=partition, out_specs=results, check_vma=False
    )


def _partition_window(inputs: Inputs) -> Any:
    """Return the partition of a window: a device has its rows of batches, or a whole split."""
    replicated: Any = PartitionSpec()
    rows: Any = PartitionSpec(None, DATA)
    columns = dict.fromkeys(inputs.columns, replicated if inputs.resident else rows)
    return Inputs(
        columns, rows, replicated, replicated, replicated, inputs.resident, inputs.samples
    )


def pad_to_block(rates: np.ndarray) -> np.ndarray:
    """Repeat the last row until the block is full, so that runs of most lengths share a program."""
    num_missing = -len(rates) % RATES_BLOCK
    return np.concatenate([rates, np.repeat(rates[-1:], num_missing, axis=0)])


def _compile_initialisation(
    work: CompileInputs, spec: ProgramSpec, placement: DevicePlacement, watch: ProgressClock
) -> tuple[Any, ProgramReport]:
    """Compile initialisation, as small programs if XLA optimizes slowly and no rules shard it."""
    optimizes_slowly = get_platform(placement.device.platform).optimizes_slowly
    if work.sharding_rules is not None or not optimizes_slowly:
        return compile_program(spec, watch, placement.devices)
    temporary_bytes = [0]

    def compile_(function: Callable[..., Any], args: Any, options: Any) -> Any:
        program = jax.jit(function).lower(*args).compile(compiler_options=options)
        temporary_bytes.append(count_temporary_bytes(program))
        return program

    def compile_on_one(function: Callable[..., Any], args: Any, options: Any) -> Any:
        sharding = SingleDeviceSharding(placement.device)
        shapes = [jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=sharding) for arg in args]
        return compile_(function, shapes, options)

    def compile_on_all(function: Callable[..., Any]) -> Any:
        mapped = _map_over_mesh(function, placement, (PartitionSpec(),), PartitionSpec())
        return compile_(mapped, spec.args, spec.compiler_options)

    started_at = time.perf_counter()
    shardings = None
    if work.sharing is not None:
        shardings = jax.tree.leaves(jax.tree.map(placement.make_sharding, work.sharing.specs))
    with watch_compiler(spec.name, watch) as events:
        init = compile_initialisation(
            work.step.init, work.seed, placement, compile_on_one, compile_on_all, shardings
        )
    seconds = time.perf_counter() - started_at
    cache = find_cache_outcome(events)
    return init, ProgramReport(spec.name, seconds, cache, max(temporary_bytes), flops=None)
