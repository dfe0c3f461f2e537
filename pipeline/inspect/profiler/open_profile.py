"""The profile of a run, if its recipe asks for one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from pipeline.backends.base import Backend, Estimate
from pipeline.core.errors import RecipeError, first_line
from pipeline.inspect.profiler.run_profile import RunProfiler, only_profiled, require_profilable
from pipeline.stages.build import Built
from pipeline.stages.runner.context import CompiledRun, Profile, RunContext
from pipeline.training.state import TrainState


@dataclass(frozen=True)
class OpenProfile(Profile):
    """A run whose program and schedule have a profiler around them."""

    profiler: RunProfiler

    def open(self) -> AbstractContextManager[None]:
        """Watch the training in the body."""
        return self.profiler.open()

    def conclude(self, estimate: Estimate | None, state: TrainState) -> None:
        """Write the profile. A run that is more than its profile goes on without one."""
        run, context = self.run, self.run.context
        try:
            self.profiler.conclude(run.dataset, run.backend, estimate, state, context.run_dir)
        except Exception as error:  # a trace is read from what another library wrote
            if context.recipe.profile.mode == "only":
                raise
            context.reporter.warn(f"no profile: {first_line(error)}")


def shorten_to_profile(context: RunContext, built: Built, backend: Backend) -> Built:
    """Return the run, no longer than its profile takes if it has no other purpose.

    Raises RecipeError if it can't be profiled.
    """
    require_profilable(context.recipe, backend.device.platform, context.ranks.size)
    return only_profiled(built) if context.recipe.profile.mode == "only" else built


def open_profile(run: CompiledRun, total_steps: int, done: int) -> Profile:
    """Choose the steps to trace after the first `done`.

    `total_steps` is the run's length before it was shortened. Raises RecipeError if it has too few
    steps; a run that goes on with what it has done goes on without a profile then.
    """
    recipe, reporter = run.context.recipe, run.context.reporter
    schedule = replace(run.built.run_schedule, total=total_steps)
    try:
        profiler = RunProfiler(recipe, schedule, run.built, run.executable, reporter, done)
    except RecipeError as error:
        if recipe.profile.mode == "only" or not done:
            raise
        # A run that is resumed near its end was profiled before, or goes on without a profile.
        reporter.warn(error.problems[0])
        return Profile(run)
    profiled = replace(run, built=profiler.built, executable=profiler.executable)
    return OpenProfile(profiled, profiler)
