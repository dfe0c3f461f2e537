"""Autopsy of a run's non-finite step. Its modules are imported when a step isn't finite."""

from __future__ import annotations

from pipeline.checkpoint.checkpoint_folder import set_aside_autopsy
from pipeline.engine.history import Examination
from pipeline.stages.runner.context import CompiledRun, RunContext
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.state import TrainState


class RunAutopsy(RunFeature):
    """The autopsy of a non-finite step that ends a run."""

    def advance(self, context: RunContext) -> None:
        """Set aside the autopsy of the earlier run."""
        folder = set_aside_autopsy(context.run_dir)
        if folder is not None:
            context.reporter.print_stage("autopsy", f"the earlier autopsy is in {folder}")

    def examine(self, run: CompiledRun, state: TrainState, step: int) -> Examination | None:
        """Examine a step, unless the run is private: that would write samples."""
        if run.built.privacy is not None:
            return None
        from pipeline.inspect.autopsy.on_failure import examine_non_finite_step

        return examine_non_finite_step(run, state, step)
