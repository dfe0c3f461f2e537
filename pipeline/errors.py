"""The errors a user is meant to read: one message, no traceback."""

from __future__ import annotations

from collections.abc import Sequence


class PipelineError(Exception):
    """A run that could not be done; the message says what is wrong, the value and what is right."""

    exit_status = 1


class RunError(PipelineError):
    """The recipe was right and the run failed: a device, a disk, a loss that is not finite."""


class RecipeError(PipelineError):
    """The recipe is wrong. Carries every problem found, each opening with its dotted key."""

    exit_status = 2

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "the recipe has a problem:" if count == 1 else f"the recipe has {count} problems:"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


class DataError(PipelineError):
    """Data that is missing, unreadable or not what the recipe says it is."""

    exit_status = 2
