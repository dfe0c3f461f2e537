"""The recipe's section `dataset`: the source of data and the map ops."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from pipeline.core.files.paths import Address
from pipeline.core.registry import ComponentOf, FilePath, Location, Seq, Spec
from pipeline.data.columns import ColumnSpec, RawData, Split, Targets
from pipeline.data.folds import FoldsSpec
from pipeline.data.host_ops import HostOp
from pipeline.data.random import draw_choice

if TYPE_CHECKING:
    import numpy as np

    from pipeline.data.image_facts import ImageFacts
    from pipeline.data.order import SampleOrder
    from pipeline.data.tables.encode_table import TableLayout


def require_distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of classes. Raises ValueError if two are equal."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"has the name {repeated[0]} twice; classes must have different names")
    return names


class MapOp(Spec):
    """Base of the map ops, which change some columns of a batch.

    `map` takes the array namespace `xp`, numpy or jax.numpy, so that one definition runs on the
    host and in the compiled step. It takes its random numbers as `uniforms`, float32 in [0, 1),
    (batch, `draws`), which are a pure function of (seed, epoch, sample, op).
    """

    moves_pixels: ClassVar[bool] = False
    """Whether pixels of an image change position, so that labels of pixels must move too."""
    has_constant_labels: ClassVar[bool] = False
    """Whether all samples get the same labels."""
    name: str

    @property
    def draws(self) -> int:
        """The number of random numbers per sample."""
        return 0

    @property
    def choices(self) -> int:
        """The number of variants of the op, one of which maps a step's batch."""
        return 1

    def choose_variant(self, xp: Any, seed: Any, epoch: Any, step: Any) -> Any:
        """Return the number of the variant for the step after `step` steps, int32 (). `epoch` is
        the batch's. By default it is drawn."""
        return draw_choice(xp, self.choices, seed, step)

    def select_variant(self, number: int) -> MapOp:
        """Return the variant with this number, 0 to `choices` - 1."""
        return self

    @property
    def table_layout(self) -> TableLayout | None:
        """The columns of the table whose rows the op encodes; None for other ops."""
        return None

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are read."""

    @property
    def written(self) -> tuple[str, ...]:
        """The names of the columns that `map` returns. By default they are those that are read."""
        return self.columns

    @abstractmethod
    def outputs(self, values: tuple[ColumnSpec, ...]) -> tuple[ColumnSpec, ...]:
        """Return the specs of the written columns. Raises ValueError if the op can't be applied."""

    def narrow(self, columns: Set[str]) -> MapOp:
        """Return the op without the columns that are missing here and that its others don't need.
        By default it needs all."""
        return self

    def replace_targets(self, targets: Targets) -> Targets:
        """Return the targets of the mapped labels. By default they stay the same."""
        return targets

    @abstractmethod
    def map(self, xp: Any, values: tuple[Any, ...], uniforms: Any) -> tuple[Any, ...]:
        """Return the written columns. `values` are the columns that are read, (batch, *shape)."""


def find_table_layout(ops: Sequence[MapOp]) -> TableLayout | None:
    """Return the columns of a table if the first op encodes one, else None."""
    return ops[0].table_layout if ops else None


class WrappedOp(MapOp):
    """Base of a map op that contains another op, and has its draws, columns and specs."""

    op: MapOp

    @property
    def draws(self) -> int:
        return self.op.draws

    @property
    def choices(self) -> int:
        return self.op.choices

    def choose_variant(self, xp: Any, seed: Any, epoch: Any, step: Any) -> Any:
        return self.op.choose_variant(xp, seed, epoch, step)

    def select_variant(self, number: int) -> Self:
        return self.model_copy(update={"op": self.op.select_variant(number)})

    @property
    def columns(self) -> tuple[str, ...]:
        return self.op.columns

    @property
    def written(self) -> tuple[str, ...]:
        return self.op.written

    def outputs(self, values: tuple[ColumnSpec, ...]) -> tuple[ColumnSpec, ...]:
        return self.op.outputs(values)


class Op(MapOp):
    """Base of the map ops on one column that map each sample independently. Those on images derive
    from `ImageOp`, whose column is `image` unless the recipe names another."""

    column: str
    """The name of the column."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def outputs(self, values: tuple[ColumnSpec, ...]) -> tuple[ColumnSpec, ...]:
        return (self.output(values[0]),)

    def map(self, xp: Any, values: tuple[Any, ...], uniforms: Any) -> tuple[Any, ...]:
        return (self(xp, values[0], uniforms),)

    def output(self, value: ColumnSpec) -> ColumnSpec:
        """Return the spec of a mapped value. Raises ValueError if the op can't be applied to it."""
        return value

    @abstractmethod
    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        """Return mapped values for values (batch, *shape) and uniforms (batch, draws)."""


