"""A dataset after reading: both splits, and the order of their samples."""

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
    """Both splits as read, image and label specs after map ops, and the order of samples."""

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
    """Spec of an image before its map ops, padded to a size that holds all buckets."""
    train_images: tuple[ColumnSpec, ...]
    """Training images after their map ops, one for each size that a map op may draw for a step;
    empty if all are like `image`."""
    whole_eval: Split
    """The evaluation split as read, of which `eval` may be a part."""
    table: FittedTable | None = None
    """The columns of a table, whose encoded rows are the images."""
    unit: SampleUnit = IMAGES
    text: TextFormat | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes in label order, or of the numbers or labels."""
        return self.targets.names

    def train_sample(self) -> Split:
        """Return the same number of training samples as of evaluation samples, spread evenly over
        the split, or over the shard of it that is trained. A small split repeats some."""
        reachable = self.train_order.reachable()
        rows = reachable[np.arange(len(self.eval)) * len(reachable) // len(self.eval)]
        return Split({name: self.train.columns[name][rows] for name in self.eval.columns})

    @property
    def label_positions(self) -> tuple[int, ...]:
        """Shape of the positions of a sample that have a label: () for one label a sample."""
        shape = self.eval_label.shape
        return shape if np.issubdtype(self.eval_label.dtype, np.integer) else shape[:-1]
