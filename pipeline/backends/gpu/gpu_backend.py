"""Backends for NVIDIA GPUs, and for an absent chip whose programs are compiled and can't run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import jax
import numpy as np
from jax.experimental import topologies

from pipeline.backends.base import (
    CompileInputs,
    CompileReport,
    Executable,
    Mechanism,
    ProgressClock,
)
from pipeline.backends.gpu.chip_target import ChipTarget
from pipeline.backends.gpu.step_programs import (
    Chip,
    EvalCarry,
    GpuPrograms,
    Graphs,
    StepCarry,
    compile_for_gpu,
    make_compiler_options,
)
from pipeline.backends.loading.window import Inputs
from pipeline.backends.step_loops import LoopCarry, make_buffers
from pipeline.backends.xla import XlaBackend, XlaExecutable, pad_to_block
from pipeline.core.errors import RunError, first_line
from pipeline.core.host.cuda import find_plugin, read_cuda_versions
from pipeline.core.host.platforms import CPU
from pipeline.models.lowerings.problem import Problem
from pipeline.models.lowerings.tune.tuner import LoweringChoice, Tuning
from pipeline.training.metrics import EvalSums
from pipeline.training.parallel.state_sharing import DevicePlacement
from pipeline.training.state import TrainState

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
"""JAX's plug-ins for CUDA; the first that is installed is loaded."""
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
"""Environment variable that keeps JAX's plug-in for CUDA from checking cuDNN and the driver."""
LOOP_REASONS: Mapping[Graphs, str] = {
    "loop": "one CUDA graph loops over the steps of a sink, and ends on the device",
    "step": "programs of a fixed number of steps, each step one CUDA graph",
}
LOOP_REASON = "programs of a fixed number of steps, so that the device never waits for the host"
"""Reason for a loop with other values of `graphs`."""
SOFT_REASON = "requested: one asynchronous dispatch per step, by a program without a loop"


