"""`python -m pipeline autopsy RUN_DIR`: replay and examine the non-finite step of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipeline.cli.commands.command import CommandResult
from pipeline.core.errors import DataError, RecipeError, UsageError, printable, printable_lines
from pipeline.core.files.value_text import join_first
from pipeline.core.reporter import Reporter
from pipeline.engine.monitors.log_lines import METRICS, read_lines
from pipeline.inspect.autopsy.examine import examine
from pipeline.inspect.autopsy.on_failure import list_places, read_reproducer
from pipeline.inspect.replay import Replay, mark, open_replay
from pipeline.training.features.freezing import select_phase

MAX_NAMED = 10
"""Most non-finite steps that a message names."""


def main(run_dir: Path, step: int | None = None, *, approximate: bool = False) -> CommandResult:
    """Replay the non-finite step, and print where values ceased to be finite.

    Without `step` it is the one that ended the run, from the folder reproducer. Any other step,
    counted from 1, is computed again from the run's checkpoints and data. The exit status is 0 if
    the run found the same, or if the finding explains `step`, else 1. Raises the errors of
    `read_reproducer` and of `Replay.compute_step`, and DataError for a finite step.
    """
    if step is not None:
        with (
            Reporter() as reporter,
            open_replay(run_dir, reporter, approximate=approximate) as replay,
        ):
            return _examine_step(replay, step)
    if approximate:
        raise UsageError(["--approximate"], "must be with --step, which opens the run")
    reproducer = read_reproducer(run_dir)
    finding = examine(reproducer.step_config, reproducer.state, reproducer.batch, reproducer.device)
    print(printable_lines(str(finding)))
    if reproducer.left_out:
        print(f"computed without {', '.join(reproducer.left_out)}, which no reproducer has")
    run_finding = str(reproducer.facts["text"])
    is_same = str(finding) == run_finding
    if is_same:
        print("this is what the run has found")
    else:
        print(printable_lines(f"the run has found:\n{run_finding}"))
    facts = {**finding.to_dict(), "run_found": run_finding, "same": is_same}
    return CommandResult(facts, exit_status=0 if is_same else 1)


def _examine_step(replay: Replay, step: int) -> CommandResult:
    """Examine a step of a run, whose state before it is the run's."""
    opened, reporter = replay.opened, replay.reporter
    replay.require_steps([step], least=1)
    if opened.built.privacy is not None:
        raise RecipeError("privacy: must be null for autopsy, which names samples")
    record = replay.compute_step(step)
    numbers = {name: float(record.columns[name][0]) for name in ("loss", "grad_norm")}
    if all(map(np.isfinite, numbers.values())):
        others = join_first(list(_list_non_finite(replay.run_dir)), MAX_NAMED) or "none"
        problem = "its loss and gradient are finite, so there is nothing to examine"
        raise DataError(
            f"{replay.run_dir}: step {step}: {problem}; steps that aren't finite: {others}"
        )
    state = replay.go_to(step - 1)
    config = select_phase(opened.built.step_config, step - 1)
    with reporter.clock(f"examining step {step}"):
        autopsy = examine(config, state, opened.batch(step - 1), opened.backend.device)
    lost = tuple(replay.lost)
    reporter.print_stage("autopsy", mark(lost, str(autopsy)))
    samples = None if autopsy.finding is None else autopsy.finding.samples
    places = list(list_places(opened.dataset.train, samples))
    for line in places:
        reporter.print_stage("autopsy", printable(line))
    facts = {**autopsy.to_dict(), "places": places, "approximate": list(lost)}
    return CommandResult(facts, exit_status=0 if autopsy.finding is not None else 1)


def _list_non_finite(run_dir: Path) -> Iterator[str]:
    """Yield the logged steps whose loss or gradient isn't finite."""
    log = run_dir / METRICS
    for line in read_lines(log) if log.exists() else ():
        numbers = line.numbers()
        if None in (numbers.get("loss", 0.0), numbers.get("grad_norm", 0.0)):
            yield str(line.step)
