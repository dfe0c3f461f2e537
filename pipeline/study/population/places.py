"""The places of a population: how many runs train at once, and what happens in them.

Each run has a thread, and the device computes what they dispatch at the same time. A run that ends,
however it ends, leaves its place to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from pipeline.core.host.signals import Signals, heard

LOOK_S = 0.1
"""Interval of looking for signals, which only the main thread receives."""

MemberRun = Callable[[Signals], None]
"""Runs a member, which looks at the signals; it raises nothing that is its own."""


def run_in_places(runs: Sequence[MemberRun], places: int) -> str | None:
    """Run members, `places` of them at a time, in their order.

    Returns the signal that stopped them, as text; None where all have run. A signal reaches the
    runs that are under way, and no other one begins.
    """
    signals, own = Signals(), [Signals() for _ in runs]
    answered = 0
    with signals.held(), heard(signals), ThreadPoolExecutor(places, "member") as threads:
        waiting: set[Future[None]] = {
            threads.submit(_unless_stopped, run, signals, mine)
            for run, mine in zip(runs, own, strict=True)
        }
        while waiting:
            done, waiting = wait(waiting, LOOK_S, FIRST_COMPLETED)
            for one in done:
                one.result()
            for mine in own:
                mine.stop = mine.stop or signals.stop
                mine.saves += signals.saves - answered
            answered = signals.saves
    return signals.stop


def _unless_stopped(run: MemberRun, signals: Signals, own: Signals) -> None:
    if signals.stop is None:
        run(own)
