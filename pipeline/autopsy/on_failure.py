"""The autopsy of a run that a bad step ended: replay, finding, files."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.autopsy.examine import examine
from pipeline.autopsy.finding import Autopsy
from pipeline.autopsy.reproducer import write_reproducer
from pipeline.backends.base import Executable
from pipeline.data.batch import Batch
from pipeline.data.feed.feed import Feed
from pipeline.data.feed.window import batch_at
from pipeline.files.atomic_write import write_whole
from pipeline.files.strict_json import json_text
from pipeline.observe.reporter import Reporter
from pipeline.plugins.loading import loaded_plugins, to_flags
from pipeline.runner.record.run_directory import AUTOPSY
from pipeline.training.freezing import config_at
from pipeline.training.state import StepConfig, TrainState


@dataclass(frozen=True)
class Examination:
    """Examines the step that ended a run, and writes the finding into its directory."""

    run_dir: Path
    parts: StepConfig
    executable: Executable
    device: jax.Device
    reporter: Reporter

    def __call__(self, state: TrainState, bad: int) -> None:
        """Examine step `bad` from the state before it.

        Raises nothing: where the autopsy fails it warns, and the run ends for the bad step.
        """
        try:
            with self.reporter.clock(f"examining step {bad}"):
                autopsy = self._examine(state, bad)
            self.reporter.stage("autopsy", str(autopsy))
            flags = to_flags([plugin.given for plugin in loaded_plugins()])
            command = shlex.join(["python", "-m", "pipeline", *flags, "autopsy", str(self.run_dir)])
            self.reporter.stage("autopsy", f"again: {command}")
        except Exception as error:  # the bad step matters more than any error here
            self.reporter.warn(f"no autopsy of step {bad}: {type(error).__name__}: {error}")

    def _examine(self, state: TrainState, bad: int) -> Autopsy:
        batch = batch_of(self.executable.feed, bad)
        before = jax.tree.map(np.array, state)
        parts = config_at(self.parts, bad - 1)
        autopsy = self._runs_again(before, bad) or examine(parts, before, batch, self.device)
        write_reproducer(self.run_dir, parts, before, batch, autopsy)
        write_whole(self.run_dir / AUTOPSY, json_text(autopsy.to_dict(), indent=2) + "\n")
        return autopsy

    def _runs_again(self, state: TrainState, bad: int) -> Autopsy | None:
        """The autopsy without a finding, where the compiled step is not bad a second time."""
        again = self.executable.run(self.executable.put(state), bad - 1, bad, "none")[1]
        if again.bad_step is not None:
            return None
        reason = (
            "the same program gave another result on the same state and batch; a fault of memory "
            "or processor is likely, so check this machine and resume the run"
        )
        return Autopsy(bad, float(again.loss[-1]), float(again.grad_norm[-1]), None, reason)


def batch_of(feed: Feed, step: int) -> Batch:
    """The batch of a step, counted from 1, as it was read."""
    window = feed.window(step - 1)
    return batch_at(window.inputs, jnp.int32(step - 1 - window.start))
