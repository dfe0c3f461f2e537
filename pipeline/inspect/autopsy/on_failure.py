"""The autopsy of a run that a bad step ended: replay, finding, files."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.backends.base import Executable
from pipeline.backends.feed.feed import Feed
from pipeline.backends.feed.window import batch_at
from pipeline.backends.graph.replay.ranges import largest
from pipeline.checkpoint.autopsy_archive import AUTOPSY
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.strict_json import json_text
from pipeline.core.host.signals import Interrupted, Signals
from pipeline.core.plugins.loading import loaded_plugins, to_flags
from pipeline.core.reporter import Reporter
from pipeline.data.batch import Batch
from pipeline.engine.bad_step import Examined
from pipeline.inspect.autopsy.examine import examine
from pipeline.inspect.autopsy.finding import Autopsy
from pipeline.inspect.autopsy.reproducer import write_reproducer
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
    signals: Signals

    def __call__(self, state: TrainState, bad: int) -> Examined:
        """Examine step `bad` from the state before it.

        Raises nothing: if the autopsy fails or a signal to stop interrupts it, this warns, and the
        run ends because of the bad step.
        """
        self.reporter.stage("autopsy", f"replaying step {bad}, one operation at a time")
        weights = [np.asarray(leaf) for leaf in jax.tree.leaves(state.params) if leaf.size]
        # NaN if a weight is NaN.
        largest_weight = float(np.max([largest(weight) for weight in weights], initial=0.0))
        try:
            # Nothing of the run would be lost: the state is saved.
            with self.signals.released(), self.reporter.clock(f"examining step {bad}"):
                autopsy = self._examine(state, bad)
            self.reporter.stage("autopsy", str(autopsy))
            flags = to_flags([plugin.given for plugin in loaded_plugins()])
            command = shlex.join(["python", "-m", "pipeline", *flags, "autopsy", str(self.run_dir)])
            self.reporter.stage("autopsy", f"again: {command}")
        except Interrupted as signal:
            self.reporter.warn(f"no autopsy of step {bad}: {signal}")
            return Examined(largest_weight=largest_weight)
        except Exception as error:  # the bad step matters more than any error here
            self.reporter.warn(f"no autopsy of step {bad}: {type(error).__name__}: {error}")
            return Examined(largest_weight=largest_weight)
        finding = autopsy.finding
        in_data = finding is not None and finding.phase == "data"
        return Examined(not autopsy.is_fault_of_machine, in_data, largest_weight)

    def _examine(self, state: TrainState, bad: int) -> Autopsy:
        batch = batch_of(self.executable.feed, bad)
        before = jax.tree.map(np.array, state)
        parts = config_at(self.parts, bad - 1)
        autopsy = self._runs_again(before, bad) or examine(parts, before, batch, self.device)
        write_reproducer(self.run_dir, parts, before, batch, autopsy)
        write_whole(self.run_dir / AUTOPSY, json_text(autopsy.to_dict(), indent=2) + "\n")
        return autopsy

    def _runs_again(self, state: TrainState, bad: int) -> Autopsy | None:
        """Return an autopsy without a finding if the compiled step is not bad a second time."""
        again = self.executable.run(self.executable.put(state), bad - 1, bad, "none")[1]
        if again.bad_step is not None:
            return None
        reason = (
            "the same program gave another result on the same state and batch; a fault of memory "
            "or processor is likely, so check this machine and resume the run"
        )
        loss = again.loss[-1]
        grad_norm = again.grad_norm[-1]
        return Autopsy(bad, float(loss), float(grad_norm), None, reason, is_fault_of_machine=True)


def batch_of(feed: Feed, step: int) -> Batch:
    """The batch of a step, counted from 1, as it was read."""
    window = feed.window(step - 1)
    return batch_at(window.inputs, jnp.int32(step - 1 - window.start))
