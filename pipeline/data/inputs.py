"""A dataset: both splits and the order of their samples, and the arrays of a batch that a network
reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipeline.data.columns import IMAGES, ColumnSpec, SampleUnit, Split, Targets
from pipeline.data.dataset_spec import BatchOp, MapOp
from pipeline.data.order import SampleOrder
from pipeline.data.padding.buckets import Padding
from pipeline.data.table import FittedTable

if TYPE_CHECKING:
    from pipeline.data.audio import AudioFormat
    from pipeline.data.series.series_columns import ScaleSeries
    from pipeline.data.text.text_format import TextFormat

PADDING_MASK = "padding_mask"
"""Name of the column that tells tokens from padding, bool (tokens,), if `dataset.padding_mask` is
set. It is computed from the sizes of the samples."""
MASK = "mask"
"""Name by which networks of tokens read `PADDING_MASK`."""


DOCUMENT = "document"
"""Name of the column with the number of each token's document, from 1, int32 (tokens,); 0 is
padding. Networks of tokens read it as `MASK`, and need it only for several documents."""


def name_mask(name: str) -> str:
    """Return the name of the mask of tokens, bool (tokens,): a column, or a network's input."""
    return f"{name}_mask"


InputNames = str | tuple[str, ...] | Mapping[str, str] | None
"""Value of `model.inputs`: a column, several, or columns by the network's names."""

T = TypeVar("T")


@dataclass(frozen=True)
class NetworkInput:
    """One array that a network reads."""

    name: str
    """The network's name for it."""
    column: str
    spec: ColumnSpec
    """Spec of the column after the map ops."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample as the network reads it: channels of images are last."""
        shape = self.spec.shape
        return shape if self.spec.layout == "hwc" else (*shape[1:], shape[0])

    @property
    def dtype(self) -> str:
        """int32 for tokens and other whole numbers along at most one axis, bool for masks, float32
        for the rest."""
        if self.spec.dtype == "bool":
            return "bool"
        is_integer = np.issubdtype(np.dtype(self.spec.dtype), np.integer)
        return "int32" if is_integer and len(self.spec.shape) < 2 else "float32"

    def convert(self, xp: Any, values: Any) -> Any:
        """Return a column (batch, ...) as the network reads it."""
        values = values.astype(self.dtype)
        return values if self.spec.layout == "hwc" else xp.moveaxis(values, 1, -1)


