"""The replayed part of a step, with named scopes also for operations outside the layers.

Map ops, the loss and the norm of the gradient each get a scope. Only the replay is traced with
them; the compiled step is unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from pipeline.backends.graph.replay.interpreter import layer_named
from pipeline.backends.graph.replay.origins import COLUMN
from pipeline.data.batch import Batch
from pipeline.data.dataset_spec import MapOp
from pipeline.inspect.autopsy.finding import Phase
from pipeline.training.bucketing import in_its_bucket
from pipeline.training.state import StepConfig, TrainState
from pipeline.training.step import gradients_of, norm_of

DATA = "dataset.train.ops"
LOSS = "loss"
GRADIENT_NORM = "gradient_norm"

KINDS: dict[Phase, str] = {
    "data": COLUMN,
    "forward": "activation",
    "loss": "loss",
    "backward": "gradient",
    "gradient norm": "gradient",
}
"""Kinds of tensors that operations produce, by phase of the step."""


class Outcome(NamedTuple):
    """The values that decide whether a step is bad, and the gradients by name."""

    loss: Any
    grad_norm: Any
    gradients: Any


@dataclass(frozen=True)
class _ScopedOp:
    """A map op in a scope named for its place in the recipe, `dataset.train.ops.1.rescale`."""

    op: MapOp
    position: int

    @property
    def draws(self) -> int:
        return self.op.draws

    @property
    def choices(self) -> int:
        return self.op.choices

    def chosen(self, number: int) -> _ScopedOp:
        return replace(self, op=self.op.chosen(number))

    @property
    def columns(self) -> tuple[str, ...]:
        return self.op.columns

    def map(self, xp: Any, values: tuple[Any, ...], uniforms: Any) -> tuple[Any, ...]:
        with jax.named_scope(f"{DATA}.{self.position}.{self.op.name}"):
            return self.op.map(xp, values, uniforms)


def with_scopes(parts: StepConfig) -> StepConfig:
    """A copy of the parts with named scopes around map ops and loss."""
    loss = jax.named_scope(LOSS)(parts.loss)
    ops: Any = tuple(_ScopedOp(op, position) for position, op in enumerate(parts.train_ops))
    return replace(parts, train_ops=ops, loss=loss)


def outcome_of(parts: StepConfig, state: TrainState, batch: Batch) -> Outcome:
    """Loss, gradient norm and gradients of a step, without its update."""

    def compute(padded: Batch) -> tuple[Any, Any]:
        result = gradients_of(parts, state, padded)
        return result.loss, result.values

    loss, values = in_its_bucket(parts.buckets, batch, compute)
    with jax.named_scope(GRADIENT_NORM):
        norm = norm_of(values, 1 / state.loss_scale)
    return Outcome(loss, norm, values)


def phase_of(scope: str, *, of_loss: bool) -> Phase:
    """The phase of a step that a scope belongs to; `of_loss`: the loss depends on it."""
    if GRADIENT_NORM in scope:
        return "gradient norm"
    if DATA in scope:
        return "data"
    if "transpose(" in scope:
        return "backward"
    layer = layer_named(scope)
    if not layer or layer.startswith(LOSS):
        return "loss" if of_loss else "backward"
    return "forward"
