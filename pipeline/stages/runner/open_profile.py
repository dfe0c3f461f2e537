"""The profile of a run, where its recipe asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.backends.base import Backend, Estimate, Executable
from pipeline.core.errors import RecipeError, first_line
from pipeline.data.dataset import Dataset
from pipeline.stages.build import Built
from pipeline.stages.runner.context import RunContext
from pipeline.training.state import TrainState

if TYPE_CHECKING:
    from pipeline.inspect.profiler.run_profile import RunProfiler


@dataclass(frozen=True)
class OpenProfile:
    """A run's program and schedule, with a profiler around them where the recipe has one."""

    context: RunContext
    built: Built
    executable: Executable
    profiler: RunProfiler | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watch the training in the body."""
        if self.profiler is None:
            yield
            return
        with self.profiler.open():
            yield

    def conclude(
        self, dataset: Dataset, backend: Backend, estimate: Estimate | None, state: TrainState
    ) -> None:
        """Write the profile. A run that is more than its profile goes on without one."""
        if self.profiler is None:
            return
        context = self.context
        about = dataset, backend, estimate, state, context.run_dir
        try:
            self.profiler.conclude(*about)
        except Exception as error:  # a trace is read from what another library wrote
            if context.recipe.profile.mode == "only":
                raise
            context.reporter.warn(f"no profile: {first_line(error)}")


def to_profile(context: RunContext, built: Built, backend: Backend) -> Built:
    """Return the run, no longer than its profile takes where it has no other purpose.

    Raises RecipeError where it can't be profiled.
    """
    # Few runs need the profiler, and all would wait for its import.
    from pipeline.inspect.profiler.run_profile import only_profiled, require_profilable

    require_profilable(context.recipe, backend.device.platform, context.ranks.size)
    return only_profiled(built) if context.recipe.profile.mode == "only" else built


def open_profile(
    context: RunContext, whole: Built, built: Built, executable: Executable, done: int
) -> OpenProfile:
    """Choose the steps to trace after the first `done`; without a profile, nothing changes.

    `whole` is the run before it was shortened. Raises RecipeError where it has too few steps; one
    that goes on with what it has done goes on without a profile then.
    """
    recipe = context.recipe
    if recipe.profile.mode == "off" or "train" not in recipe.stages:
        return OpenProfile(context, built, executable)
    from pipeline.inspect.profiler.run_profile import RunProfiler

    try:
        profiler = RunProfiler(recipe, whole, built, executable, context.reporter, done)
    except RecipeError as error:
        if recipe.profile.mode == "only" or not done:
            raise
        # A run that is resumed near its end was profiled before, or goes on without a profile.
        context.reporter.warn(error.problems[0])
        return OpenProfile(context, built, executable)
    return OpenProfile(context, profiler.built, profiler.executable, profiler)
