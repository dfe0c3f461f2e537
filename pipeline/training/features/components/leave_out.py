"""Samples that weigh nothing: a run as it would be without them, with the same batches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator

from pipeline.core.registry import component
from pipeline.data.dataset_spec import BatchOp
from pipeline.training.step_feature import FeatureContext, FeatureSpec, StepFeature

if TYPE_CHECKING:
    from jax import Array

    from pipeline.data.batch import Batch

MAX_SAMPLES = 10_000_000
_RANGE = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")


def parse_ranges(text: str) -> np.ndarray:
    """Return the numbers of a text such as `3,17,40-59`, int64 (n,), ascending, each once.

    Raises ValueError for another text, and for more than `MAX_SAMPLES` numbers.
    """
    parts = []
    total = 0
    for word in text.split(","):
        match = _RANGE.fullmatch(word.strip())
        if match is None:
            raise ValueError(f"must be numbers and ranges such as 3,17,40-59, not {word!r:.40}")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"{word}: must not end before its first number")
        total += last - first + 1
        if total > MAX_SAMPLES:
            raise ValueError(f"must be at most {MAX_SAMPLES:,} numbers")
        parts.append(np.arange(first, last + 1))
    return np.unique(np.concatenate(parts))


def format_ranges(numbers: Sequence[int] | np.ndarray) -> str:
    """Return the text of numbers, which `parse_ranges` reads."""
    values = np.unique(np.asarray(numbers, np.int64))
    runs = np.split(values, np.flatnonzero(np.diff(values) > 1) + 1)
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _require_ranges(text: str) -> str:
    parse_ranges(text)
    return text


@component("feature")
class LeaveOutSpec(FeatureSpec):
    """Samples that weigh nothing, in the loss and in its mean: batches stay as they are, and the
    mean of a batch is over its other samples. A batch of such samples alone has loss 0 and gradient
    0. Statistics of batch norm still see the samples. The command `without` uses it."""

    name: Literal["leave_out"] = "leave_out"
    samples: Annotated[
        str,
        # YAML reads 17 as a number.
        BeforeValidator(lambda value: str(value) if type(value) is int else value),
        AfterValidator(_require_ranges),
    ]
    """Their positions in the training split, from 0 on, such as 3,17,40-59."""

    def check(self, recipe: Any) -> Iterator[str]:
        train = recipe.train
        if recipe.privacy is not None:
            yield "privacy: must be null with leave_out, since its noise counts all samples"
        if train.loss.compares_samples:
            name = train.loss.name
            yield f"train.loss = {name}: must be another loss with leave_out; it compares samples"
        if train.precision == "fp8":
            rule = "must be another with leave_out; it scales samples together"
            yield f"train.precision = fp8: {rule}"
        for position, op in enumerate(recipe.dataset.train.ops):
            if isinstance(op, BatchOp):
                key = f"dataset.train.ops.{position} ({op.name})"
                yield f"{key}: must be another op with leave_out; it mixes samples with others"
        if train.optimizer.observes_layers:
            name = train.optimizer.name
            rule = "must be another one with leave_out, since it uses every sample"
            yield f"train.optimizer = {name}: {rule}"

    def build(self, context: FeatureContext) -> StepFeature:
        rows = parse_ranges(self.samples)
        if rows[-1] >= context.samples:
            last = context.samples - 1
            raise ValueError(f"samples = {self.samples:.60}: must be from 0 to {last:,}")
        return LeaveOut(tuple(rows.tolist()), context.samples)


@dataclass(frozen=True)
class LeaveOut(StepFeature):
    """Leaves samples out of the loss and of its mean."""

    name: ClassVar[str] = "leave_out"
    rows: tuple[int, ...]
    """Positions in the training split, ascending."""
    samples: int
    """Samples of the training split."""

    def keep_samples(self, batch: Batch) -> Array:
        import jax.numpy as jnp

        kept = np.ones(self.samples, bool)
        kept[list(self.rows)] = False
        # A sample that an epoch repeats has multiples of the number of samples added.
        mask: Array = jnp.asarray(kept)[batch.sample % self.samples]
        return mask
