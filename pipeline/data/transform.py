"""Functions that apply lists of map ops to the columns of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.data.columns import ColumnSpec, Targets
from pipeline.data.dataset_spec import BatchOp, MapOp
from pipeline.data.random import uniforms


def compute_column_specs(
    ops: Sequence[MapOp], specs: Mapping[str, ColumnSpec], *, leave_out: bool = False
) -> dict[str, ColumnSpec]:
    """Return the specs of all columns after all ops. With `leave_out`, ops on columns that aren't
    there are left out, as by `apply_ops`. Raises ValueError for an op that can't be applied,
    beginning with its position and name: `ops.2 (normalize): `."""
    result = dict(specs)
    for position, op in enumerate(ops):
        if leave_out:
            op = op.narrow(result.keys())
            if not result.keys() >= set(op.columns):
                continue
        try:
            for name in op.columns:
                if name not in result:
                    columns = ", ".join(sorted(result))
                    raise ValueError(f"there is no column {name!r}; the columns are {columns}")
            for name in set(op.written).difference(op.columns):
                if name in result:
                    raise ValueError(f"makes a column {name!r}, which exists; must have a new name")
            values = tuple(result[name] for name in op.columns)
            result.update(zip(op.written, op.outputs(values), strict=True))
        except ValueError as error:
            raise ValueError(f"ops.{position} ({op.name}): {error}") from error
    return result


def fit_to_classes(ops: Sequence[MapOp], classes: int) -> tuple[MapOp, ...]:
    """Return the ops, with `classes` set in each `BatchOp` whose recipe doesn't set it."""
    result = []
    for op in ops:
        lacks_classes = isinstance(op, BatchOp) and op.classes is None
        result.append(op.model_copy(update={"classes": classes}) if lacks_classes else op)
    return tuple(result)


def replace_targets(ops: Sequence[MapOp], targets: Targets) -> Targets:
    """Return the targets of the labels after all ops."""
    for op in ops:
        targets = op.replace_targets(targets)
    return targets


def count_choices(ops: Sequence[MapOp]) -> int:
    """Return the number of variants of a list of ops, one of which is drawn for each step."""
    return max((op.choices for op in ops), default=1)


def select_variants(ops: Sequence[MapOp], number: int) -> tuple[MapOp, ...]:
    """Return each op's variant with this number; ops that have no variants stay the same."""
    return tuple(op.select_variant(number) for op in ops)


def choose_variant(xp: Any, ops: Sequence[MapOp], seed: Any, epoch: Any, step: Any) -> Any:
    """Return the number of the variant for the step after `step` steps, int32 (), by the only op
    that has variants; 0 without one."""
    for op in ops:
        if op.choices > 1:
            return op.choose_variant(xp, seed, epoch, step)
    return np.int32(0)


def apply_ops(
    xp: Any, ops: Sequence[MapOp], columns: Mapping[str, Any], seed: Any, epoch: Any, sample: Any
) -> dict[str, Any]:
    """Return columns, (batch, *shape), mapped by ops that `compute_column_specs` has accepted. `xp`
    is numpy or jax.numpy. Random numbers depend on `seed`, the words of `seed_words`, on the sample
    indices `sample`, (batch,), and on their `epoch`, (batch,) or a scalar. An op on columns that
    aren't there is left out: a prediction has no labels, and reads what `list_read_columns` names.
    """
    result = dict(columns)
    for position, op in enumerate(ops):
        op = op.narrow(result.keys())
        if not result.keys() >= set(op.columns):
            continue
        draws = uniforms(xp, seed, epoch, sample, position, op.draws)
        values = tuple(result[name] for name in op.columns)
        result.update(zip(op.written, op.map(xp, values, draws), strict=True))
    return result


def list_read_columns(ops: Sequence[MapOp], names: Iterable[str]) -> tuple[str, ...]:
    """Return the columns before the ops, sorted, on which the mapped columns `names` depend."""
    needed = set(names)
    for op in reversed(ops):
        if needed.intersection(op.written):
            op = op.narrow(needed)
            needed -= set(op.written)
            needed |= set(op.columns)
    return tuple(sorted(needed))


def describe_unequal_shapes(column: str, train: ColumnSpec, evaluated: ColumnSpec) -> str:
    """Return the message for map ops after which a column differs between the two splits."""
    name = "images" if column == "image" else column
    return (
        f"dataset.eval.ops: must return {name} of the same shape as dataset.train.ops; "
        f"{train.shape} in training and {evaluated.shape} in evaluation"
    )


def has_constant_labels(ops: Sequence[MapOp]) -> bool:
    """Return whether all samples have the same labels, which metrics of labels can't measure."""
    return any(op.has_constant_labels for op in ops)