@dataclass(frozen=True)
class NetworkInputs:
    """The arrays that a network reads: one array, or a dictionary by the network's names."""

    arrays: tuple[NetworkInput, ...]
    is_named: bool = False
    """Whether the network reads a dictionary."""

    def pack(self, make: Callable[[NetworkInput], T]) -> T | dict[str, T]:
        """Return what `make` returns for each array, in the form in which the network reads it."""
        if not self.is_named:
            return make(self.arrays[0])
        return {array.name: make(array) for array in self.arrays}

    def read(self, xp: Any, columns: Mapping[str, Any], sizes: Any = None) -> Any:
        """Return the network's inputs from the columns of a mapped batch. `xp` is numpy or
        jax.numpy. With `sizes`, int32 (batch, 1 or 2), of the samples without padding, images get a
        channel that is 1 on the image and 0 on padding, and tokens a `PADDING_MASK` if it is among
        the inputs."""
        first = self.arrays[0]
        reads_mask = any(array.column == PADDING_MASK for array in self.arrays)
        if sizes is None or (len(first.spec.shape) == 1 and not reads_mask):
            return self.pack(lambda array: array.convert(xp, columns[array.column]))
        if reads_mask:
            inside = _mark_inside(xp, columns[first.column].shape[:2], sizes)
            columns = {**columns, PADDING_MASK: inside}
            return self.pack(lambda array: array.convert(xp, columns[array.column]))
        images = first.convert(xp, columns[first.column])
        inside = _mark_inside(xp, images.shape[:3], sizes)[..., None].astype(images.dtype)
        return self.pack(
            lambda array: (
                xp.concatenate([images, inside], axis=-1)
                if array is first
                else array.convert(xp, columns[array.column])
            )
        )

    @property
    def image(self) -> ColumnSpec | None:
        """The image (height, width, channels) that is the only input; None for other inputs."""
        spec = self.arrays[0].spec
        return spec if len(self.arrays) == 1 and len(spec.shape) == 3 else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the only input; () for several inputs."""
        return self.arrays[0].shape if len(self.arrays) == 1 else ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(array.column for array in self.arrays)

    def with_masks(self, specs: Mapping[str, ColumnSpec]) -> NetworkInputs:
        """Return several inputs with the masks of their tokens that are columns too, bool
        (tokens,)."""
        if not self.is_named:
            return self
        masks = []
        for array in self.arrays:
            column = name_mask(array.column)
            if specs.get(column) == ColumnSpec(array.spec.shape[:1], "bool"):
                masks.append(NetworkInput(name_mask(array.name), column, specs[column]))
        names = {array.name for array in self.arrays}
        added = (mask for mask in masks if mask.name not in names)
        return replace(self, arrays=(*self.arrays, *added))

    def with_specs(self, specs: Mapping[str, ColumnSpec]) -> NetworkInputs:
        """Return the inputs with the specs of other columns, such as a larger bucket."""
        arrays = (replace(array, spec=specs.get(array.column, array.spec)) for array in self.arrays)
        return replace(self, arrays=tuple(arrays))

    def __str__(self) -> str:
        return ", ".join(
            f"{array.name} {'x'.join(map(str, array.shape)) or 'number'}" for array in self.arrays
        )


def _mark_inside(xp: Any, shape: tuple[int, ...], sizes: Any) -> Any:
    """Return bool `shape` (batch, tokens) or (batch, height, width): true within the sizes, int32
    (batch, 1 or 2). An axis without a size is inside."""
    inside = xp.ones(shape, bool)
    for axis in range(sizes.shape[1]):
        length = [1] * len(shape)
        length[1 + axis] = -1
        positions = xp.arange(shape[1 + axis], dtype=np.int32).reshape(length)
        inside &= positions < sizes[:, axis].reshape(-1, *(1,) * (len(shape) - 1))
    return inside


def resolve_inputs(
    wanted: InputNames,
    declared: Sequence[str] | None,
    specs: Mapping[str, ColumnSpec],
    default: Sequence[str],
) -> NetworkInputs:
    """Return the inputs of a network from the specs of mapped columns.

    `wanted` is the recipe's `model.inputs`, `declared` the names that the network has for several
    inputs. Without either, the network reads the columns `default`. Raises ValueError for a column
    that isn't there or is named twice, and if `wanted` doesn't fit the declared names.
    """
    selected = (declared or default) if wanted is None else wanted
    columns = (selected,) if isinstance(selected, str) else tuple(selected)
    names: Mapping[str, str]
    if isinstance(wanted, Mapping):
        names = wanted
    elif declared is not None and len(declared) == len(columns):
        names = dict(zip(declared, columns, strict=True))
    else:
        masks = (PADDING_MASK, DOCUMENT)
        names = {MASK if name in masks else name: name for name in columns}
    if not names or len(set(names.values())) < len(columns):
        raise ValueError(f"{list(columns)}: must be one column, or several that differ")
    if declared is not None and set(names) != set(declared):
        raise ValueError(
            f"{list(names)}: the network reads {', '.join(declared)}; must name a column for each"
        )
    for name, column in names.items():
        if column not in specs:
            known = ", ".join(sorted(set(specs) - {"label"}))
            reader = "" if name in (column, MASK) else f" for the network's input {name}"
            reads = f"the network reads {', '.join(declared)}: " if declared and not wanted else ""
            raise ValueError(
                f"{reads}there is no column {column!r}{reader}; the columns are {known}"
            )
    arrays = tuple(NetworkInput(name, column, specs[column]) for name, column in names.items())
    return NetworkInputs(arrays, is_named=len(arrays) > 1 or isinstance(wanted, Mapping))


@dataclass(frozen=True)
class Dataset:
    """Both splits before map ops, the order of their samples, and the specs of mapped values."""

    train: Split
    eval: Split
    targets: Targets
    inputs: NetworkInputs
    """Inputs of the network after the map ops. The specs of labels are after the map ops, too."""
    train_label: ColumnSpec
    eval_label: ColumnSpec
    train_order: SampleOrder
    eval_order: SampleOrder
    train_ops: tuple[MapOp, ...]
    """The map ops of the training split. Geometric ones also transform labels of pixels."""
    eval_ops: tuple[MapOp, ...]
    raw_inputs: Mapping[str, ColumnSpec]
    """Specs of the columns before the map ops on which the network's inputs depend, padded to a
    size that holds all buckets."""
    train_inputs: tuple[NetworkInputs, ...]
    """Inputs of the network in training, for each size that an op draws; empty: `inputs`."""
    padding: Padding
    whole_eval: Split
    """The whole evaluation split; `eval` may be a part of it."""
    table: FittedTable | None = None
    """As in `RawData`, like the fields below."""
    unit: SampleUnit = IMAGES
    text: TextFormat | None = None
    audio: AudioFormat | None = None
    scale: ScaleSeries | None = None

    @property
    def raw_image(self) -> ColumnSpec | None:
        """Spec of the images before the map ops; None if the network reads something else."""
        specs = list(self.raw_inputs.values())
        return specs[0] if len(specs) == 1 and len(specs[0].shape) == 3 else None

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the network's outputs, in their order: classes, numbers or labels."""
        return self.targets.names

    @property
    def mixes_samples(self) -> bool:
        """Whether a training sample depends on the others of its batch, as with mix_up."""
        return any(isinstance(op, BatchOp) for op in self.train_ops)

    def select_train_sample(self) -> Split:
        """Return a part of the training split with the shapes of the evaluation split, so that the
        evaluation's program can also measure it. Its samples are spread evenly over those that are
        trained on. If there are fewer of these than evaluation samples, some occur several times.
        """
        reachable = self.train_order.list_reachable()
        rows = reachable[np.arange(len(self.eval)) * len(reachable) // len(self.eval)]
        columns = {name: self.train.columns[name][rows] for name in self.eval.columns}
        return Split(columns, padding=self.eval.padding)

    @property
    def label_unit(self) -> str:
        """The word for what has a label: samples, tokens, pixels or positions."""
        if self.unit.per_sample > 1:
            return self.unit.speed_unit
        names = {0: "samples", 2: "pixels"}
        return names.get(len(self.label_positions), "positions")

    @property
    def label_positions(self) -> tuple[int, ...]:
        """Shape of the labeled positions of a sample; () for one label per sample."""
        shape = self.eval_label.shape
        if np.issubdtype(self.eval_label.dtype, np.integer):
            return shape
        return shape[:-1]  # without the axis of the classes or numbers of a position
