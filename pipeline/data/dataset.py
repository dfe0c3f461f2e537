"""A dataset: both splits, and the order of their samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.data.columns import IMAGES, ColumnSpec, SampleUnit, Split
from pipeline.data.dataset_spec import BatchOp, MapOp
from pipeline.data.inputs import NetworkInputs
from pipeline.data.order import SampleOrder
from pipeline.data.padding.buckets import Padding
from pipeline.data.table import FittedTable
from pipeline.data.targets import Targets

if TYPE_CHECKING:
    from pipeline.data.audio import AudioFormat
    from pipeline.data.series.scale_series import ScaleSeries
    from pipeline.data.text.text_format import TextFormat


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
