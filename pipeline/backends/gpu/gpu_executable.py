"""A run compiled for one GPU: dispatches that follow each other without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np
from jax import Array

from pipeline.backends.base import CompileInputs, CompileReport, Mechanism
from pipeline.backends.feed.feed import Feed
from pipeline.backends.gpu.step_programs import EvalCarry, GpuPrograms, StepCarry
from pipeline.backends.xla import (
    LoopCarry,
    empty_buffers,
    in_blocks,
    split_at_windows,
    until_bad,
)
from pipeline.training.metrics import EvalSums
from pipeline.training.parallel.placement import DevicePlacement
from pipeline.training.state import TrainState
from pipeline.training.telemetry import Telemetry


@dataclass(eq=False)
class GpuExecutable:
    """A run compiled for one GPU. `GpuBackend.compile` builds it."""

    work: CompileInputs
    placement: DevicePlacement
    report: CompileReport
    programs: GpuPrograms
    rates: Array
    """Learning rates on the device, a row for each step, in blocks."""
    buffers: tuple[Array, Array]
    """Telemetry buffer and `should_continue` for the next program, which consumes them."""

    @property
    def feed(self) -> Feed:
        """The source of the batches that are trained on."""
        return self.work.train

    @property
    def program_text(self) -> str:
        """The longest training program as XLA compiled it."""
        program = next(iter(self.programs.train.values()))
        text: str = program.as_text()  # type: ignore[attr-defined]
        return text

    def init(self) -> TrainState:
        """The state at step 0, drawn from the seed by the host's processor, where it still lies:
        `put` copies it to the GPU, or else `run` does, once."""
        return self.programs.init(self.work.seed)

    def put(self, state: TrainState) -> TrainState:
        """A copy of a state on the device, in the layouts of the programs."""
        # Copied first: a state of the host's processor may share its memory with the caller.
        whole: TrainState = self.placement.put(jax.tree.map(np.array, state))
        return whole if self.programs.place is None else self.programs.place(whole)

    def _placed(self, state: TrainState) -> TrainState:
        there = state.step.devices() == {self.placement.device}
        return state if there else self.put(state)

    def set_learning_rates(self, rates: np.ndarray) -> None:
        """Replace the learning rates, which are an argument of the programs."""
        self.rates = self.placement.put(in_blocks(rates))

    def run(
        self, state: TrainState, start: int, stop: int, mechanism: Mechanism
    ) -> tuple[TrainState, Telemetry]:
        """Run steps `start + 1 .. stop`, window by window; only a loop takes several at once.

        The host reads nothing before the last step of a window has been dispatched.
        """
        loop, rows = LoopCarry(self._placed(state), *self.buffers), []
        for inputs, first, count in split_at_windows(self.work.train, start, stop):
            carry = StepCarry(self.placement.put(np.int32(first)), loop)
            last = self.placement.put(np.int32(first + count))
            for steps in self._dispatches(count, mechanism):
                program = self.programs.train[steps]
                bounds = (last,) if steps == 0 else ()
                carry = program(carry, inputs, self.rates, *bounds)
            loop = carry.loop
            # Copied at once, since the next program consumes the buffer.
            rows.append(np.array(loop.telemetry_buffer)[first : first + count])
        self.buffers = loop.telemetry_buffer, loop.should_continue
        telemetry = until_bad(Telemetry.from_rows(start, np.concatenate(rows)))
        if telemetry.bad_step is not None:
            # Reset, or no later step would change the state: steps that were only timed may
            # diverge.
            empty = empty_buffers(self.work.train.window(start).inputs)
            self.buffers = self.placement.put(empty)
        return loop.state, telemetry

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
        """Sums over evaluation batches `start + 1 .. stop`, added to those of the batches before.

        Batches are dispatched one after the other without waiting.
        """
        sums = self.placement.put(self.work.step.zero_sums()) if before is None else before
        state = self._placed(state)
        feed = self.work.train_sample if on_train else self.work.eval
        assert feed is not None, "the recipe asks for training samples"
        for inputs, first, count in split_at_windows(feed, start, stop):
            carry = EvalCarry(self.placement.put(np.int32(first)), sums)
            for _ in range(count):
                carry = self.programs.evaluate(carry, state, inputs)
            sums = carry.sums
        return jax.block_until_ready(sums)
