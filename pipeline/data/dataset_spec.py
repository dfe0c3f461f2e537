"""The recipe's `dataset:` section: the source of data and the map ops."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from pipeline.core.registry import ComponentOf, FilePath, Seq, Spec
from pipeline.data.columns import ColumnSpec, Facts, RawData


class MapOp(Spec):
    """A map op: some columns of a batch in, the same columns out.

    `map` is written against the array namespace `xp`, numpy or jax.numpy, so that the one
    definition runs on the host and inside the compiled step. Randomness comes in as `uniforms`,
    float32 in [0, 1) of shape (batch, `draws`), a pure function of (seed, epoch, sample, op).
    """

    name: str

    @property
    def draws(self) -> int:
        """The number of random numbers per sample."""
        return 0

    @property
    def choices(self) -> int:
        """The number of variants of the op, one of which is drawn for each step."""
        return 1

    def chosen(self, number: int) -> MapOp:
        """Return the variant of this number."""
        return self

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns that are mapped."""

    @abstractmethod
    def outputs(self, values: tuple[ColumnSpec, ...]) -> tuple[ColumnSpec, ...]:
        """Specs of the mapped columns. Raises ValueError if the op can't be applied."""

    @abstractmethod
    def map(self, xp: Any, values: tuple[Any, ...], uniforms: Any) -> tuple[Any, ...]:
        """Map values of shape (batch, *shape), column by column."""


class Op(MapOp):
    """A map op on one column, which maps each sample independently."""

    moves_pixels: ClassVar[bool] = False
    """Whether pixels change position, so that labels of pixels have to follow."""
    column: str = "image"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def outputs(self, values: tuple[ColumnSpec, ...]) -> tuple[ColumnSpec, ...]:
        return (self.output(values[0]),)

    def map(self, xp: Any, values: tuple[Any, ...], uniforms: Any) -> tuple[Any, ...]:
        return (self(xp, values[0], uniforms),)

    def output(self, value: ColumnSpec) -> ColumnSpec:
        """Spec of a mapped value. Raises ValueError if the op can't be applied to it."""
        return value

    @abstractmethod
    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        """Map values of shape (batch, *shape). Uniforms have shape (batch, draws)."""


class GeometricOp(Op):
    """An op on images that moves pixels and can apply the same to labels of pixels."""

    moves_pixels: ClassVar[bool] = True

    @property
    def creates_border(self) -> bool:
        """Whether it adds pixels from outside of the image, which have no label."""
        return False

    def move_labels(self, xp: Any, labels: Any, uniforms: Any, fill: int) -> Any:
        """Move labels (batch, height, width, 1) as the pixels, each copied from one place.

        Pixels from outside get `fill`. The default suits an op that copies pixels.
        """
        return self(xp, labels, uniforms)


class BatchOp(MapOp):
    """A map op that mixes the samples of a batch, images and one-hot labels alike.

    Which samples make up a batch is a pure function of (seed, step), and so is the mixture.
    """

    column: str = "image"
    label: str = "label"

    @property
    def columns(self) -> tuple[str, ...]:
        return self.column, self.label


Ops = Seq[Annotated[MapOp, ComponentOf("op")]]


class TrainSplitSpec(Spec):
    """Map ops, shuffle, batches and repetition of the training split."""

    ops: Ops
    shuffle: bool
    buffer_size: PositiveInt | None
    """Shuffle within a moving window of this many samples; null shuffles the whole split."""
    drop_remainder: bool
    repeat: PositiveInt
    num_shards: PositiveInt | None
    shard_id: NonNegativeInt | None
    """Train on shard `shard_id` of `num_shards`; null, null: on all of the split."""
    balance: bool = False
    """Draw each class as often as any other: of rare ones samples come several times in an
    epoch, each time with other draws of the random ops."""
    interleave: PositiveInt | None = None
    """Read this many files at a time, one sample of each in turn, in an order of files that
    is drawn for each epoch, and shuffle within `buffer_size`; null: files don't matter."""

    @model_validator(mode="after")
    def _require_buffer(self) -> Self:
        if self.interleave is not None and self.shuffle and self.buffer_size is None:
            raise ValueError(
                f"interleave = {self.interleave}: needs buffer_size, samples to shuffle within; "
                "without it the whole split is shuffled, whatever the files"
            )
        if self.interleave is not None and self.balance:
            raise ValueError(
                "interleave: can't be combined with balance, which draws from all files"
            )
        return self

    @model_validator(mode="after")
    def _require_shard(self) -> Self:
        shards = self.num_shards
        shard = self.shard_id
        if shards is None and shard is None:
            return self
        if shards is None:
            raise ValueError(f"shard_id = {shard}: needs num_shards, how many shards there are")
        if shard is None:
            raise ValueError(f"num_shards = {shards}: needs shard_id, 0 to {shards - 1}")
        if shard >= shards:
            raise ValueError(
                f"shard_id = {shard}: must be 0 to {shards - 1}, below num_shards = {shards}"
            )
        return self

    @model_validator(mode="after")
    def _require_one_drawn_op(self) -> Self:
        drawing = [position for position, op in enumerate(self.ops) if op.choices > 1]
        if len(drawing) > 1:
            raise ValueError(
                f"ops.{drawing[1]}: draws a size, as ops.{drawing[0]} does; only one op can"
            )
        return self


