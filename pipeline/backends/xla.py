"""CPU and GPU through XLA.

One program trains: a loop over the batches of a window with a *dynamic* trip count. Sinks of any
length, chunks of sinks and single steps are the same machine code, which is what makes losses
equal bit for bit whatever the sink size, and costs one compilation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import SingleDeviceSharding
from jax.tree_util import register_dataclass

from pipeline.backends.base import (
    CompileInputs,
    CompileReport,
    Executable,
    Mechanism,
    Program,
    ProgressClock,
    StepToPrice,
)
from pipeline.data.feed.feed import Feed
from pipeline.data.feed.window import Inputs, batch_at
from pipeline.errors import RunError
from pipeline.files.compile_cache import no_compile_cache
from pipeline.lowerings.formulas.onednn import CALLS
from pipeline.lowerings.problem.lowering import Problem
from pipeline.lowerings.tune.tuner import LoweringChoice, Tuning, choose_lowerings
from pipeline.sink.telemetry import Telemetry
from pipeline.training.metrics import EvalSums
from pipeline.training.state import Record, TrainState
from pipeline.training.step import TrainStep

RATES_BLOCK = 1 << 14

Repeat = Callable[[Callable[[Any], Array], Callable[[Any], Any], Any], Any]
"""(condition, body, start) -> what is left when the condition no longer holds."""


@register_dataclass
@dataclass(frozen=True)
class LoopCarry:
    """What the training loop carries: the state, a row per step, and whether no step ended it."""

    state: TrainState
    rows: Array
    should_continue: Array


def find_device(platform: Literal["cpu", "gpu"], index: int) -> jax.Device:
    """A device by platform and number. Raises RunError that names the devices there are."""
    try:
        return jax.devices(platform)[index]
    except (RuntimeError, IndexError):
        there = ", ".join(sorted({f"{d.platform}:{d.id}" for d in jax.devices()}))
        hint = "; install the `gpu` extra, pip install '.[gpu]'" if platform == "gpu" else ""
        raise RunError(f"device {platform}:{index}: JAX sees {there} only{hint}") from None


class XlaBackend:
    """One device that XLA compiles for."""

    def __init__(self, device: jax.Device) -> None:
        self.device = device

    def describe(self) -> Mapping[str, str]:
        """The device and the versions that decide its numbers."""
        import jaxlib

        return {
            "device": f"{self.device.platform}:{self.device.id} {self.device.device_kind}",
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
        }

    def mechanism(
        self, asked: Literal["auto", "loop", "soft"], *, sink: bool
    ) -> tuple[Mechanism, str]:
        """A sink runs as one loop unless asked otherwise."""
        if not sink:
            return "none", "sink is false: the host reads every step"
        if asked == "soft":
            return "soft", "asked for: one asynchronous dispatch per step, no host read in a sink"
        return "loop", "one XLA program loops over the steps of a sink, its trip count an argument"

    def choose_lowerings(
        self, problems: Sequence[Problem], tuning: Tuning, watch: ProgressClock
    ) -> LoweringChoice:
        """From the banks, the tuner or a rule on the CPU; elsewhere XLA's own are the best."""
        return choose_lowerings(problems, self.device, tuning, watch)

    def compile(self, work: CompileInputs, watch: ProgressClock) -> Executable:
        """Compile initialisation, the training loop and the evaluation loop."""
        return XlaExecutable(work, self.device, watch)

    def estimate(self, proposal: StepToPrice) -> None:
        """Nothing: what a step costs here is measured."""


