"""What becomes of a bad step: one whose loss or gradient is not finite, and no overflow that the
loss scale skips."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PositiveInt

from pipeline.registry import PartOf, Spec, part


class BadStepPolicy(Spec):
    """What training does at a bad step: the part of kind "on_nan"."""

    name: str

    @property
    def skips_in_a_row(self) -> int:
        """How many bad steps one after the other the device leaves out before the loop ends."""
        return 0

    @property
    def leaves_out(self) -> bool:
        """Whether a run may have steps without an update, so that these are to be counted."""
        return False


@part("on_nan")
class Stop(BadStepPolicy):
    """The run ends, with the state before the step saved and the step examined."""

    name: Literal["stop"] = "stop"


@part("on_nan")
class Skip(BadStepPolicy):
    """The update is left out, on the device, and training goes on with the next batch.

    So many bad steps one after the other are left out; the next one ends the run.
    """

    name: Literal["skip"] = "skip"
    most_in_a_row: PositiveInt = 10

    @property
    def skips_in_a_row(self) -> int:
        return self.most_in_a_row

    @property
    def leaves_out(self) -> bool:
        return True


@part("on_nan")
class Rollback(BadStepPolicy):
    """The state goes back to a checkpoint, the data do not: training goes on behind the bad batch.

    What was learned of the batches between is left out, as in Chowdhery et al. (2022), sec. 5.1.
    `most` times a run; the next bad step ends it.
    """

    name: Literal["rollback"] = "rollback"
    most: PositiveInt = 3

    @property
    def leaves_out(self) -> bool:
        return True


STOP = Stop()
OnNan = Annotated[BadStepPolicy, PartOf("on_nan")]
