"""The answer to a bad step: a rollback, or the end of the run."""

from __future__ import annotations

from pipeline.core.errors import RunError
from pipeline.engine.bad_step import BadStepError, advise
from pipeline.engine.hooks import Hooks
from pipeline.engine.program import Program
from pipeline.engine.progress import Progress
from pipeline.engine.schedule import RunSchedule
from pipeline.training.step_outcome import num_skipped
from pipeline.training.telemetry import Telemetry


def answer_bad_step(
    program: Program,
    run_schedule: RunSchedule,
    hooks: Hooks,
    progress: Progress,
    telemetry: Telemetry,
) -> None:
    """Go back if the last step was bad, and do nothing if it was not.

    Raises BadStepError if it ends the run; the state before it is saved then.
    """
    bad = telemetry.bad_step
    if bad is None:
        return
    history = progress.history
    history.step = bad
    why_not = ""
    try:
        restored = hooks.rollbacks.go_back(bad, progress.state)
        if restored is not None:
            record = hooks.rollbacks.done[-1]
            for monitor in hooks.monitors:
                monitor.on_rollback(record.step, record.to)
            progress.state = program.executable.put(restored)
            return
    except RunError as error:
        why_not = f"; {error}"
    history.step, history.left_out = bad - 1, num_skipped(progress.state)
    # A resumed run does the bad step again: no callback may know of it yet.
    good = telemetry.head(len(telemetry) - 1)
    if len(good):
        hooks.callbacks.notify("on_steps", progress.state, history.step, good)
    hooks.saves.save(hooks, progress)
    examined = hooks.examine(progress.state, bad)
    cause = progress.recent.explain(examined)
    saved = f"; the state of step {bad - 1} is saved" if hooks.saves.writes else ""
    text = f"{_describe(run_schedule, telemetry, bad)}{why_not}{saved}"
    advice = advise(examined, cause, bad, hooks.on_bad_step)
    raise BadStepError(f"{text}; {cause}" if cause else text, advice)


def _describe(run_schedule: RunSchedule, telemetry: Telemetry, bad: int) -> str:
    """Describe a bad step, the document's words first (C-02)."""
    place = run_schedule.place(bad)
    return (
        f"epoch: {place.sink} step: {place.sink_step}. Invalid loss, terminating training. "
        f"Step {bad} of {run_schedule.total}: loss is {telemetry.loss[-1]!s}, "
        f"gradient norm is {telemetry.grad_norm[-1]!s}"
    )
