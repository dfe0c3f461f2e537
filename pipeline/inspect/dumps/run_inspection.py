"""Inspection of a run by its recipe: profile, dumps, autopsy of a non-finite step.

Their modules are imported at the first use, since few runs need them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.backends.base import Backend
from pipeline.checkpoint.autopsy_archive import set_aside_autopsy
from pipeline.engine.hooks import examine_nothing
from pipeline.engine.non_finite_step import Examination
from pipeline.stages.build import Built
from pipeline.stages.runner.context import (
    CompiledRun,
    Dumps,
    Examine,
    Inspection,
    Profile,
    RunContext,
)
from pipeline.training.state import TrainState


@dataclass(frozen=True)
class RunInspection(Inspection):
    """Inspection of runs from the command line and from Python."""

    def shorten(self, context: RunContext, built: Built, backend: Backend) -> Built:
        if context.recipe.profile.mode == "off":
            return built
        from pipeline.inspect.profiler.run_profile import shorten_to_profile

        return shorten_to_profile(context, built, backend)

    def open_profile(self, run: CompiledRun, total_steps: int, done: int) -> Profile:
        recipe = run.context.recipe
        if recipe.profile.mode == "off" or "train" not in recipe.stages:
            return Profile(run)
        from pipeline.inspect.profiler.run_profile import open_profile

        return open_profile(run, total_steps, done)

    def open_dumps(self, run: CompiledRun) -> Dumps | None:
        """Return the dumps of a run; None if it has several processes or no dumps."""
        context = run.context
        steps = context.recipe.dump.steps
        if steps is None:
            return None
        if context.ranks.size > 1:
            text = "ignored with several processes; the command dump writes one from a checkpoint"
            context.reporter.warn(f"dump.steps = {steps}: {text}")
            return None
        from pipeline.inspect.dumps.dump_step import RunDumps

        dumps = RunDumps(run)
        dumps.require_possible()
        return dumps

    def open_autopsy(self, run: CompiledRun) -> Examine:
        """Return the function that examines a non-finite step.

        In private runs it does nothing, since it would write samples.
        """
        if run.built.privacy is not None:
            return examine_nothing

        def examine(state: TrainState, step: int) -> Examination:
            from pipeline.inspect.autopsy.on_failure import examine_non_finite_step

            return examine_non_finite_step(run, state, step)

        return examine

    def archive(self, run_dir: Path) -> Path | None:
        return set_aside_autopsy(run_dir)
