"""Put requests of callbacks into effect."""

from __future__ import annotations

from pipeline.checkpoint.host_state import Requests
from pipeline.engine.hooks import Hooks
from pipeline.engine.program import Program
from pipeline.engine.progress import Progress
from pipeline.engine.rate_changes import changed_rates, combined_changes, with_parameters


def grant(program: Program, hooks: Hooks, progress: Progress) -> None:
    """Put what callbacks have requested into effect, in all processes of the run."""
    requests = hooks.callbacks.take_requests(hooks.agree)
    if requests is not None:
        progress.granted = add_requests(progress.granted, requests, progress.history.step)
        if requests.rates:
            set_rates(program, hooks, progress.granted)
    parameters = hooks.callbacks.take_parameters()
    if parameters is not None:
        progress.state = program.executable.put(with_parameters(progress.state, parameters))
        hooks.callbacks.show_state(progress.state)
        progress.history.evaluated = {}


def add_requests(granted: Requests, requests: Requests, step: int) -> Requests:
    """Return the requests in effect at a boundary, without those of earlier steps."""
    evaluations = {*granted.evaluate_at, *requests.evaluate_at}
    saves = {*granted.save_at, *requests.save_at}
    return Requests(
        stop=granted.stop or requests.stop,
        rates=combined_changes((*granted.rates, *requests.rates)),
        evaluate_at=tuple(sorted(later for later in evaluations if later > step)),
        save_at=tuple(sorted(later for later in saves if later >= step)),
    )


def set_rates(program: Program, hooks: Hooks, granted: Requests) -> None:
    """Let the device and the callbacks know the learning rates as they are now."""
    rates = program.learning_rates
    if rates is None:
        return
    hooks.callbacks.show_rates(rates, granted.rates)
    if granted.rates:
        table = changed_rates(rates, granted.rates, program.rate_rules)
        program.executable.set_learning_rates(table)


def raise_failure(hooks: Hooks, progress: Progress) -> None:
    """Raise the error of a callback that ends the run, once the state is saved."""
    if hooks.callbacks.failure is not None:
        if progress.history.step > 0:
            hooks.saves.save(hooks, progress)
        raise hooks.callbacks.failure
