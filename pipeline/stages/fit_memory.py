"""The number of shards of a batch that are computed at once, as many as fit into `train.memory`.

The results of shards are added in a fixed order. So the memory changes the speed and no result.
A watch ends the process with a message before Linux kills it without one.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import jax
import numpy as np

from pipeline.backends.base import Backend, Executable, Mechanism, WrappedExecutable
from pipeline.backends.xla import Programs, XlaExecutable
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError, RunError, first_line
from pipeline.core.host.limits import find_usable_bytes, read_limits
from pipeline.core.host.memory import read_available_bytes, return_free_pages
from pipeline.core.host.platforms import get_platform
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.stages.build import Built
from pipeline.stages.compile import (
    CompileOptions,
    compile_programs,
    compile_to_executable,
    recompute_blocks,
)
from pipeline.stages.runner.context import BuiltRun
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.parallel.microbatches import compute_microbatch_size
from pipeline.training.state import TrainState, count_bytes
from pipeline.training.telemetry import Telemetry

PERIOD_S = 0.05
"""Time between two measurements of the available memory."""


@contextmanager
def end_without_memory(reserved_bytes: int, problem: str) -> Iterator[None]:
    """End this process if less than `reserved_bytes` are available during the body.

    The process prints `problem` and has the exit status of a failed run. It is for code that no
    exception can interrupt, such as XLA's compiler.
    """
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(PERIOD_S):
            if read_available_bytes() >= reserved_bytes:
                continue
            return_free_pages()
            if read_available_bytes() < reserved_bytes:
                _end(problem)

    thread = threading.Thread(target=watch, name="memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _end(problem: str) -> None:
    print(f"error: {problem}", file=sys.stderr, flush=True)
    os._exit(RunError.exit_status)


T = TypeVar("T")

RESERVED_BYTES = 64_000_000
"""Memory to leave free. With less free memory, half of the shards are computed at once."""
CHECK_PERIOD_S = 1.0
"""Least seconds between two measurements of the usable memory."""


def compile_to_fit(
    recipe: Recipe,
    dataset: Dataset,
    built: Built,
    backend: Backend,
    reporter: Reporter,
    figures: dict[str, Any] | None = None,
) -> Executable:
    """Compile programs. With `train.memory` they compute as many shards at once as fit into it.

    Adds the number of samples at once and its bytes to `figures`, and updates them when memory runs
    out. Raises RecipeError in several processes, and RunError if a single shard doesn't fit.
    """
    if recipe.train.memory is None:
        return compile_programs(recipe, dataset, built, backend, reporter)
    num_processes = jax.process_count()
    if num_processes > 1:
        raise RecipeError(
            f"train.memory = {recipe.train.memory}: must be null with {num_processes} "
            "processes, each of which would choose for itself"
        )
    built = begin_at_once(recipe, built, backend)
    with _watch_compiler(recipe):
        executable = compile_programs(recipe, dataset, built, backend, reporter)
    figures = {} if figures is None else figures
    fitted = FittedExecutable(recipe, built, backend, executable, reporter, figures)
    # Compiling took memory, which the heap keeps free. Measured once: later compilations reuse it.
    return_free_pages()
    at_hand_bytes = fitted.read_usable_bytes()
    while (needed_bytes := fitted.needed_bytes) + RESERVED_BYTES > at_hand_bytes:
        requirement = f"{_format(needed_bytes)} and {_format(RESERVED_BYTES)} to spare are needed"
        fitted.halve(f"{requirement}, {_format(at_hand_bytes)} are at hand")
    figures |= {
        "memory": recipe.train.memory,
        "samples_at_once": fitted.samples_at_once,
        "needed_bytes": needed_bytes,
        "at_hand_bytes": at_hand_bytes,
    }
    reporter.print_stage(
        "memory",
        f"{fitted.samples_at_once:,} samples at once: {_format(needed_bytes)} of the "
        f"{_format(at_hand_bytes)} at hand",
    )
    return fitted


def _watch_compiler(recipe: Recipe) -> AbstractContextManager[None]:
    """Return a context that ends the process if compiling takes the memory of the host."""
    return end_without_memory(
        RESERVED_BYTES,
        f"train.memory = {recipe.train.memory}: compiling takes more memory than is at hand",
    )


def begin_at_once(recipe: Recipe, built: Built, backend: Backend) -> Built:
    """Return the step with the largest number of shards at once, for a run with `train.memory`."""
    if recipe.train.memory is None:
        return built
    return replace(built, at_once=count_most_at_once(built, backend.device.platform))


def count_most_at_once(built: Built, platform: str) -> int:
    """Return the largest number of shards to compute at once, a power of two.

    On the host it is at most the number of cores. On other devices it is 1, since a single shard
    occupies the device.
    """
    shards = built.step_config.shards
    if shards is None or not get_platform(platform).is_host:
        return 1
    limit = max(1, min(shards.count, int(read_limits().cores)))
    return 1 << (limit.bit_length() - 1)


class FittedExecutable(WrappedExecutable[XlaExecutable]):
    """An executable that computes half of the shards at once when memory runs out.

    A failed call is repeated with the same state: programs don't overwrite their arguments.
    """

    def __init__(
        self,
        recipe: Recipe,
        built: Built,
        backend: Backend,
        executable: Executable,
        reporter: Reporter,
        figures: dict[str, Any],
    ) -> None:
        assert isinstance(executable, XlaExecutable), "eager mode has no shards"
        super().__init__(executable)
        self._recipe = recipe
        self._built = built
        self._backend = backend
        self._reporter = reporter
        self._figures = figures
        self._rates: np.ndarray | None = None
        self._checked_at = time.monotonic()

    @property
    def samples_at_once(self) -> int:
        """Samples that are computed at once."""
        train = self._recipe.train
        shards = self._built.step_config.shards
        count = 1 if shards is None else shards.count
        shard_size = compute_microbatch_size(train.batch_size, train.accumulate_steps, count)
        return self._built.at_once * shard_size

    @property
    def needed_bytes(self) -> int:
        """Bytes of the programs' temporaries, and of the state before and after a step."""
        state_bytes = count_bytes(self._built.state)
        return 2 * state_bytes + max(program.temporary_bytes for program in self.report.programs)

    def read_usable_bytes(self) -> int:
        """Return the bytes that the device, or this process on the host, can still use."""
        limit_bytes = self._recipe.train.memory_bytes
        placement = self._backend.placement
        free_bytes = placement.free_bytes
        if free_bytes is None:
            return find_usable_bytes(limit_bytes)
        if limit_bytes is None:
            return free_bytes
        return max(0, min(free_bytes, limit_bytes - placement.used_bytes))

    def halve(self, reason: str) -> None:
        """Compile programs of half of the shards at once. Raises RunError for a single shard."""
        samples_before = self.samples_at_once
        if self._built.at_once == 1:
            raise RunError(
                f"train.memory = {self._recipe.train.memory}: {reason}, for "
                f"{samples_before:,} samples at once, a shard of a batch; give more memory, or "
                f"start a new run with more parallel.shards than {self._recipe.parallel.shards}"
            )
        self._built = replace(self._built, at_once=self._built.at_once // 2)
        work = self._executable.work
        built = recompute_blocks(self._built) if work.recomputes else self._built
        step = built.step_on(built.step_config.shards, work.sharing)
        with _watch_compiler(self._recipe):
            executable = compile_to_executable(
                replace(work, step=step), self._recipe, self._backend, self._reporter
            )
        assert isinstance(executable, XlaExecutable)
        self._executable = executable
        if self._rates is not None:
            executable.set_learning_rates(self._rates)
        line = f"{samples_before:,} -> {self.samples_at_once:,} samples at once: {reason}"
        self._figures.setdefault("halved", []).append(line)
        figures = {"samples_at_once": self.samples_at_once, "needed_bytes": self.needed_bytes}
        self._figures |= figures
        self._reporter.print_stage("memory", line)

    @property
    def programs(self) -> Programs:
        return self._executable.programs

    def set_learning_rates(self, rates: np.ndarray) -> None:
        self._rates = rates
        super().set_learning_rates(rates)

    def run(
        self, state: TrainState, start: int, stop: int, mechanism: Mechanism
    ) -> tuple[TrainState, Telemetry]:
        """Run steps as `Executable.run` does, with fewer shards at once if memory is short."""
        if time.monotonic() - self._checked_at > CHECK_PERIOD_S:
            self._checked_at = time.monotonic()
            at_hand_bytes = self.read_usable_bytes()
            if at_hand_bytes < RESERVED_BYTES:
                return_free_pages()
                at_hand_bytes = self.read_usable_bytes()
            if at_hand_bytes < RESERVED_BYTES and self._built.at_once > 1:
                self.halve(f"step {start + 1}: {_format(at_hand_bytes)} are at hand")
        return super().run(state, start, stop, mechanism)

    def _call(self, name: str, method: Callable[[XlaExecutable], T]) -> T:
        """Call `method`, with half of the shards at once after each call that lacks memory.

        Raises RunError if memory doesn't suffice for a single shard.
        """
        while True:
            try:
                return method(self._executable)
            except MemoryError as error:
                reason = first_line(error)
            except jax.errors.JaxRuntimeError as error:
                if not str(error).startswith("RESOURCE_EXHAUSTED"):
                    raise
                reason = first_line(error)
            self.halve(f"{name}: {reason}")


def _format(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"


class MemoryLimit(RunFeature):
    """The programs of a run with `train.memory`, which fit into it."""

    def compile(self, built_run: BuiltRun, options: CompileOptions) -> Executable:
        """Compile programs of as many shards at once as fit."""
        context = built_run.context
        return compile_to_fit(
            built_run.recipe,
            built_run.dataset,
            built_run.built,
            built_run.backend,
            context.reporter,
            context.summary.memory,
        )
