"""NVIDIA GPUs as a backend, and a chip that is not there, for which programs are compiled alone."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NoReturn

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
from pipeline.backends.gpu.program_figures import make_compiler
from pipeline.backends.gpu.step_programs import (
    Chip,
    EvalCarry,
    GpuPrograms,
    Graphs,
    StepCarry,
    compile_for_gpu,
    compiler_options,
)
from pipeline.backends.xla import (
    LoopCarry,
    XlaBackend,
    XlaExecutable,
    make_buffers,
    pad_to_block,
    split_at_windows,
)
from pipeline.core.errors import RunError, first_line
from pipeline.core.host.cuda import cuda_versions, plugin
from pipeline.core.host.platforms import CPU
from pipeline.models.lowerings.problem.lowering import Problem
from pipeline.models.lowerings.tune.tuner import LoweringChoice, Tuning
from pipeline.training.metrics import EvalSums
from pipeline.training.parallel.placement import DevicePlacement
from pipeline.training.state import TrainState
from pipeline.training.telemetry import Telemetry

INITIALIZERS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
"""The variable with which JAX's plug-in for CUDA does not look for cuDNN and a driver."""

LOOPS: Mapping[Graphs, str] = {
    "loop": "one CUDA graph loops over the steps of a sink, and ends on the device",
    "step": "programs of a fixed number of steps, each step one CUDA graph",
}
LOOP = "programs of a fixed number of steps, so that the device never waits for the host"
SOFT = "requested: one asynchronous dispatch per step, by a program without a loop"


