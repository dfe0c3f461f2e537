"""Autopsy of a run that a non-finite step ended: replay, finding, files."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict

import jax
import numpy as np

from pipeline.backends.base import Executable
from pipeline.backends.graph.replay import find_largest_magnitude
from pipeline.checkpoint.autopsy_archive import AUTOPSY
from pipeline.core.files.atomic_write import format_json, write_whole
from pipeline.core.host.signals import Interrupted
from pipeline.core.plugins.loading import list_loaded_plugins, to_flags
from pipeline.data.columns import Split
from pipeline.data.row_views import find_place
from pipeline.engine.history import Examination
from pipeline.inspect.autopsy.examine import examine
from pipeline.inspect.autopsy.finding import Autopsy, NonFiniteSamples
from pipeline.inspect.autopsy.reproducer import write_reproducer
from pipeline.stages.runner.context import CompiledRun
from pipeline.training.features.freezing import select_phase
from pipeline.training.parallel.placement import gather_arrays
from pipeline.training.state import TrainState

MAX_PLACES = 8
"""Most samples whose files are named."""
EXAMINATION_TIMEOUT_S = 3_600.0
"""Seconds that other processes wait while the first one examines a step."""


def examine_non_finite_step(run: CompiledRun, state: TrainState, step: int) -> Examination:
    """Examine `step`, which ended a run, and write the finding; `state` is the state before it.

    All processes repeat the step, and the first one examines it. If the autopsy fails or a signal
    interrupts it, this warns, and the run ends because of the non-finite step. Raises PeerGoneError
    if the first process has ended.
    """
    context = run.context
    reporter = context.reporter
    reporter.print_stage("autopsy", f"replaying step {step}, one operation at a time")
    state = gather_arrays(state)
    weights = [leaf for leaf in jax.tree.leaves(state.params) if leaf.size]
    # NaN if a weight is NaN.
    largest_weight = float(
        np.max([find_largest_magnitude(np.asarray(leaf)) for leaf in weights], initial=0.0)
    )
    examined = Examination(largest_weight=largest_weight)
    try:
        # A signal may interrupt this: the state is saved already.
        with context.options.signals.allow_interrupts(), reporter.clock(f"examining step {step}"):
            autopsy = _repeat_or_examine(run, state, step)
        if autopsy is not None:
            reporter.print_stage("autopsy", str(autopsy))
            finding = autopsy.finding
            # What follows depends on this, also if places can't be read.
            examined = Examination(
                repeats=not autopsy.is_fault_of_machine,
                is_in_data=finding is not None and finding.phase == "data",
                largest_weight=largest_weight,
            )
            samples = None if finding is None else finding.samples
            for line in list_places(run.dataset.train, samples):
                reporter.print_stage("autopsy", line)
            flags = to_flags([plugin.source for plugin in list_loaded_plugins()])
            command = ["python", "-m", "pipeline", *flags, "autopsy", str(context.run_dir)]
            reporter.print_stage("autopsy", f"again: {shlex.join(command)}")
    except Interrupted as signal:
        reporter.warn(f"no autopsy of step {step}: {signal}")
    except Exception as error:  # the non-finite step matters more than any error here
        reporter.warn(f"no autopsy of step {step}: {type(error).__name__}: {error}")
    return Examination(**context.ranks.agree(lambda: asdict(examined), EXAMINATION_TIMEOUT_S))


def _repeat_or_examine(run: CompiledRun, state: TrainState, step: int) -> Autopsy | None:
    """Repeat a step in all processes; return the autopsy of the first one, None in the others."""
    batch = jax.tree.map(np.array, run.executable.loader.read_batch(step))
    state_before = jax.tree.map(np.array, state)
    step_config = select_phase(run.built.step_config, step - 1)
    autopsy = repeat_step(run.executable, state_before, step)
    if not run.context.ranks.is_first:
        return None
    if autopsy is None:
        autopsy = examine(step_config, state_before, batch, run.backend.device)
    write_reproducer(run.context.run_dir, step_config, state_before, batch, autopsy)
    write_whole(run.context.run_dir / AUTOPSY, format_json(autopsy.to_dict(), indent=2) + "\n")
    return autopsy


def list_places(split: Split, samples: NonFiniteSamples | None) -> Iterator[str]:
    """Yield a line with the files of the samples of a split that aren't finite, unless these are
    the whole batch."""
    if samples is None or not 0 < len(samples.ids) < samples.of:
        return
    places = [find_place(split, sample) for sample in samples.ids[:MAX_PLACES]]
    if all(places):
        num_left = len(samples.ids) - len(places)
        yield f"of {', '.join(places)}" + (f" and {num_left} more" if num_left else "")


def repeat_step(executable: Executable, state: TrainState, step: int) -> Autopsy | None:
    """Run a compiled step again; return an autopsy without a finding if it is finite, else None."""
    outcome = executable.run(executable.put(state), step - 1, step, "none")[1]
    if outcome.non_finite_step is not None:
        return None
    reason = (
        "the same program returned another result on the same state and batch; a fault of memory "
        "or processor is likely, so check this machine and resume the run"
    )
    loss = float(outcome.loss[-1])
    grad_norm = float(outcome.grad_norm[-1])
    return Autopsy(step, loss, grad_norm, None, reason, is_fault_of_machine=True)
