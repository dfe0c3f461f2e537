"""Run a list of map ops: each op's output is the input of the next on its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import MapOp
from pipeline.data.random import integers, uniforms

CHOICE_OP = (1 << 30) + 1
"""The op number that keys the op of a step: no list of map ops is as long."""


def column_specs(ops: Sequence[MapOp], specs: Mapping[str, ColumnSpec]) -> dict[str, ColumnSpec]:
    """Specs of the columns after all ops.

    Raises ValueError that opens with the op's position and name, such as `ops.2 (normalize): `.
    """
    result = dict(specs)
    for position, op in enumerate(ops):
        try:
            values = tuple(_column(result, name) for name in op.columns)
            result.update(zip(op.columns, op.outputs(values), strict=True))
        except ValueError as error:
            raise ValueError(f"ops.{position} ({op.name}): {error}") from error
    return result


def _column(specs: Mapping[str, ColumnSpec], name: str) -> ColumnSpec:
    if name not in specs:
        raise ValueError(f"there is no column {name!r}; the columns are {', '.join(sorted(specs))}")
    return specs[name]


def choices_among(ops: Sequence[MapOp]) -> int:
    """The number of lists of ops, one of which is drawn for each step; 1 where all are fixed."""
    return max((op.choices for op in ops), default=1)


def chosen_ops(ops: Sequence[MapOp], number: int) -> tuple[MapOp, ...]:
    """The list of ops of this number."""
    return tuple(op.chosen(number) for op in ops)


def draw_choice(xp: Any, choices: int, seed: Any, step: Any) -> Any:
    """The number of the list of ops of a step, counted from 0: int32 (), a pure function of
    (seed, step), the same in numpy and jax.numpy."""
    drawn = uniforms(xp, seed, np.int32(0), xp.asarray(step).reshape(1), CHOICE_OP, 1)
    return integers(xp, drawn, choices)[0, 0]


def apply_ops(
    xp: Any, ops: Sequence[MapOp], columns: Mapping[str, Any], seed: Any, pass_: Any, sample: Any
) -> dict[str, Any]:
    """Map columns of shape (batch, *shape) through ops that `column_specs` has accepted.

    `xp` is numpy or jax.numpy. `seed` are the words of `seed_words`, `sample` the sample indices
    (batch,) and `pass_` their pass, (batch,) or a scalar: the key of the random ops.
    """
    result = dict(columns)
    for position, op in enumerate(ops):
        drawn = uniforms(xp, seed, pass_, sample, position, op.draws)
        values = tuple(result[name] for name in op.columns)
        result.update(zip(op.columns, op.map(xp, values, drawn), strict=True))
    return result
