"""One contestant of a comparison: a process of its own that trains a round whenever it is told to.

A process each keeps the threads, environment and flags of one framework away from the others. It
lives from start to end of the comparison, so that every round runs warm, and it blocks on its pipe
while others have theirs.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from benchmarks.child import child_process
from benchmarks.tasks import Task
from pipeline.core.host.cuda import PLATFORMS_VARIABLE, make_memory_share
from pipeline.core.host.process_start import SETTINGS

PROOF_STEPS = 3
"""Steps whose losses are compared: the third depends on gradients, momentum and weight decay."""

GPU_SHARES = 3
"""Contestants of JAX that share a GPU's memory; PyTorch takes what it needs."""
GROWTH = 8
"""How many times longer than the stretch before a stretch of the warm-up is at most."""


@dataclass(frozen=True)
class Result:
    """What a stretch of training gave: the mean of its losses.

    `part_s` are the seconds of it that a contestant shows apart (ours: of the dispatches).
    """

    loss: float
    part_s: float | None = None


class Training(Protocol):
    """A network that is being trained, compiled by the first steps that it runs."""

    sizes: tuple[int, ...]
    """How many numbers each trainable parameter has, in ascending order."""

    def run(self, steps: int) -> Result:
        """Train so many steps more; returns when the device has done them all."""


@dataclass(frozen=True)
class Ready:
    """A contestant that has warmed up."""

    sizes: tuple[int, ...]
    proof: tuple[float, ...]
    """Losses of the first steps."""
    steps: int
    """Steps of the first round."""
    start_s: float
    """Seconds from the start of the process until here: imports, compilation, warm-up."""


@dataclass(frozen=True)
class Round:
    """One round."""

    seconds: float
    steps: int
    result: Result

    @property
    def step_ms(self) -> float:
        """Milliseconds a step."""
        return 1e3 * self.seconds / self.steps


@dataclass(frozen=True)
class Failed:
    """A contestant that could not do it, and why in one line."""

    reason: str


class ContestantError(Exception):
    """A contestant failed; the text says how."""


class Contestant:
    """The parent's end of a contestant's process."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe

    def ask(self, request: str) -> Any:
        """Send a request and wait for the answer. Raises ContestantError."""
        try:
            self._pipe.send(request)
            answer = self._pipe.recv()
        except (EOFError, BrokenPipeError):
            self._process.join()
            code = self._process.exitcode
            raise ContestantError(f"its process ended with exit code {code}") from None
        if isinstance(answer, Failed):
            raise ContestantError(answer.reason)
        return answer

    def warm_up(self) -> Ready:
        """Compile, run the first steps, and settle how long a round is."""
        return self.ask("warm up")

    def run(self) -> Round:
        """Run a round."""
        return self.ask("round")


@contextmanager
def started(module: str, task: Task, round_s: float) -> Iterator[Contestant]:
    """The contestant that `module.enter(task)` makes, in a process that ends with the context.

    A round lasts about `round_s` seconds.
    """
    environment = environment_of(module, on_gpu=task.on_gpu)
    child = child_process(_serve, module, task, round_s, daemon=True, environment=environment)
    with child as (process, pipe):
        yield Contestant(process, pipe)


def environment_of(module: str, *, on_gpu: bool) -> dict[str, str]:
    """Variables of a contestant's process; what is set in the shell, all contestants have.

    On the CPU ours begins as `python -m pipeline` does, and JAX leaves GPUs to others. On a GPU
    all contestants live side by side, and none may take most of its memory.
    """
    if on_gpu:
        return make_memory_share(GPU_SHARES)
    settings = SETTINGS if module == "benchmarks.ours" else {}
    return {**settings, PLATFORMS_VARIABLE: "cpu"}


def _serve(pipe: Connection, module: str, task: Task, round_s: float) -> None:
    """The child's end: answer requests until the pipe is closed."""
    # Some frameworks print while they load; what counts comes through the pipe.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    started_at = time.perf_counter()
    training: Training | None = None
    steps = 0
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            if request == "warm up":
                training = importlib.import_module(module).enter(task)
                proof = tuple(training.run(1).loss for _ in range(PROOF_STEPS))
                steps = _settled(training, round_s, task.sink_size)
                answer: Any = Ready(training.sizes, proof, steps, time.perf_counter() - started_at)
            else:
                assert training is not None
                # Others had caches and memory meanwhile: the first step is slower for everybody.
                training.run(1)
                answer = _round(training, steps)
                # A warm-up that something else disturbed must not decide all rounds.
                steps = _fitting(answer, round_s, task.sink_size)
        except Exception as error:
            lines = str(error).strip().splitlines()
            answer = Failed(f"{type(error).__name__}: {lines[0] if lines else ''}")
        pipe.send(answer)


def _settled(training: Training, round_s: float, sink_size: int) -> int:
    """Steps a round, judged by ever longer stretches: the first ones may still be warming up."""
    took = _round(training, 1)
    while True:
        fitting = _fitting(took, round_s, sink_size)
        if took.seconds >= round_s / 2 or fitting <= took.steps:
            return fitting
        took = _round(training, min(fitting, GROWTH * took.steps))


def _fitting(took: Round, round_s: float, sink_size: int) -> int:
    """Steps that last about `round_s` seconds; whole sinks, where one of them is not longer."""
    steps = math.ceil(round_s * took.steps / took.seconds)
    sinks = round(steps / sink_size)
    return sinks * sink_size if sinks else steps


def _round(training: Training, steps: int) -> Round:
    started_at = time.perf_counter()
    result = training.run(steps)
    return Round(time.perf_counter() - started_at, steps, result)