class EvalSplitSpec(Spec):
    """Map ops and batches of the evaluation split, which is read in order and in full."""

    ops: Ops
    batch_size: PositiveInt | None
    """null: the training batch size."""

    @model_validator(mode="after")
    def _require_fixed_ops(self) -> Self:
        for position, op in enumerate(self.ops):
            if isinstance(op, BatchOp):
                raise ValueError(
                    f"ops.{position} ({op.name}): mixes the samples of a batch, and evaluation "
                    "measures each by itself; list it only under dataset.train.ops"
                )
            if op.choices > 1:
                raise ValueError(
                    f"ops.{position} ({op.name}): draws a size for each step of training; "
                    "evaluation needs a fixed size: use resize"
                )
        return self


GivenRoot = Annotated[
    FilePath, WithJsonSchema({"anyOf": [{"type": "string", "format": "path"}, {"type": "null"}]})
]
"""A root that only the user can name: conf/ holds null, a recipe must not."""


class DatasetSpec(Spec):
    """Base of every source: the component of kind "dataset" that a recipe names."""

    name: str
    root: FilePath | None
    """A local folder or archive; null: the cache, which is downloaded if it is missing."""
    mirrors: Seq[Annotated[str, Field(pattern=r"^https?://[^@?#]*$")]]
    """Base addresses, without a password, to try in order when something must be downloaded."""
    buckets: Seq[Seq[PositiveInt]] | None
    """Pad each image to the smallest of these that covers it, (height, width) or (tokens,), and
    batch only images of one bucket; one bucket is a fixed maximum, null pads nothing."""
    padding_mask: bool
    """Give the network one more channel: 1 inside of the image, 0 on padding. A network of tokens
    uses it as a mask instead: its attention ignores padding."""
    oversized: Literal["refuse", "crop"]
    """Handling of samples that are larger than every bucket. crop: in training a part of them is
    used, drawn again for each sample and epoch, in evaluation the middle."""
    ignore_index: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None
    """The label of entries without a class, as 255 in masks or -100 in texts: neither losses nor
    metrics count it, and padded positions get it; null: every label is a class."""
    train: TrainSplitSpec
    eval: EvalSplitSpec

    @model_validator(mode="after")
    def _require_valid_buckets(self) -> Self:
        if self.buckets is not None:
            buckets = [list(bucket) for bucket in self.buckets]
            if {len(bucket) for bucket in buckets} not in ({1}, {2}):
                raise ValueError(
                    f"buckets = {buckets}: must be all [height, width] or all [tokens]"
                )
            if len(set(self.buckets)) < len(buckets):
                raise ValueError(f"buckets = {buckets}: must be different")
        if not self.buckets:
            if self.padding_mask:
                raise ValueError("padding_mask = true: needs buckets, else nothing is padded")
            if self.oversized == "crop":
                raise ValueError("oversized = crop: needs buckets, the sizes to crop to")
            return self
        drawing = [op.name for op in self.train.ops if op.choices > 1]
        if drawing:
            raise ValueError(
                f"buckets: can't be combined with {drawing[0]}, which changes the sizes"
            )
        if self.train.balance:
            raise ValueError(
                "buckets: can't be combined with train.balance; a class may lack a bucket"
            )
        if self.train.interleave:
            raise ValueError("buckets: can't be combined with train.interleave")
        if self.train.num_shards is not None:
            raise ValueError(
                "buckets: can't be combined with train.num_shards; shards would differ in their "
                "number of batches"
            )
        return self

    def facts(self) -> Facts | None:
        """Return sizes that are known without reading; None if only the files have them."""
        return None

    def declare(self, cache: Path) -> RawData | None:
        """Return blank data of the known sizes, if `read` would have to download; else None."""
        return None

    @abstractmethod
    def read(self, cache: Path) -> RawData:
        """Read both splits, downloading into `cache` if needed.

        Raises DataError that names the file and what is expected.
        """


class LocalDatasetSpec(DatasetSpec):
    """Base of the sources whose files only the user has, with a required root."""

    root_must_be: ClassVar[str]
    """Description of the root for the user."""
    root: GivenRoot

    @field_validator("root", mode="before")
    @classmethod
    def _require_root(cls, root: Any) -> Any:
        if root is None:
            raise ValueError(f"missing; it must be {cls.root_must_be}")
        return root
