"""Datasets in files of many examples: ArrayRecord, TFRecord, MindRecord, and webdataset's tars.

ArrayRecord files are written by `python -m pipeline convert records`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator

from pipeline.core.errors import DataError
from pipeline.core.files.braces import expand_braces
from pipeline.core.files.value_text import join_first
from pipeline.core.registry import Seq, component
from pipeline.data.columns import (
    BOXES,
    RawData,
    Split,
    Targets,
    make_number_targets,
    require_trained_range,
)
from pipeline.data.dataset_roots import LocalDatasetSpec, RequiredRoot
from pipeline.data.dataset_spec import require_distinct
from pipeline.data.file_errors import name_file
from pipeline.data.held_out import Share, hold_out
from pipeline.data.records.example_images import (
    Examples,
    ExampleSettings,
    IndexFile,
    read_examples,
    stack_boxes,
)
from pipeline.data.records.mindrecord_file import index_mindrecord
from pipeline.data.records.record_format import (
    DESCRIPTION,
    RecordSplitSpec,
    RecordsSpec,
    open_column,
    read_description,
)
from pipeline.data.records.tar_shard import index_tar
from pipeline.data.records.tfrecord_file import index_tfrecord
from pipeline.data.sources.class_folders import EVAL_FOLDERS, require_within
from pipeline.data.sources.image_folder import ImageSize

MAX_CLASSES = 1 << 20
Pattern = Annotated[str, Field(pattern=r"^[^/\\\x00]+$")]
ImageShape = Annotated[Seq[PositiveInt], Field(min_length=3, max_length=3)]


class ExampleFilesSpec(LocalDatasetSpec):
    """Base of the sources for files of examples with named features, one of them an image and one
    its label.

    By default training files are `train*`, evaluation files `eval*`, `val*` or `test*`. All files
    are read before training, to collect labels and find damage. Images are read again on demand.
    """

    index_suffix: ClassVar[str | None] = None
    """Suffix after a file's name of its index; None: files have no index."""
    root: RequiredRoot
    """The folder with the files, or a file."""
    train_files: Pattern = "train*"
    """The names of the training files. * matches any characters, {000..009} is ten numbers."""
    eval_files: Pattern | None = None
    """The names of the evaluation files; null: eval*, val* or test*, unless `split` is set."""
    split: Share | None = None
    """The share of each class in the training files that is evaluated; null: `eval_files` are."""
    split_seed: NonNegativeInt = 0
    image_key: str | None = None
    """The feature with the image; null: image/encoded, image, image_raw, image/raw or data."""
    label_key: str | None = None
    """The feature with the label, a class or floats; null: image/class/label or label."""
    box_key: str | None = None
    """The beginning of the features KEY/ymin, KEY/xmin, KEY/ymax and KEY/xmax with bounding boxes,
    such as image/object/bbox, for the op `bounding_box_crop`; null: boxes aren't read."""
    first_label: NonNegativeInt = 0
    """The label of the first class: 1 if 0 is the background, as in ImageNet's files."""
    classes: Annotated[Seq[str], AfterValidator(require_distinct)] | None = None
    """The names of the classes; null: their numbers."""
    image_size: ImageSize | None = None
    """[height, width] that encoded images are resized to; null: all must have one size."""
    image_shape: ImageShape | None = None
    """[height, width, channels] of plain pixels; null: the features height, width and depth."""

    @model_validator(mode="after")
    def _require_compatible(self) -> Self:
        if self.split is not None and self.eval_files is not None:
            raise ValueError(f"split = {self.split}: can't be combined with eval_files")
        if self.image_size is not None and self.image_shape is not None:
            raise ValueError(
                "image_shape: can't be combined with image_size; plain pixels aren't resized"
            )
        if self.buckets is not None:
            raise ValueError(f"buckets: can't be combined with {self.name}; images have one shape")
        return self

    def read(self, cache: Path) -> RawData:
        """Return images on demand, uint8 (n, H, W, C), and labels, int32 (n,) or float32 (n, K)."""
        train = self._read_matching(self.train_files)
        if self.split is None:
            evaluated = self._read_matching(self._find_eval_pattern())
            # Links of other names are the same file.
            train_paths = {file.path.resolve() for file in train.images.files}
            shared_paths = [
                file.path for file in evaluated.images.files if file.path.resolve() in train_paths
            ]
            if shared_paths:
                raise DataError(
                    f"{min(shared_paths)}: is both trained on and evaluated; dataset.train_files "
                    "and dataset.eval_files must name different files"
                )
        else:
            train, evaluated = self._hold_out(train, self.split)
        if train.images.layout.shape != evaluated.images.layout.shape:
            raise DataError(
                f"{self.root}: training images have shape {train.images.layout.shape}, evaluation "
                f"images {evaluated.images.layout.shape}; dataset.image_size=[H,W] resizes PNG, "
                "JPEG and BMP"
            )
        if train.labels.shape[1:] != evaluated.labels.shape[1:]:
            raise DataError(
                f"{self.root}: a training label has shape {train.labels.shape[1:]}, an evaluation "
                f"label {evaluated.labels.shape[1:]}"
            )
        with name_file(self.root):
            labels, eval_labels, targets = self._make_targets(train, evaluated)
        boxes, eval_boxes = _make_box_columns(train, evaluated)
        column = train.images.layout.column
        return RawData(
            train=Split(
                {column: train.images, "label": labels, **boxes}, train.images.count_by_file()
            ),
            eval=Split({column: evaluated.images, "label": eval_labels, **eval_boxes}),
            targets=targets,
            inputs=(column,),
        )

    def _read_matching(self, pattern: str) -> Examples:
        """Read the examples of the files that match `pattern`, in the order of the files' names.

        Raises DataError if no file matches, for a link out of the root, and for a damaged file.
        """
        # Python 3.11's glob raises IndexError for the pattern ".".
        with name_file(self.root, (ValueError, IndexError)):
            paths = self._list_files(pattern)
        if not paths:
            raise DataError(f"{self.root}: has no files {pattern}")
        folder = self.root.parent if self.root.is_file() else self.root
        for path in paths:
            require_within(path, folder.resolve())
            if self.index_suffix is not None:
                require_within(path.with_name(path.name + self.index_suffix), folder.resolve())
        return read_examples(paths, self.file_reader, self._settings)

    @property
    @abstractmethod
    def file_reader(self) -> IndexFile:
        """The function that reads and indexes a file of examples."""

    @property
    def _settings(self) -> ExampleSettings:
        return ExampleSettings(
            self.image_key,
            self.label_key,
            self.image_size,
            self.image_shape,
            box_key=self.box_key,
        )

    def _list_files(self, pattern: str) -> list[Path]:
        """Return the files that match `pattern`, sorted, without their indices; [] if none match.

        Raises DataError if braces stand for several names, and only some of them have files.
        """
        if self.root.is_file():
            return [self.root]
        matches = {name: list(self.root.glob(name)) for name in expand_braces(pattern)}
        missing = [name for name, paths in matches.items() if not paths]
        if 0 < len(missing) < len(matches):
            raise DataError(f"{self.root}: lacks {join_first(missing, 3)} of {pattern}")
        paths = set(chain.from_iterable(matches.values()))
        return sorted(path for path in paths if path.suffix != self.index_suffix and path.is_file())

    def _find_eval_pattern(self) -> str:
        """Return the pattern of the evaluation files. Raises DataError if none exist."""
        if self.eval_files is not None:
            return self.eval_files
        if self.root.is_file():
            raise DataError(
                f"{self.root}: is a single file; hold out a part of it by dataset.split=0.2"
            )
        for name in EVAL_FOLDERS:
            if self._list_files(f"{name}*"):
                return f"{name}*"
        raise DataError(
            f"{self.root}: has no files eval*, val* or test*; name them in dataset.eval_files, or "
            "hold out a part of the training files by dataset.split=0.2"
        )

    def _hold_out(self, examples: Examples, share: float) -> tuple[Examples, Examples]:
        """Return the examples to train on and those to evaluate: `share` of all examples, and if
        labels are classes, of each class."""
        labels = examples.labels
        with name_file(self.root):
            groups = np.zeros(len(labels), np.int64)
            if labels.ndim == 1:
                self._require_classes(labels, examples.label_key)
                groups = labels - self.first_label
            names = range(self.first_label, self.first_label + MAX_CLASSES)
            train, evaluated = hold_out(groups, names, share, self.split_seed)
        return examples.select_rows(train), examples.select_rows(evaluated)

    def _make_targets(
        self, train: Examples, evaluated: Examples
    ) -> tuple[np.ndarray, np.ndarray, Targets]:
        """Return the labels of both splits and the targets.

        Raises ValueError for labels outside the range of the classes.
        """
        if train.labels.ndim > 1:
            count = train.labels.shape[1]
            key = train.label_key
            names = (key,) if count == 1 else tuple(f"{key}_{number}" for number in range(count))
            return make_number_targets(train.labels, evaluated.labels, names, "regression")
        all_labels = np.concatenate([train.labels, evaluated.labels])
        first = self.first_label
        self._require_classes(all_labels, train.label_key)
        if self.classes is None:
            require_trained_range(train.labels, evaluated.labels)
        names = self.classes or tuple(map(str, range(first, int(all_labels.max()) + 1)))
        classes = (train.labels - first).astype(np.int32)
        eval_classes = (evaluated.labels - first).astype(np.int32)
        return classes, eval_classes, Targets(tuple(names))

    def _require_classes(self, labels: np.ndarray, key: str) -> None:
        """Raise ValueError for labels, from the feature `key`, that aren't classes."""
        first = self.first_label
        last = first + (MAX_CLASSES if self.classes is None else len(self.classes)) - 1
        lowest = int(labels.min())
        highest = int(labels.max())
        if lowest < first or highest > last:
            raise ValueError(
                f"{key} goes from {lowest} to {highest}; must be {first} to {last}, by "
                "dataset.classes and dataset.first_label"
            )


