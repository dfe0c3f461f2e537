"""The user's arrays in an .npz file, named as in Keras: x_train, y_train, x_test, y_test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from pipeline.core.files.name_text import show_name
from pipeline.core.files.npy import open_archive
from pipeline.core.registry import Seq, component
from pipeline.data.columns import (
    Column,
    RawData,
    Split,
    Targets,
    Task,
    make_number_targets,
    require_trained_range,
)
from pipeline.data.dataset_roots import LocalDatasetSpec, RequiredRoot
from pipeline.data.file_errors import SIZED_BY_FILE, name_file
from pipeline.data.padding.buckets import SIZE, RaggedArray, RaggedColumn, make_ragged_array

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
SIZES = ("x_train_sizes", "x_test_sizes", "y_train_sizes", "y_test_sizes")
"""Optional arrays: the sizes of images or labels that are stored one after the other."""
RESERVED_NAMES = frozenset({"x", "y", "image", "tokens", "features", "label", SIZE})
"""Names of other arrays and columns, which further columns can't have."""
MAX_INFERRED_CLASSES = 10_000
"""The most classes that are inferred from labels. Larger labels may be numbers, such as prices."""
MAX_CLASSES = 1 << 20
CHECKED_VALUES = 1 << 20
"""Number of values that are checked at once."""


@component("dataset")
class NumpyArchive(LocalDatasetSpec):
    """Arrays of samples in x_train and x_test, and of their targets in y_train and y_test.

    Samples are uint8, int32 or float32. Images, (n, H, W) or (n, H, W, C), are the column `image`.
    Rows of whole numbers, (n, length), are the column `tokens`, other rows are `features`. Numbers
    to predict are floats, (n,) or (n, K). Classes are whole numbers: (n,) or (n, 1), or one for
    each position, (n, tokens) or (n, height, width).

    Samples of several sizes are stored one after the other in x_train, (numbers,). x_train_sizes,
    (n, 1 to 3), has their sizes: (tokens,), (H, W) or (H, W, C). In the same way labels of their
    positions are stored in y_train, with y_train_sizes, (n, 1 or 2).
    """

    root_must_be = f"an .npz file with {', '.join(ARRAYS)}"
    name: Literal["numpy"] = "numpy"
    root: RequiredRoot
    """The .npz file."""
    task: Literal["auto", "classification", "regression", "multi_label"] = "auto"
    """The task of y. auto: classification for whole numbers, else regression. multi_label: 0 or 1
    for each of several labels."""
    classes: Annotated[PositiveInt, Field(le=MAX_CLASSES)] | None
    """The number of classes; null: one more than the largest training label, at most 10,000."""

    columns: Seq[Annotated[str, Field(pattern=r"^\w+$")]] = ()
    """Names of further columns. A column `age` is read from the arrays age_train and age_test,
    numbers of any shape (n, ...). `model.inputs` names the columns that a network reads."""

    @model_validator(mode="after")
    def _require_plain_columns(self) -> Self:
        if len(set(self.columns)) < len(self.columns):
            raise ValueError(f"columns = {list(self.columns)}: must be different")
        reserved = sorted(RESERVED_NAMES.intersection(self.columns))
        if reserved:
            raise ValueError(
                f"columns: {', '.join(reserved)} exists already; must have other names"
            )
        if self.columns and self.buckets:
            raise ValueError("columns: can't be combined with buckets; must be []")
        return self

    def read(self, cache: Path) -> RawData:
        """Return images, uint8 or float32 (n, H, W, C), labels, int32 (n, ...) or float32 (n, K),
        and further columns."""
        with name_file(self.root, SIZED_BY_FILE):
            arrays = load_arrays(self.root, self.columns)
            columns = [_read_columns(arrays, self.columns, split) for split in ("train", "test")]
            task = self.task
            if task == "auto":
                kinds = {arrays[name].dtype.kind for name in ("y_train", "y_test")}
                task = "regression" if "f" in kinds else "classification"
            if task != "classification":
                raw = make_number_data(arrays, task)
            else:
                raw = make_class_data(arrays, self.classes, self.ignore_index)
            if not columns[0]:
                return raw
            return replace(
                raw,
                train=Split({**raw.train.columns, **columns[0]}),
                eval=Split({**raw.eval.columns, **columns[1]}),
            )