@dataclass(eq=False)
class GpuExecutable(XlaExecutable):
    """A run compiled for one GPU. `GpuBackend.compile` builds it."""

    programs: GpuPrograms  # type: ignore[assignment]

    @property
    def program_text(self) -> str:
        """The longest training program as XLA compiled it."""
        program = next(iter(self.programs.train.values()))
        text: str = program.as_text()  # type: ignore[attr-defined]
        return text

    def init(self) -> TrainState:
        """The state at step 0 in the memory of the host, which draws it; `run` copies it once."""
        return self.programs.init(self.work.seed)

    def put(self, state: TrainState) -> TrainState:
        """A copy of a state on the device, in the layouts of the programs."""
        # Copied first: a state of the host's processor may share its memory with the caller.
        copied: TrainState = self.placement.put(jax.tree.map(np.array, state))
        return copied if self.programs.place is None else self.programs.place(copied)

    def _put_once(self, state: TrainState) -> TrainState:
        on_device = state.step.devices() == {self.placement.device}
        return state if on_device else self.put(state)

    def run(
        self, state: TrainState, start: int, stop: int, mechanism: Mechanism
    ) -> tuple[TrainState, Telemetry]:
        """Run steps `start + 1 .. stop`, window by window; only a loop takes several at once.

        The host reads nothing before the last step of a window has been dispatched.
        """
        loop = LoopCarry(self._put_once(state), *self.buffers)
        rows = []
        for inputs, first, count in split_at_windows(self.work.train, start, stop):
            carry = StepCarry(self.placement.put(np.int32(first)), loop)
            last = self.placement.put(np.int32(first + count))
            for steps in self._dispatches(count, mechanism):
                program = self.programs.train[steps]
                if steps == 0:
                    carry = program(carry, inputs, self.rates, last)
                else:
                    carry = program(carry, inputs, self.rates)
            loop = carry.loop
            # Copied at once, since the next program consumes the buffer.
            rows.append(np.array(loop.telemetry_buffer)[first : first + count])
        return loop.state, self._read_telemetry(start, loop, rows)

    def _dispatches(self, count: int, mechanism: Mechanism) -> Iterator[int]:
        """Yield the numbers of steps of the programs that run `count` steps, the longest first; 0
        stands for all of them."""
        for steps in self.programs.train if mechanism == "loop" else (1,):
            if steps == 0:
                if count > 1:
                    yield 0
                    return
                continue
            yield from [steps] * (count // steps)
            count %= steps

    def evaluate(
        self,
        state: TrainState,
        start: int,
        stop: int,
        before: EvalSums | None = None,
        *,
        on_train: bool = False,
    ) -> EvalSums:
        """Sums over evaluation batches `start + 1 .. stop`, added to `before`.

        Batches are dispatched one after the other without waiting.
        """
        sums = self.placement.put(self.work.step.zero_sums()) if before is None else before
        state = self._put_once(state)
        loader = self.work.train_sample if on_train else self.work.eval
        assert loader is not None, "the recipe asks for training samples"
        for inputs, first, count in split_at_windows(loader, start, stop):
            carry = EvalCarry(self.placement.put(np.int32(first)), sums)
            for _ in range(count):
                carry = self.programs.evaluate(carry, state, inputs)
            sums = carry.sums
        return jax.block_until_ready(sums)


class GpuBackend(XlaBackend):
    """One GPU or several. Several run the programs of other devices, with the options of a GPU."""

    def __init__(
        self, placement: DevicePlacement, graphs: Graphs = "auto", *, deterministic: bool = True
    ) -> None:
        super().__init__(placement, compiler_options(graphs, deterministic=deterministic))
        self.graphs = graphs

    def describe(self) -> Mapping[str, str]:
        """Return the device, and the versions of JAX, the driver, CUDA and cuDNN."""
        return {**super().describe(), **cuda_versions()}

    def mechanism(
        self, requested: Literal["auto", "loop", "soft"], *, sink: bool
    ) -> tuple[Mechanism, str]:
        """A sink runs as programs of several steps unless requested otherwise."""
        mechanism, why = super().mechanism(requested, sink=sink)
        if len(self.placement.devices) > 1 or mechanism == "none":
            return mechanism, why
        return mechanism, SOFT if mechanism == "soft" else LOOPS.get(self.graphs, LOOP)

    def compile(self, work: CompileInputs, watch: ProgressClock) -> Executable:
        """Compile initialisation, steps and evaluation. Raises RunError where XLA refuses one."""
        if len(self.placement.devices) > 1 or work.eager or work.sharding_rules is not None:
            return super().compile(work, watch)
        chip = Chip(self.device, _host())
        programs, reports = compile_for_gpu(work, chip, self.options, self.graphs, watch)
        rates = self.placement.put(pad_to_block(work.learning_rates))
        buffers = self.placement.put(make_buffers(work.train.window(0).inputs))
        report = CompileReport(reports)
        return GpuExecutable(work, self.placement, report, programs, rates, buffers)


class AbsentGpuBackend(XlaBackend):
    """A chip that is described and not there: programs are compiled for it, and none can run.

    The host's processor has the data.
    """

    def __init__(
        self, target: ChipTarget, host: DevicePlacement, graphs: Graphs, *, deterministic: bool
    ) -> None:
        super().__init__(host, compiler_options(graphs, deterministic=deterministic))
        self.target = target
        self.graphs = graphs
        self.device = _open_absent_chip(target)

    def describe(self) -> Mapping[str, str]:
        """Return the chip, that it is not there, and the versions of JAX."""
        name = f"{self.target.chip}, which is described and not there"
        return {**super().describe(), "device": name}

    def mechanism(
        self, requested: Literal["auto", "loop", "soft"], *, sink: bool
    ) -> tuple[Mechanism, str]:
        """Nothing runs, by whatever mechanism."""
        return "none", f"{self.target.chip} is not there"

    def choose_lowerings(
        self, problems: Sequence[Problem], tuning: Tuning, watch: ProgressClock
    ) -> LoweringChoice:
        """XLA's: others are for CPUs alone."""
        return LoweringChoice()

    def compile(self, work: CompileInputs, watch: ProgressClock) -> Executable:
        """Compile as for a chip that is there, and count what it would launch.

        Raises RunError where XLA refuses a program.
        """
        chip = Chip(self.device, self.placement.device, ("cuda",))
        compile_one = make_compiler(self.target)
        _, reports = compile_for_gpu(work, chip, self.options, self.graphs, watch, compile_one)
        return CompiledOnly(work, CompileReport(reports))


class CompiledOnly:
    """Programs of a chip that is not there: their report, and nothing that could run."""

    def __init__(self, work: CompileInputs, report: CompileReport) -> None:
        self.report = report
        self.loader = work.train
        self.program_text = ""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("the recipe's rules refuse stages that would run these programs")

    init = put = set_learning_rates = run = evaluate = _refuse


def _host() -> jax.Device | None:
    """The host's processor; None if JAX may not use it, as with JAX_PLATFORMS=cuda."""
    try:
        return jax.local_devices(backend=CPU.name)[0]
    except RuntimeError:
        return None


def _open_absent_chip(target: ChipTarget) -> jax.Device:
    """Return the device that programs are compiled for.

    Raises RunError if the compiler for GPUs is not installed, or refuses the description.
    """
    if plugin() is None:
        raise RunError(
            "device.target: JAX's compiler for GPUs is missing; install the `gpu-compile` extra, "
            "pip install '.[gpu-compile]'"
        )
    with _skip_driver():
        try:
            return _describe(target)
        except NotImplementedError:
            # The plug-in was loaded before, without the variable, and found no driver.
            for name in INITIALIZERS:
                try:
                    importlib.import_module(name).initialize()
                    break
                except ImportError:
                    continue
            return _describe(target)


def _describe(target: ChipTarget) -> jax.Device:
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target.to_text(), topology="1x1x1"
        )
    except jax.errors.JaxRuntimeError as error:
        raise RunError(f"device.target: XLA refuses {target.chip}: {first_line(error)}") from error
    device: jax.Device = topology.devices[0]
    return device


@contextmanager
def _skip_driver() -> Iterator[None]:
    before = os.environ.get(_SKIP_CHECK)
    os.environ[_SKIP_CHECK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SKIP_CHECK]
        else:
            os.environ[_SKIP_CHECK] = before