class BatchOp(MapOp):
    """Base of the map ops that mix the samples of a batch, a column and its labels alike.

    Which samples are in a batch is a pure function of (seed, step), and so are the mixed samples.
    """

    column: str
    """The name of the column."""
    label: str = "label"
    classes: PositiveInt | None = None
    """The number of classes, by which integer labels become one-hot; null: the dataset's number."""

    @property
    def columns(self) -> tuple[str, ...]:
        return self.column, self.label


class Selection(Spec):
    """Base of the rules that select the samples of a split."""

    name: str

    @abstractmethod
    def select(self, split: Split, raw: RawData) -> np.ndarray:
        """Return the rows of the selected samples, int (n,), in their new order. `raw` has both
        splits; its evaluation split may not be selected from yet. Raises ValueError for settings
        that don't fit the data, DataError for a sample that can't be read."""


Ops = Seq[Annotated[MapOp, ComponentOf("op")]]
HostOps = Seq[Annotated[HostOp, ComponentOf("host_op")]]
Selections = Seq[Annotated[Selection, ComponentOf("selection")]]


class TrainSplitSpec(Spec):
    """Map ops, order and batches of the training split."""

    ops: Ops
    shuffle: bool
    buffer_size: PositiveInt | None
    """Number of samples in the buffer that a shuffle draws from; null: the whole split."""
    drop_remainder: bool
    """Whether a last batch that isn't full is left out."""
    repeat: PositiveInt
    """How often an epoch reads the split, each time with another shuffle and random numbers."""
    num_shards: PositiveInt | None
    shard_id: NonNegativeInt | None
    """The shard to train on, of `num_shards`; both null: the whole split."""
    balance: bool = False
    """Whether an epoch has all classes equally often. Samples of rare classes are repeated, with
    different draws of the random ops."""
    interleave: PositiveInt | None = None
    """Number of files to read at a time, one sample of each in turn. With `shuffle` the order of
    files is drawn for each epoch, and samples are shuffled within `buffer_size`. null: the order
    doesn't depend on files."""
    file_shards: PositiveInt | None = None
    """Number of groups of files, with `interleave`. Each batch has an equal part from each group.
    With as many processes as groups, each file is read by one process. null: one group."""
    select: Selections = ()
    """Rules that select samples. Each selects from the samples that the rule before it selected."""
    host_ops: HostOps = ()
    """Custom ops in Python that map values as they are read, before `ops`."""

    @model_validator(mode="after")
    def _require_valid_interleave(self) -> Self:
        if self.interleave is not None and self.shuffle and self.buffer_size is None:
            raise ValueError(
                f"interleave = {self.interleave}: needs buffer_size, samples to shuffle within; "
                "without it the whole split is shuffled, whatever the files"
            )
        if self.interleave is not None and self.balance:
            raise ValueError(
                "interleave: can't be combined with balance, which draws from all files"
            )
        if self.file_shards is not None:
            if self.interleave is None:
                raise ValueError(f"file_shards = {self.file_shards}: needs interleave")
            if self.num_shards is not None or not self.drop_remainder:
                raise ValueError(
                    f"file_shards = {self.file_shards}: needs drop_remainder = true and no "
                    "num_shards"
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
        positions = [position for position, op in enumerate(self.ops) if op.choices > 1]
        if len(positions) > 1:
            raise ValueError(
                f"ops.{positions[1]}: changes the size between steps, as ops.{positions[0]} does; "
                "only one op can"
            )
        return self


class EvalSplitSpec(Spec):
    """Map ops and batches of the evaluation split, which is read whole and in order."""

    ops: Ops
    batch_size: PositiveInt | None
    """null: the training batch size."""
    select: Selections = ()
    host_ops: HostOps = ()
    """Both as in `TrainSplitSpec`."""

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
                    f"ops.{position} ({op.name}): changes the size between steps of training; "
                    "evaluation needs a fixed size: use resize"
                )
        return self


