"""Policies for non-finite steps, whose loss or gradient isn't finite, except overflows."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import PositiveInt

from pipeline.core.registry import ComponentOf, Spec, component


class NonFinitePolicy(Spec):
    """The policy for non-finite steps: the component of kind "on_nan"."""

    counts_steps: ClassVar[bool] = False
    """Whether the training state counts non-finite steps, whose updates are left out."""
    name: str

    @property
    def skips_in_a_row(self) -> int:
        """The number of consecutive non-finite steps that the device skips before the loop ends."""
        return 0


@component("on_nan")
class Stop(NonFinitePolicy):
    """The run ends. The state before the step is saved, and the step is examined (autopsy)."""

    name: Literal["stop"] = "stop"


@component("on_nan")
class Skip(NonFinitePolicy):
    """The update is skipped, on the device, and training continues with the next batch. At most
    `most_in_a_row` consecutive non-finite steps are skipped; the next one ends the run."""

    counts_steps: ClassVar[bool] = True
    name: Literal["skip"] = "skip"
    most_in_a_row: PositiveInt = 10

    @property
    def skips_in_a_row(self) -> int:
        return self.most_in_a_row


@component("on_nan")
class Rollback(NonFinitePolicy):
    """The state goes back to a checkpoint, and training continues with the next batch.

    The updates since the checkpoint are lost, as in Chowdhery et al. (2022), sec. 5.1. A run rolls
    back at most `most` times; the next non-finite step ends the run.
    """

    counts_steps: ClassVar[bool] = True
    name: Literal["rollback"] = "rollback"
    most: PositiveInt = 3


STOP = Stop()
OnNan = Annotated[NonFinitePolicy, ComponentOf("on_nan")]
