"""The recipe's `dataset:` section: where data comes from and what is mapped over it."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt, WithJsonSchema

from pipeline.data.columns import ColumnSpec, Facts, RawData
from pipeline.registry import FilePath, PartOf, Seq, Spec


class Op(Spec):
    """A map op: one column of a batch in, the same column out (D-04).

    `__call__` is written against the array namespace `xp`, numpy or jax.numpy, so that the one
    definition runs on the host and inside the compiled step. Randomness comes in as `uniforms`,
    float32 in [0, 1) of shape (batch, `draws`), a pure function of (seed, pass, sample, op).
    """

    name: str
    column: str = "image"

    @property
    def draws(self) -> int:
        """How many random numbers one sample takes."""
        return 0

    def output(self, value: ColumnSpec) -> ColumnSpec:
        """What one value becomes. Raises ValueError where the op can't be applied to it."""
        return value

    @abstractmethod
    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        """Map values of shape (batch, *shape); uniforms have shape (batch, draws)."""


Ops = Seq[Annotated[Op, PartOf("op")]]


class TrainSplitSpec(Spec):
    """How the training split is mapped, shuffled, batched and repeated (D-04, D-08..D-10)."""

    ops: Ops
    shuffle: bool
    buffer_size: PositiveInt | None
    """Shuffle within a moving window of this many samples; null shuffles the whole split."""
    drop_remainder: bool
    repeat: PositiveInt


class EvalSplitSpec(Spec):
    """How the evaluation split is mapped; it is read in order and batched without loss."""

    ops: Ops
    batch_size: PositiveInt | None
    """null takes the training batch size."""


GivenRoot = Annotated[
    FilePath, WithJsonSchema({"anyOf": [{"type": "string", "format": "path"}, {"type": "null"}]})
]
"""A root that only the user can name: conf/ holds null, a recipe must not."""


class DatasetSpec(Spec):
    """Base of every source: the part of kind "dataset" that a recipe names."""

    name: str
    root: FilePath | None
    """A local folder or archive; null reads the cache and downloads what it lacks."""
    mirrors: Seq[Annotated[str, Field(pattern=r"^https?://")]]
    """Base addresses to try in order when something must be downloaded."""
    train: TrainSplitSpec
    eval: EvalSplitSpec

    def facts(self) -> Facts | None:
        """Sizes known without reading; None where only the files tell."""
        return None

    @abstractmethod
    def read(self, cache: Path) -> RawData:
        """Read both splits, downloading into `cache` where needed.

        Raises DataError that names the file and what would be right.
        """