class DatasetSpec(Spec):
    """Base of every source: the component of kind "dataset" that a recipe names."""

    brightest: ClassVar[int] = 255
    """The value of a white pixel, if pixels are integers."""
    content: ClassVar[str] = "images"
    """Noun for the content of samples, in messages."""
    name: str
    root: Location | None
    """A local folder or archive, or an address, whose files are copied into the cache. null: the
    cache, into which missing files are downloaded."""
    mirrors: Seq[Annotated[str, Field(pattern=r"^https?://[^@?#]*$")]]
    """Base addresses, without a password, to try in order for downloads."""
    buckets: Seq[Seq[PositiveInt]] | None
    """Sizes, (height, width) or (tokens,), that samples are padded to: each sample to the smallest
    bucket that covers it. All samples of a batch have the same bucket. null: no padding."""
    padding_mask: bool
    """Whether images get one more channel: 1 inside the image, 0 on padding. Networks of tokens use
    it as a mask, so that attention ignores padding."""
    oversized: Literal["refuse", "crop"]
    """Handling of samples that are larger than every bucket. refuse: an error. crop: training uses
    a part of the sample, drawn for each sample and epoch; evaluation uses its middle."""
    ignore_index: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None
    """The label of entries without a class, such as 255 in masks or -100 in texts. Losses and
    metrics ignore it, and padding gets it; null: every label is a class."""
    exclude: FilePath | None = None
    """A CSV file of training samples to leave out, by their numbers in the training split: in a
    column `index`, or one number a line. Reports write files with such numbers."""
    train: TrainSplitSpec
    eval: EvalSplitSpec
    folds: FoldsSpec | None = None
    """Cross-validation: train on all folds of the training split but one, and evaluate that one;
    null: the splits as they are. `python -m pipeline folds` evaluates each fold once."""

    @model_validator(mode="after")
    def _require_valid_buckets(self) -> Self:
        if self.buckets is None:
            if self.padding_mask:
                raise ValueError("padding_mask = true: needs buckets, else nothing is padded")
            if self.oversized == "crop":
                raise ValueError("oversized = crop: needs buckets, the sizes to crop to")
            return self
        buckets = [list(bucket) for bucket in self.buckets]
        if {len(bucket) for bucket in buckets} not in ({1}, {2}):
            raise ValueError(f"buckets = {buckets}: must be all [height, width] or all [tokens]")
        if len(set(self.buckets)) < len(buckets):
            raise ValueError(f"buckets = {buckets}: must be different")
        problem = None
        drawing_ops = [op.name for op in self.train.ops if op.choices > 1]
        if drawing_ops:
            problem = f"{drawing_ops[0]}, which changes the sizes"
        elif self.train.host_ops or self.eval.host_ops:
            problem = "host_ops"
        elif self.train.balance:
            problem = "train.balance; a class may lack a bucket"
        elif self.train.interleave:
            problem = "train.interleave"
        elif self.train.num_shards:
            problem = "train.num_shards; shards would differ in their number of batches"
        if problem is not None:
            raise ValueError(f"buckets: can't be combined with {problem}")
        return self

    @property
    def is_changed_on_host(self) -> bool:
        """Whether samples are selected or mapped as they are read. The sizes of splits and the
        shapes of samples are then known only after reading."""
        if self.folds is not None or self.exclude is not None:
            return True
        splits: tuple[TrainSplitSpec | EvalSplitSpec, ...] = (self.train, self.eval)
        return any(split.select or split.host_ops for split in splits)

    def facts(self) -> ImageFacts | None:
        """Return the sizes if they are known without reading files, else None."""
        return None

    def declare(self, cache: Path) -> RawData | None:
        """Return zeros in the shapes of the data if `read` would have to download, else None."""
        return None

    def load(self, cache: Path) -> RawData:
        """Read both splits. If the root is an address, its files are copied into `cache` first.
        Raises DataError for data that can't be read, RunError if the address can't be reached."""
        if not isinstance(self.root, Address):
            return self.read(cache)
        # Imported here, since few data are at addresses.
        from pipeline.data.copies.remote_copy import copy_once

        return self.model_copy(update={"root": copy_once(self.root, cache)}).read(cache)

    def make_order(self, raw: RawData, settings: Mapping[str, Any]) -> SampleOrder | None:
        """Return the order of the training samples with the settings of a `SampleOrder`; None: an
        order that `train` describes. Raises ValueError, beginning with a key, for what doesn't
        fit."""
        return None

    @abstractmethod
    def read(self, cache: Path) -> RawData:
        """Read both splits, after a download into `cache` if needed. The root is local, since
        `load` replaces an address by its copy. Raises DataError for data that can't be read."""