def load_arrays(path: Path, columns: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file by name: `ARRAYS`, existing `SIZES`, and further
    columns. Raises OSError, and ValueError for a missing or damaged array."""
    arrays = {}
    column_arrays = [f"{name}_{split}" for name in columns for split in ("train", "test")]
    required = (*ARRAYS, *column_arrays)
    with open_archive(path) as archive:
        missing = [name for name in required if name not in archive.names]
        if missing:
            names = ", ".join(map(show_name, archive.names[:10])) or "nothing"
            raise ValueError(f"lacks {', '.join(missing)}; it has {names}")
        for name in (*required, *(name for name in SIZES if name in archive.names)):
            try:
                arrays[name] = archive.read(name)
            except ValueError as error:
                raise ValueError(f"{name} can't be read: {error}") from error
    return arrays


def _read_columns(
    arrays: Mapping[str, np.ndarray], names: Sequence[str], split: str
) -> dict[str, np.ndarray]:
    """Return further columns of a split, train or test. Values have at most 4 bytes: larger types
    become float32. Raises ValueError for an array of another length than the images, and for values
    that aren't finite numbers."""
    sizes_name = f"x_{split}_sizes"
    samples = len(arrays[sizes_name if sizes_name in arrays else f"x_{split}"])
    columns = {}
    for name in names:
        array = f"{name}_{split}"
        values = arrays[array]
        if values.dtype.kind not in "iufb":
            raise ValueError(f"{array} is {values.dtype}; must be numbers")
        if values.ndim == 0 or 0 in values.shape or len(values) != samples:
            raise ValueError(f"{array} has shape {values.shape}; must be ({samples}, ...)")
        if values.dtype.itemsize > 4:
            with np.errstate(over="ignore"):
                values = values.astype(np.float32)
        if not _has_finite_values(values):
            raise ValueError(f"{array} has values that are not finite in float32")
        columns[name] = values
    return columns


def make_class_data(
    arrays: Mapping[str, np.ndarray], classes: int | None, ignore_index: int | None = None
) -> RawData:
    """Return both splits of a classification. Raises ValueError with the name of a wrong array."""
    samples = _read_samples(arrays)
    column = _name_samples(samples["x_train"])
    labels = {
        name: _as_labels(name, arrays[name], arrays.get(f"{name}_sizes"))
        for name in ("y_train", "y_test")
    }
    _require_equal_lengths(samples, labels)
    shapes: dict[str, tuple[Any, ...]] = {}
    flat = {}
    for name, values in labels.items():
        if isinstance(values, RaggedArray):
            # Ragged labels need only the same number of dimensions in both splits.
            shapes[name] = ("any",) * values.sizes.shape[1]
            flat[name] = values.flat
        else:
            shapes[name] = values.shape[1:]
            flat[name] = values.ravel()
    if len(set(shapes.values())) > 1:
        raise ValueError(
            f"y_train and y_test must have the same number of labels per sample, not {shapes}"
        )
    return RawData(
        train=Split({column: samples["x_train"], "label": _as_int32(labels["y_train"])}),
        eval=Split({column: samples["x_test"], "label": _as_int32(labels["y_test"])}),
        targets=Targets(_name_classes(flat, classes, ignore_index)),
    )


def make_number_data(arrays: Mapping[str, np.ndarray], task: Task) -> RawData:
    """Return both splits of a regression or of multi_label, with labels float32 (n, K). Numbers are
    standardised by the training split. Raises ValueError with the name of a wrong array."""
    samples = _read_samples(arrays)
    column = _name_samples(samples["x_train"])
    numbers = {}
    for name in ("y_train", "y_test"):
        values = arrays[name]
        if values.dtype.kind not in "iufb":
            raise ValueError(f"{name} is {values.dtype}; must be numbers")
        if values.ndim not in (1, 2) or 0 in values.shape:
            raise ValueError(f"{name} has shape {values.shape}; must be (n,) or (n, numbers)")
        numbers[name] = values.reshape(len(values), -1)
    _require_equal_lengths(samples, numbers)
    columns = {name: values.shape[1] for name, values in numbers.items()}
    if len(set(columns.values())) > 1:
        raise ValueError(f"y_train and y_test must have the same number of columns, not {columns}")
    count = columns["y_train"]
    names = ("y",) if count == 1 else tuple(f"y{number}" for number in range(count))
    for name, values in numbers.items():
        if task != "regression" and not np.isin(values, (0, 1)).all():
            raise ValueError(f"{name} has values other than 0 and 1, which multi_label needs")
    train, evaluated, targets = make_number_targets(
        numbers["y_train"], numbers["y_test"], names, task
    )
    return RawData(
        train=Split({column: samples["x_train"], "label": train}),
        eval=Split({column: samples["x_test"], "label": evaluated}),
        targets=targets,
    )


def _read_samples(arrays: Mapping[str, np.ndarray]) -> dict[str, Column]:
    """Return the samples of both splits, by the names of their arrays. Raises ValueError if they
    have several shapes or dtypes."""
    images = {}
    kinds = {}
    for name in ("x_train", "x_test"):
        column = _as_samples(name, arrays[name], arrays.get(f"{name}_sizes"))
        images[name] = column
        if isinstance(column, RaggedColumn):
            kinds[name] = f"{column.sizes.shape[1]} sizes, {column.trailing} {column.dtype}"
        else:
            kinds[name] = f"{column.shape[1:]} {column.dtype}"
    if len(set(kinds.values())) > 1:
        raise ValueError(
            f"x_train and x_test must have samples of one shape and dtype, not {kinds}"
        )
    return images


def _require_equal_lengths(images: Mapping[str, Column], labels: Mapping[str, Column]) -> None:
    """Raise ValueError if a split has different numbers of images and labels."""
    for split in ("train", "test"):
        num_images = images[f"x_{split}"].shape[0]
        num_labels = labels[f"y_{split}"].shape[0]
        if num_images != num_labels:
            raise ValueError(
                f"x_{split} has {num_images:,} samples, y_{split} {num_labels:,} labels"
            )


def _name_classes(
    labels: Mapping[str, np.ndarray], classes: int | None, ignore_index: int | None
) -> tuple[str, ...]:
    """Return the numbers of the classes as names. `classes` is their number; None: one more than
    the largest training label. Raises ValueError for labels that aren't classes."""
    valid = {name: values[values != ignore_index] for name, values in labels.items()}
    for name, values in valid.items():
        if not values.size:
            raise ValueError(f"{name} has only the label {ignore_index}, which is ignored")
    inferred = 1 + max(int(values.max()) for values in valid.values())
    if classes is None and inferred > 0:
        require_trained_range(valid["y_train"], valid["y_test"])
    if classes is None and inferred > MAX_INFERRED_CLASSES:
        raise ValueError(
            f"labels go up to {inferred - 1}; set dataset.classes if there are more than "
            f"{MAX_INFERRED_CLASSES:,} classes"
        )
    if classes is None and inferred < 1:
        lowest = min(int(values.min()) for values in valid.values())
        raise ValueError(f"has labels from {lowest} to {inferred - 1}; must have labels from 0 on")
    classes = classes or inferred
    for name, values in valid.items():
        if values.min() < 0 or values.max() >= classes:
            ignored_text = "" if ignore_index is None else f", or {ignore_index}"
            raise ValueError(
                f"{name} has labels from {values.min()} to {values.max()}; "
                f"they must be 0 to {classes - 1}{ignored_text}"
            )
    return tuple(str(label) for label in range(classes))


def _as_int32(labels: np.ndarray | RaggedArray) -> Column:
    if isinstance(labels, RaggedArray):
        return replace(labels, flat=labels.flat.astype(np.int32))
    return labels.astype(np.int32)


def _as_samples(name: str, values: np.ndarray, sizes: np.ndarray | None) -> Column:
    """Return samples: images (n, H, W, C), rows (n, length), or ragged. Raises ValueError,
    beginning with the array's name, if the values or sizes can't be samples."""
    if values.dtype not in (np.uint8, np.int32, np.float32):
        raise ValueError(f"{name} is {values.dtype}; must be uint8, int32 or float32")
    if sizes is None:
        if values.ndim in (2, 3, 4) and not len(values):
            raise ValueError(f"{name} has no samples; must have at least one")
        if values.ndim not in (2, 3, 4) or 0 in values.shape:
            raise ValueError(
                f"{name} has shape {values.shape}; must be (n, H, W), (n, H, W, C) or (n, length)"
            )
    elif sizes.ndim != 2 or not 1 <= sizes.shape[1] <= 3 or not len(sizes):
        raise ValueError(f"{name}_sizes has shape {sizes.shape}; must be (n, 1), (n, 2) or (n, 3)")
    if not _has_finite_values(values):
        raise ValueError(f"{name} has values that are not finite")
    if sizes is None:
        return values[..., np.newaxis] if values.ndim == 3 else values
    trailing: tuple[int, ...] = () if sizes.shape[1] == 1 else (1,)
    if sizes.shape[1] == 3:
        if len(set(sizes[:, 2].tolist())) > 1:
            raise ValueError(f"{name}_sizes has images of several numbers of channels")
        trailing = (int(sizes[0, 2]),)
        sizes = sizes[:, :2]
    return _make_ragged(name, values, sizes, trailing)


def _name_samples(samples: Column) -> str:
    """Return the name of a column of samples: image, tokens for rows of whole numbers, else
    features."""
    if len(samples.shape) > 2:
        return "image"
    return "features" if samples.dtype.kind == "f" else "tokens"


def _has_finite_values(values: np.ndarray) -> bool:
    if values.dtype.kind != "f":
        return True
    # Checking in chunks saves memory, since a mask takes a byte for each value.
    step = max(1, CHECKED_VALUES * len(values) // max(1, values.size))
    chunks = (values[first : first + step] for first in range(0, len(values), step))
    return all(np.isfinite(chunk).all() for chunk in chunks)


def _as_labels(name: str, values: np.ndarray, sizes: np.ndarray | None) -> np.ndarray | RaggedArray:
    """Return labels, (n, ...) or ragged. Raises ValueError, beginning with the array's name, if the
    values or sizes can't be labels."""
    if values.dtype.kind not in "iu":
        raise ValueError(f"{name} is {values.dtype}; labels must be whole numbers")
    if sizes is not None:
        if sizes.ndim != 2 or not 1 <= sizes.shape[1] <= 2:
            raise ValueError(f"{name}_sizes has shape {sizes.shape}; must be (n, 1) or (n, 2)")
        return _make_ragged(name, values, sizes, ())
    if values.ndim == 0 or 0 in values.shape:
        raise ValueError(f"{name} has shape {values.shape}; labels must be (n,) or (n, positions)")
    return values.reshape(-1) if values.shape == (len(values), 1) else values


def _make_ragged(
    name: str, values: np.ndarray, sizes: np.ndarray, trailing: tuple[int, ...]
) -> RaggedArray:
    """Make a ragged column. Raises ValueError with the array's name if the sizes don't fit."""
    try:
        return make_ragged_array(values, sizes, trailing)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
