"""A dataset: both splits, and the order of their samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.data.columns import IMAGES, ColumnSpec, SampleUnit, Split
from pipeline.data.dataset_spec import MapOp
from pipeline.data.order import SampleOrder
from pipeline.data.table import FittedTable
from pipeline.data.targets import Targets
from pipeline.data.text.text_format import TextFormat


@dataclass(frozen=True)
class Dataset:
    """Both splits as read, specs of images and labels after map ops, and the order of samples."""

    train: Split
    eval: Split
    targets: Targets
    image: ColumnSpec
    train_label: ColumnSpec
    eval_label: ColumnSpec
    train_order: SampleOrder
    eval_order: SampleOrder
    train_ops: tuple[MapOp, ...]
    """The map ops of the training split. Geometric ones also transform labels of pixels."""
    eval_ops: tuple[MapOp, ...]
    raw_image: ColumnSpec
    """Spec of an image before the map ops, padded to a size that holds all buckets."""
    train_images: tuple[ColumnSpec, ...]
    """Specs of mapped training images, if an op draws their size; empty if all are like `image`."""
    whole_eval: Split
    """The evaluation split as read; `eval` may be a part of it."""
    table: FittedTable | None = None
    """The columns of a table, whose encoded rows are the images."""
    unit: SampleUnit = IMAGES
    text: TextFormat | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, numbers or labels, in the order of the network's outputs."""
        return self.targets.names

    def train_sample(self) -> Split:
        """Return as many training samples as there are evaluation samples, evenly spread over the
        split, or over the shard that is trained on. A small split repeats some."""
        reachable = self.train_order.list_reachable()
        rows = reachable[np.arange(len(self.eval)) * len(reachable) // len(self.eval)]
        columns = {name: self.train.columns[name][rows] for name in self.eval.columns}
        return Split(columns, padding=self.eval.padding)

    @property
    def label_positions(self) -> tuple[int, ...]:
        """Shape of the labeled positions of a sample; () for one label per sample."""
        shape = self.eval_label.shape
        return shape if np.issubdtype(self.eval_label.dtype, np.integer) else shape[:-1]