@dataclass(eq=False)
class GpuExecutable(XlaExecutable):
    """A run compiled for one GPU."""

    programs: GpuPrograms  # type: ignore[assignment]

    @property
    def program_text(self) -> str:
        """The longest training program as optimized HLO."""
        program: Any = next(iter(self.programs.train.values()))
        return program.as_text()

    def init(self) -> TrainState:
        """Return the state at step 0, in the host's memory if JAX may use the host."""
        return self.programs.init(self.work.seed)

    def put(self, state: TrainState) -> TrainState:
        """Copy a state to the device, in the layouts of the programs."""
        # Copied first, since `placement.put` may share memory, and programs overwrite the state's.
        copied: TrainState = self.placement.put(jax.tree.map(np.array, state))
        return copied if self.programs.place is None else self.programs.place(copied)

    def _place_state(self, state: TrainState) -> TrainState:
        """Return a state on the device, copied if it is in the host's memory."""
        return state if state.step.devices() == {self.placement.device} else self.put(state)

    def _run_window(
        self, mechanism: Mechanism, carry: LoopCarry, inputs: Inputs, positions: range
    ) -> LoopCarry:
        """Dispatch the steps of a window without waiting for them."""
        step_carry = StepCarry(self.placement.put(np.int32(positions.start)), carry)
        last = self.placement.put(np.int32(positions.stop))
        for steps in self._split_steps(len(positions), mechanism):
            program = self.programs.train[steps]
            if steps == 0:
                step_carry = program(step_carry, inputs, self.rates, last)
            else:
                step_carry = program(step_carry, inputs, self.rates)
        return step_carry.loop

    def _split_steps(self, count: int, mechanism: Mechanism) -> Iterator[int]:
        """Yield keys of `GpuPrograms.train` whose programs together run `count` steps."""
        lengths = tuple(self.programs.train) if mechanism == "loop" else (1,)
        if 0 in lengths and count > 1:
            yield 0  # A program of any number of steps.
            return
        for steps in lengths:
            if steps > 0:
                yield from [steps] * (count // steps)
                count %= steps

    def _evaluate_window(
        self, state: TrainState, sums: EvalSums, inputs: Inputs, positions: range
    ) -> EvalSums:
        """Add the batches of a window, which are dispatched without waiting."""
        carry = EvalCarry(self.placement.put(np.int32(positions.start)), sums)
        for _ in positions:
            carry = self.programs.evaluate(carry, state, inputs)
        return carry.sums


class GpuBackend(XlaBackend):
    """One or several GPUs. Several run the programs of XlaBackend, with options for GPUs."""

    def __init__(
        self, placement: DevicePlacement, graphs: Graphs = "auto", *, deterministic: bool = True
    ) -> None:
        super().__init__(placement, make_compiler_options(graphs, deterministic=deterministic))
        self.graphs = graphs

    def describe(self) -> Mapping[str, str]:
        return {**super().describe(), **read_cuda_versions()}

    def choose_mechanism(
        self, requested: Literal["auto", "loop", "soft"], *, sink: bool
    ) -> tuple[Mechanism, str]:
        """Return the mechanism of steps, and a reason that depends on `graphs` on one GPU."""
        mechanism, reason = super().choose_mechanism(requested, sink=sink)
        if len(self.placement.devices) > 1 or mechanism == "none":
            return mechanism, reason
        loop_reason = LOOP_REASONS.get(self.graphs, LOOP_REASON)
        return mechanism, SOFT_REASON if mechanism == "soft" else loop_reason

    def compile(self, work: CompileInputs, watch: ProgressClock) -> Executable:
        # `compile_for_gpu` doesn't shard or run eagerly, and its programs donate the state.
        if (
            len(self.placement.devices) > 1
            or work.eager
            or work.keeps_arguments
            or work.sharding_rules is not None
        ):
            return super().compile(work, watch)
        chip = Chip(self.device, _find_host())
        programs, reports = compile_for_gpu(work, chip, self.options, self.graphs, watch)
        rates = self.placement.put(pad_to_block(work.learning_rates))
        inputs = work.train.get_window(0).inputs
        buffers = self.placement.put(make_buffers(inputs, len(work.step.columns)))
        return GpuExecutable(work, self.placement, CompileReport(reports), programs, rates, buffers)


class AbsentGpuBackend(XlaBackend):
    """An absent chip, for which programs are compiled that can't run. Data is on the host."""

    def __init__(
        self, target: ChipTarget, host: DevicePlacement, graphs: Graphs, *, deterministic: bool
    ) -> None:
        super().__init__(host, make_compiler_options(graphs, deterministic=deterministic))
        self.target = target
        self.graphs = graphs
        self.device = _open_absent_chip(target)

    def describe(self) -> Mapping[str, str]:
        name = f"{self.target.chip}, which is described and not there"
        return {**super().describe(), "device": name}

    def choose_mechanism(
        self, requested: Literal["auto", "loop", "soft"], *, sink: bool
    ) -> tuple[Mechanism, str]:
        return "none", f"{self.target.chip} is not there"

    def choose_lowerings(
        self, problems: Sequence[Problem], tuning: Tuning, watch: ProgressClock
    ) -> LoweringChoice:
        """Return XLA's lowerings: other lowerings are only for CPUs."""
        return LoweringChoice()

    def compile(self, work: CompileInputs, watch: ProgressClock) -> Executable:
        """Compile as for a present chip, and report figures. Raises RunError if XLA refuses."""
        chip = Chip(self.device, self.placement.device, self.target)
        _, reports = compile_for_gpu(work, chip, self.options, self.graphs, watch)
        return CompiledOnly(work, CompileReport(reports))


class CompiledOnly:
    """An executable that has a report on programs for an absent chip, and can't run."""

    def __init__(self, work: CompileInputs, report: CompileReport) -> None:
        self.report = report
        self.loader = work.train
        self.program_text = ""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("the recipe's rules refuse stages that would run these programs")

    init = put = set_learning_rates = run = evaluate = _refuse


def _find_host() -> jax.Device | None:
    """Return the host's processor; None if JAX may not use it, as with JAX_PLATFORMS=cuda."""
    try:
        return jax.local_devices(backend=CPU.name)[0]
    except RuntimeError:
        return None


def _open_absent_chip(target: ChipTarget) -> jax.Device:
    """Return the absent device. Raises RunError if JAX's compiler is missing or refuses."""
    if find_plugin() is None:
        raise RunError(
            "device.target: JAX's compiler for GPUs is missing; install the `gpu-compile` extra, "
            "pip install 'recipe-pipeline[gpu-compile]'"
        )
    with _skip_driver():
        try:
            return _describe_topology(target)
        except NotImplementedError:
            # The plug-in was loaded earlier, without the variable, and found no driver.
            for name in PLUGINS:
                with suppress(ImportError):
                    importlib.import_module(name).initialize()
                    break
            return _describe_topology(target)


def _describe_topology(target: ChipTarget) -> jax.Device:
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target.to_text(), topology="1x1x1"
        )
    except jax.errors.JaxRuntimeError as error:
        raise RunError(f"device.target: XLA refuses {target.chip}: {first_line(error)}") from error
    return topology.devices[0]


@contextmanager
def _skip_driver() -> Iterator[None]:
    """Set the environment variable during the body."""
    before = os.environ.get(_SKIP_CHECK)
    os.environ[_SKIP_CHECK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SKIP_CHECK]
        else:
            os.environ[_SKIP_CHECK] = before
