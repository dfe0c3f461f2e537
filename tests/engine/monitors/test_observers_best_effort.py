from __future__ import annotations

import pytest

from pipeline.core.errors import RunError
from pipeline.engine.monitors.observers import BackgroundMonitor, BestEffortMonitor
from tests.engine.monitors.test_monitors import EVALUATION
from tests.engine.monitors.test_observers import REPORT, Diary, events_of, telemetry


class Failing(Diary):
    """Fails at one of its calls with whatever it is given."""

    def __init__(self, fails_at: str, error: Exception) -> None:
        super().__init__()
        self._at, self._error = fails_at, error

    def note(self, entry: str) -> None:
        super().note(entry)
        if entry == self._at:
            raise self._error


def play(monitor: BestEffortMonitor[Diary]) -> None:
    monitor.on_steps(telemetry(0), 1.0)
    monitor.on_sink(REPORT)
    monitor.on_eval(2, EVALUATION)
    monitor.flush()
    monitor.relay(lambda diary: diary.note("something else"))
    monitor.close()


EVERYTHING = ["steps 1-1", "sink 2", "eval 2", "flush", "something else", "close"]


def test_calls_are_forwarded() -> None:
    diary = Diary()
    warnings: list[str] = []
    play(BestEffortMonitor(diary, "the diary", warnings.append))
    assert (diary.entries, warnings) == (EVERYTHING, [])


@pytest.mark.parametrize("fails_at", EVERYTHING)
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RunError("board: can't be written: No space left on device"),
            "board: can't be written: No space",
        ),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    ],
)
def test_failure_is_reported_once_and_closes_the_monitor(
    fails_at: str, error: Exception, reason: str
) -> None:
    diary = Failing(fails_at, error)
    warnings: list[str] = []
    play(BestEffortMonitor(diary, "the diary", warnings.append))
    (warning,) = warnings
    assert warning.startswith(f"the diary failed and has ended; training continues: {reason}")
    heard = EVERYTHING[: EVERYTHING.index(fails_at) + 1]
    assert diary.entries == [*heard, "close"]


def test_other_monitors_receive_all_calls_after_a_failure() -> None:
    warnings: list[str] = []
    before, after = Diary(), Diary()
    failing = Failing("sink 2", OSError(28, "No space left on device"))
    monitor = BackgroundMonitor(
        [before, BestEffortMonitor(failing, "the diary", warnings.append), after]
    )
    for start in range(3):
        monitor.on_steps(telemetry(start), 1.0)
        monitor.on_sink(REPORT)
    monitor.close()
    assert events_of(before) == events_of(after)
    assert events_of(after) == [
        "steps 1-1",
        "sink 2",
        "steps 2-2",
        "sink 2",
        "steps 3-3",
        "sink 2",
        "close",
    ]
    assert len(warnings) == 1
