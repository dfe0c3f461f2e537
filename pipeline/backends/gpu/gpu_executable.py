"""A run compiled for one GPU: dispatches that follow each other without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from pipeline.backends.base import Mechanism
from pipeline.backends.gpu.step_programs import EvalCarry, GpuPrograms, StepCarry
from pipeline.backends.xla import LoopCarry, XlaExecutable, split_at_windows
from pipeline.training.metrics import EvalSums
from pipeline.training.state import TrainState
from pipeline.training.telemetry import Telemetry


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
                bound = (last,) if steps == 0 else ()
                carry = program(carry, inputs, self.rates, *bound)
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
        """Sums over evaluation batches `start + 1 .. stop`, added to those of the batches before.

        Batches are dispatched one after the other without waiting.
        """
        sums = self.placement.put(self.work.step.zero_sums()) if before is None else before
        state = self._put_once(state)
        feed = self.work.train_sample if on_train else self.work.eval
        assert feed is not None, "the recipe asks for training samples"
        for inputs, first, count in split_at_windows(feed, start, stop):
            carry = EvalCarry(self.placement.put(np.int32(first)), sums)
            for _ in range(count):
                carry = self.programs.evaluate(carry, state, inputs)
            sums = carry.sums
        return jax.block_until_ready(sums)