def _make_box_columns(
    train: Examples, evaluated: Examples
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the column of bounding boxes of both splits, with one shape; {} if there are none."""
    if train.boxes is None or evaluated.boxes is None:
        return {}, {}
    most = max(train.boxes.shape[1], evaluated.boxes.shape[1])
    return {BOXES: stack_boxes(train.boxes, most)}, {BOXES: stack_boxes(evaluated.boxes, most)}


@component("dataset")
class TFRecord(ExampleFilesSpec):
    """TFRecord files of images or lists of tokens, with labels. An image is the content of a file,
    such as PNG or JPEG, or plain 8-bit pixels."""

    root_must_be = "a folder with TFRecord files, train* and one of eval*, val* or test*"
    name: Literal["tfrecord"] = "tfrecord"

    @property
    def file_reader(self) -> IndexFile:
        return index_tfrecord


@component("dataset")
class MindRecord(ExampleFilesSpec):
    """MindRecord files, each with its index NAME.db.

    The image is an array, of pixels or tokens, or a field of bytes: the content of a file, such as
    PNG or JPEG, or plain 8-bit pixels. The label is an integer (a class), a float or an array of
    numbers.
    """

    root_must_be = "a folder with MindRecord files, train* and one of eval*, val* or test*"
    index_suffix: ClassVar[str | None] = ".db"
    name: Literal["mindrecord"] = "mindrecord"
    image_layout: Literal["hwc", "chw"] = "hwc"
    """The order of the axes of images that are arrays."""

    @property
    def file_reader(self) -> IndexFile:
        return index_mindrecord

    @property
    def _settings(self) -> ExampleSettings:
        return replace(super()._settings, image_layout=self.image_layout)


@component("dataset")
class WebDataset(ExampleFilesSpec):
    """Tars of samples, as the webdataset package writes them. A sample is all members KEY.EXT with
    the same KEY.

    The image is the member with an image's extension. The label is the member cls, the field
    `label` of the member json, or the member txt. It is a number, or a name in `classes`.
    """

    root_must_be = (
        "a folder with tars, train* and one of eval*, val* or test*; or one tar, and dataset.split"
    )
    name: Literal["webdataset"] = "webdataset"

    @property
    def file_reader(self) -> IndexFile:
        names = self.classes or ()
        labels = {name: label for label, name in enumerate(names, start=self.first_label)}
        return partial(index_tar, labels=labels)


@component("dataset")
class Records(LocalDatasetSpec):
    """Samples of another source, stored in ArrayRecord files with random access. Images are read on
    demand, so they may be larger than memory. Labels are in memory."""

    root_must_be = f"a folder with {DESCRIPTION}"
    name: Literal["records"] = "records"
    root: RequiredRoot
    """The folder with records.json."""

    def read(self, cache: Path) -> RawData:
        """Return columns with the shapes and dtypes of the source that was converted."""
        spec = read_description(self.root)
        return RawData(
            train=self._open_split(spec, spec.train),
            eval=self._open_split(spec, spec.eval),
            targets=spec.targets,
            inputs=spec.inputs,
        )

    def _open_split(self, spec: RecordsSpec, split: RecordSplitSpec) -> Split:
        """Return a split. Raises DataError for a damaged file, and for labels in memory that
        aren't classes or `ignore_index`."""
        columns = {name: open_column(self.root, column) for name, column in split.columns.items()}
        label = columns["label"]
        if isinstance(label, np.ndarray) and label.dtype.kind in "iu":
            valid = label[label != self.ignore_index]
            lowest = int(valid.min(initial=0))
            highest = int(valid.max(initial=0))
            if lowest < 0 or highest >= len(spec.classes):
                raise DataError(
                    f"{self.root}: has labels from {lowest} to {highest}; they must be 0 to "
                    f"{len(spec.classes) - 1}, or dataset.ignore_index"
                )
        # The parts of a split that an order may interleave.
        first = next(name for name in (*spec.inputs, *columns) if name != "label")
        files = split.columns[first].files
        return Split(columns, tuple(file.samples for file in files))
