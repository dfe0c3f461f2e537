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
    """Both splits before map ops, specs of images and labels after them, the order of samples."""

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
    """A spec of mapped training images for each size that an op draws; empty: all are `image`."""
    whole_eval: Split
    """The whole evaluation split; `eval` may be a part of it."""
    table: FittedTable | None = None
    """The columns of a table, whose encoded rows are the images; None: not a table."""
    unit: SampleUnit = IMAGES
    text: TextFormat | None = None
    """The tokenizer of texts, and what a network predicts from them; None for other samples."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, numbers or labels, in the order of the network's outputs."""
        return self.targets.names

    def select_train_sample(self) -> Split:
        """Return as many training samples as there are evaluation samples, so that the program of
        the evaluation reads them too. They are spread evenly over the samples that are trained on.
        A small split repeats some."""
        reachable = self.train_order.list_reachable()
        rows = reachable[np.arange(len(self.eval)) * len(reachable) // len(self.eval)]
        columns = {name: self.train.columns[name][rows] for name in self.eval.columns}
        return Split(columns, padding=self.eval.padding)

    @property
    def label_positions(self) -> tuple[int, ...]:
        """Shape of the labeled positions of a sample; () for one label per sample."""
        shape = self.eval_label.shape
        # The last axis of other labels has the classes or numbers of a position.
        return shape if np.issubdtype(self.eval_label.dtype, np.integer) else shape[:-1]
