"""Contestants that train nothing, for the tests of the process around them."""

from __future__ import annotations

import os
import time

from benchmarks.contestant import Result
from benchmarks.tasks import Task


class Idle:
    """A step takes a millisecond, and the losses say how many steps there have been."""

    sizes = (2, 3)

    def __init__(self) -> None:
        self._steps = 0

    def run(self, steps: int) -> Result:
        """Wait."""
        time.sleep(1e-3 * steps)
        self._steps += steps
        return Result(float(self._steps), 1e-4 * steps)


class Raising(Idle):
    """Can't do it."""

    def run(self, steps: int) -> Result:
        """Raise."""
        raise ValueError(f"no room for {steps} steps\nand a second line")


class Dying(Idle):
    """Its process ends."""

    def run(self, steps: int) -> Result:
        """End the process."""
        os._exit(7)


def enter(task: Task) -> Idle:
    """The contestant that the task is called after."""
    return {"idle": Idle, "raising": Raising, "dying": Dying}[task.name]()