@dataclass(frozen=True)
class _ProgramSpec:
    """A program to compile; `donated` is the argument whose memory it may reuse."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: int | None = None
    compiler_options: dict[str, str | bool] | None = None


class XlaExecutable:
    """A run compiled for one device."""

    def __init__(self, work: CompileInputs, device: jax.Device, watch: ProgressClock) -> None:
        self._work, self._device = work, device
        self.feed = work.train
        self._rates = self._on_device(_in_blocks(work.learning_rates))
        sources = self._sources()
        if work.eager:
            self._init, self._train, self._evaluate = (source.function for source in sources)
            self.report = CompileReport(())
        else:
            made = [_compile(source, watch) for source in sources]
            self._init, self._train, self._evaluate = (program for program, _ in made)
            self.report = CompileReport(tuple(facts for _, facts in made))
        self._buffers = self._on_device(_empty_buffers(work.train.window(0).inputs))

    @property
    def program_text(self) -> str:
        """The training loop as XLA compiled it; empty where operations run by themselves."""
        train: Any = self._train
        return "" if self._work.eager else train.as_text()

    def _sources(self) -> tuple[_ProgramSpec, _ProgramSpec, _ProgramSpec]:
        step, seed = self._work.step, self._on_device(self._work.seed)
        train, evaluated = self._work.train.window(0).inputs, self._work.eval.window(0).inputs
        state = self._shapes(jax.eval_shape(step.init, seed))
        progress = LoopCarry(state, *self._shapes(jax.eval_shape(_empty_buffers, train)))
        sums = self._shapes(jax.eval_shape(step.zero_sums))
        bound = self._shapes(np.int32(0))
        train_args = (progress, train, self._rates, bound, bound)
        eval_args = (state, sums, evaluated, bound, bound)
        repeat = _python_loop if self._work.eager else jax.lax.while_loop
        # Runs once: on the CPU, optimising it takes several times as long as it saves.
        quick: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
        options = quick if self._device.platform == "cpu" else None
        return (
            _ProgramSpec("initialisation", step.init, (seed,), compiler_options=options),
            _ProgramSpec("training step", _train_loop(step, repeat), train_args, donated=0),
            _ProgramSpec("evaluation", _eval_loop(step, repeat), eval_args, donated=1),
        )

    def _on_device(self, tree: Any) -> Any:
        return jax.device_put(tree, self._device)

    def _shapes(self, tree: Any) -> Any:
        place = SingleDeviceSharding(self._device)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)

    def init(self) -> TrainState:
        """The state at step 0, drawn from the seed."""
        return self._init(self._on_device(self._work.seed))

    def put(self, state: TrainState) -> TrainState:
        """A copy of a state on the device."""
        return jax.tree.map(lambda x: jax.device_put(np.array(x), self._device), state)

    def run(
        self, state: TrainState, start: int, stop: int, mechanism: Mechanism
    ) -> tuple[TrainState, Telemetry]:
        """Run steps `start + 1 .. stop`, window by window; `soft` dispatches them one by one."""
        progress = LoopCarry(state, *self._buffers)
        rows = []
        for inputs, first, count in _split_at_windows(self._work.train, start, stop):
            stride = count if mechanism == "loop" else 1
            for position in range(first, first + count, stride):
                span = np.int32(position), np.int32(position + stride)
                progress = self._train(progress, inputs, self._rates, *span)
            # Copied at once: on the CPU this is a view of a buffer that the next call is given.
            rows.append(np.asarray(progress.rows)[first : first + count].copy())
        self._buffers = progress.rows, progress.should_continue
        telemetry = _until_bad(Telemetry.from_rows(start, np.concatenate(rows)))
        if telemetry.bad_step is not None:
            # Else no later call would run a step: steps that were only timed may diverge.
            self._buffers = self._on_device(_empty_buffers(self._work.train.window(start).inputs))
        return progress.state, telemetry

    def evaluate(
        self, state: TrainState, start: int, stop: int, before: EvalSums | None = None
    ) -> EvalSums:
        """Sums over evaluation batches `start + 1 .. stop`, added to those of the batches before.

        However the batches are cut, they are added in their order by the same program.
        """
        sums = self._on_device(self._work.step.zero_sums()) if before is None else before
        for inputs, first, count in _split_at_windows(self._work.eval, start, stop):
            span = np.int32(first), np.int32(first + count)
            sums = self._evaluate(state, sums, inputs, *span)
        return jax.block_until_ready(sums)


def _in_blocks(rates: np.ndarray) -> np.ndarray:
    """The table, its end repeated up to a full block: runs of most lengths share a program."""
    return np.pad(rates, (0, -len(rates) % RATES_BLOCK), mode="edge")


def _empty_buffers(inputs: Inputs) -> tuple[Array, Array]:
    """A row of telemetry for every step of a window, and "nothing has ended it so far"."""
    rows = jnp.zeros((inputs.indices.shape[0], len(Record._fields)), jnp.float32)
    return rows, jnp.asarray(True)


def _until_bad(telemetry: Telemetry) -> Telemetry:
    """Without the rows after the step that ended the loop: they did not run."""
    if telemetry.bad_step is None:
        return telemetry
    ran = telemetry.bad_step - telemetry.start
    columns = (getattr(telemetry, name)[:ran] for name in Record._fields)
    return Telemetry(telemetry.start, *columns)


def _split_at_windows(feed: Feed, start: int, stop: int) -> Iterator[tuple[Inputs, int, int]]:
    """Cut steps `start + 1 .. stop` at the ends of windows: inputs, first position, count."""
    while start < stop:
        window = feed.window(start)
        end = min(stop, window.stop)
        yield window.inputs, start - window.start, end - start
        start = end


def _python_loop(unfinished: Callable[[Any], Array], body: Callable[[Any], Any], carry: Any) -> Any:
    """What `jax.lax.while_loop` does, not compiled."""
    while unfinished(carry):
        carry = body(carry)
    return carry


def _train_loop(step: TrainStep, repeat: Repeat) -> Callable[..., LoopCarry]:
    """Steps at positions first .. last - 1 of a window; stops behind one that ends the run."""

    def loop(
        progress: LoopCarry, inputs: Inputs, learning_rates: Array, first: Array, last: Array
    ) -> LoopCarry:
        def unfinished(carry: tuple[Array, LoopCarry]) -> Array:
            return (carry[0] < last) & carry[1].should_continue

        def body(carry: tuple[Array, LoopCarry]) -> tuple[Array, LoopCarry]:
            position, before = carry
            state, record = step.step(before.state, batch_at(inputs, position), learning_rates)
            rows = before.rows.at[position].set(jnp.stack(record))
            return position + 1, LoopCarry(state, rows, record.should_continue)

        return repeat(unfinished, body, (first, progress))[1]

    return loop


def _eval_loop(step: TrainStep, repeat: Repeat) -> Callable[..., EvalSums]:
    def loop(
        state: TrainState, sums: EvalSums, inputs: Inputs, first: Array, last: Array
    ) -> EvalSums:
        def unfinished(carry: tuple[Array, EvalSums]) -> Array:
            return carry[0] < last

        def body(carry: tuple[Array, EvalSums]) -> tuple[Array, EvalSums]:
            position, before = carry
            return position + 1, step.evaluate(state, batch_at(inputs, position), before)

        return repeat(unfinished, body, (first, sums))[1]

    return loop


def _compile(source: _ProgramSpec, watch: ProgressClock) -> tuple[Any, Program]:
    """Compile ahead of time. Raises RunError with XLA's first line where it refuses."""
    begun = time.perf_counter()
    with watch(source.name), _cache_events() as events:
        try:
            lowered = jax.jit(source.function, donate_argnums=source.donated).lower(*source.args)
            keep = CALLS not in lowered.as_text()
            with nullcontext() if keep else no_compile_cache():
                compiled = lowered.compile(compiler_options=source.compiler_options)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RunError(f"compiling {source.name}: {reason}") from error
    seconds = time.perf_counter() - begun
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    return compiled, Program(
        name=source.name,
        compile_s=seconds,
        cache=_cache_outcome(events) if keep else "off",
        temporary_bytes=int(memory.temp_size_in_bytes) if memory is not None else 0,
        # XLA does not look into the calls of another library.
        flops=cost.get("flops") if cost and keep else None,
    )


@contextmanager
def _cache_events() -> Iterator[list[str]]:
    events: list[str] = []

    def listen(event: str, **_: object) -> None:
        events.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_listener(listen)


def _cache_outcome(events: list[str]) -> Literal["hit", "miss", "off"]:
    if "/jax/compilation_cache/cache_hits" in events:
        return "hit"
    return "miss" if "/jax/compilation_cache/cache_misses" in events else "off"
