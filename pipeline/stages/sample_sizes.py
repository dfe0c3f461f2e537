"""Columns of mapped samples, and sizes of samples, which are padded to buckets or drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.files.value_text import count_noun
from pipeline.core.host.memory import require_room
from pipeline.data.columns import ColumnSpec, RawData, Split, SplitKey
from pipeline.data.dataset_spec import DatasetSpec, MapOp
from pipeline.data.inputs import PADDING_MASK, NetworkInputs, resolve_inputs
from pipeline.data.order import SampleOrder
from pipeline.data.padding.buckets import (
    SIZE,
    Bucket,
    Padding,
    RaggedColumn,
    assign_buckets,
    require_used_buckets,
)
from pipeline.data.transform import (
    compute_column_specs,
    count_choices,
    describe_unequal_shapes,
    fit_to_classes,
    select_variants,
)
from pipeline.stages.key_errors import prefixing_problems


def pad_samples(raw: RawData, padding: Padding, dataset: DatasetSpec, batch_size: int) -> RawData:
    """Return the data with samples padded to buckets; unchanged without buckets.

    Raises RecipeError for several sizes without buckets, for a sample that fits no bucket, and if a
    batch of padded samples doesn't fit into memory.
    """
    if not padding.buckets:
        _refuse_several_sizes(raw)
        return raw
    # Imported here, since few datasets have buckets.
    from pipeline.data.padding.pad_samples import pad_split

    ignore_index = dataset.ignore_index
    crop = dataset.oversized == "crop"
    splits: tuple[tuple[SplitKey, str], ...] = (("train", "training"), ("eval", "evaluation"))
    for key, name in splits:
        with prefixing_problems(f"dataset.buckets: {name} {raw.unit.samples}: "):
            padded = pad_split(getattr(raw, key), padding, ignore_index=ignore_index, crop=crop)
            require_room(batch_size * padded.sample_bytes, f"a padded batch of {batch_size:,}")
        raw = raw.with_split(key, padded)
    return raw


def _refuse_several_sizes(raw: RawData) -> None:
    """Raise RecipeError if samples or labels have several sizes."""
    samples = raw.unit.samples
    for split in (splits := (raw.train, raw.eval)):
        for name, column in split.columns.items():
            if not isinstance(column, RaggedColumn):
                continue
            if name == "label":
                raise RecipeError(
                    f"dataset: labels have several sizes and {samples} have one; each position "
                    "needs a label"
                )
            shapes = [split.columns[name].shape[1:] for split in splits]
            sizes = np.max(shapes, axis=0)[: column.sizes.shape[1]]
            raise RecipeError(
                f"dataset.buckets = null: the {samples} have several sizes; give sizes to pad them "
                f"to, such as [{sizes.tolist()}]"
            )


def order_in_buckets(
    order: SampleOrder, split: Split, buckets: Sequence[Bucket], *, uses_all: bool = False
) -> SampleOrder:
    """Return an order in which all samples of a batch have the same bucket.

    Without buckets, returns `order`. Raises RecipeError if a batch can't be filled from any bucket,
    or with `uses_all` from some bucket.
    """
    if not buckets:
        return order
    from pipeline.data.order_kinds import BucketedOrder

    numbers = assign_buckets(split.columns[SIZE][:], buckets)
    with prefixing_problems("dataset.buckets: "):
        if uses_all:
            require_used_buckets(numbers, buckets, order.batch_size if order.drop_remainder else 1)
        return BucketedOrder(**vars(order), buckets=numbers)


def format_buckets(split: Split, buckets: Sequence[Bucket], samples: str) -> str:
    """Return the number of samples in each bucket of a padded split, as a line for the log."""
    numbers = assign_buckets(split.columns[SIZE][:], buckets)
    counts = np.bincount(numbers, minlength=len(buckets)).tolist()
    texts = [
        f"{'x'.join(map(str, bucket))} ({count_noun(count, 'sample')})"
        for bucket, count in zip(buckets, counts, strict=True)
    ]
    return f"training {samples} padded to {', '.join(texts)}"


def fit_specs_to_bucket(
    bucket: Bucket, specs: Mapping[str, ColumnSpec], column: str
) -> dict[str, ColumnSpec]:
    """Return the specs of samples padded to a bucket: `column`, and labels of positions."""
    sample = specs[column]
    label = specs["label"]
    sample = replace(sample, shape=(*bucket, *sample.shape[len(bucket) :]))
    if label.shape and np.issubdtype(label.dtype, np.integer):
        label = replace(label, shape=bucket)
    return {**specs, column: sample, "label": label}


def refuse_moved_padding(dataset: DatasetSpec) -> None:
    """Raise RecipeError for a map op that moves pixels of an image away from the padding mask."""
    for key, split in (("train", dataset.train), ("eval", dataset.eval)):
        for position, op in enumerate(split.ops):
            if op.moves_pixels:
                raise RecipeError(
                    f"dataset.padding_mask = true: dataset.{key}.ops.{position} ({op.name}) "
                    "moves pixels, and the mask fits only the original pixels; leave out the op "
                    "or the mask"
                )


def add_padding_mask(
    specs: Mapping[str, ColumnSpec], column: str, bucket: Bucket
) -> dict[str, ColumnSpec]:
    """Return the specs of mapped columns with the padding mask of `column`: one more channel of
    images, and the column `PADDING_MASK` beside tokens.

    The mask has the size of the bucket. Raises RecipeError if map ops change the size of samples.
    """
    sample = specs[column]
    size = sample.shape if sample.layout == "hwc" else sample.shape[1:]
    if tuple(size[: len(bucket)]) != bucket:
        raise RecipeError(
            f"dataset.padding_mask = true: the map ops change the size {list(bucket)} to "
            f"{list(size[: len(bucket)])}; they must keep it"
        )
    if len(sample.shape) == 1:
        return {**specs, PADDING_MASK: ColumnSpec(sample.shape, "bool")}
    if len(sample.shape) != 3:
        raise RecipeError("dataset.padding_mask = true: must be false for samples of two axes")
    axis = 2 if sample.layout == "hwc" else 0
    shape = [length + (number == axis) for number, length in enumerate(sample.shape)]
    return {**specs, column: replace(sample, shape=tuple(shape))}


def list_drawn_specs(ops: Sequence[MapOp], split: Split) -> list[dict[str, ColumnSpec]]:
    """Return the specs of mapped columns for each size that an op draws; [] if no op draws sizes.

    Raises RecipeError with the name of an op that can't be applied to a size.
    """
    choices = count_choices(ops)
    if choices == 1:
        return []
    sized = [select_variants(ops, choice) for choice in range(choices)]
    with prefixing_problems("dataset.train."):
        return [compute_column_specs(sized_ops, split.specs()) for sized_ops in sized]


def fit_to_evaluation(
    train: Mapping[str, ColumnSpec], evaluated: Mapping[str, ColumnSpec]
) -> dict[str, ColumnSpec]:
    """Return the column specs of training with the sizes of evaluation.

    Images of another layout or number of channels, and labels of another rank, aren't changed.
    """

    def fit(name: str, spec: ColumnSpec) -> ColumnSpec:
        other = evaluated.get(name, spec)
        if len(spec.shape) != len(other.shape) or spec.layout != other.layout:
            return spec
        channel_axis = 2 if spec.layout == "hwc" else 0
        is_image = len(spec.shape) == 3
        if is_image and spec.shape[channel_axis] != other.shape[channel_axis]:
            return spec
        return replace(spec, shape=other.shape)

    return {name: fit(name, spec) for name, spec in train.items()}


class MappedSplits(NamedTuple):
    """The map ops of both splits, and the columns that they make."""

    train_ops: tuple[MapOp, ...]
    eval_ops: tuple[MapOp, ...]
    inputs: NetworkInputs
    train_label: ColumnSpec
    eval_label: ColumnSpec
    drawn_specs: Sequence[Mapping[str, ColumnSpec]]
    """Columns of each size that training draws; empty for a single size."""


def map_splits(
    recipe: Recipe, raw: RawData, padding: Padding, bucket: Bucket | None
) -> MappedSplits:
    """Return the ops and columns of both splits in a bucket. Raises RecipeError for ops that don't
    fit the data, and for inputs of two shapes."""
    train_ops, train_specs = _make_map_ops(recipe, raw, "train", bucket)
    eval_ops, eval_specs = _make_map_ops(recipe, raw, "eval", bucket)
    drawn_specs = list_drawn_specs(train_ops, raw.train)
    if drawn_specs:
        train_specs = fit_to_evaluation(train_specs, eval_specs)
    if bucket is not None and recipe.dataset.padding_mask:
        train_specs = add_padding_mask(train_specs, padding.column, bucket)
        eval_specs = add_padding_mask(eval_specs, padding.column, bucket)
        refuse_moved_padding(recipe.dataset)
    inputs = choose_inputs(recipe, train_specs, raw.inputs)
    eval_inputs = choose_inputs(recipe, eval_specs, raw.inputs)
    for array, other in zip(inputs.arrays, eval_inputs.arrays, strict=True):
        if (array.spec.shape, array.spec.layout) != (other.spec.shape, other.spec.layout):
            raise RecipeError(describe_unequal_shapes(array.column, array.spec, other.spec))
        for split in (raw.train, raw.eval):
            column: Any = split.columns.get(array.column)
            is_read = type(column) is np.ndarray and column.dtype == array.spec.dtype
            is_wide = is_read and array.dtype == "int32" and not np.can_cast(column.dtype, "i4")
            if is_wide and (column.astype(np.int32) != column).any():
                raise RecipeError(f"dataset: {array.column} has numbers that int32 can't hold")
    labels = train_specs["label"], eval_specs["label"]
    return MappedSplits(train_ops, eval_ops, inputs, *labels, drawn_specs)


def choose_inputs(
    recipe: Recipe, specs: Mapping[str, ColumnSpec], default: tuple[str, ...]
) -> NetworkInputs:
    """Return what the recipe's network reads of mapped columns; `default` are the columns that a
    network reads unless it declares others. Raises RecipeError for a column that isn't there."""
    if PADDING_MASK in specs:
        default = (*default, PADDING_MASK)
    model = recipe.model
    with prefixing_problems(f"model {model.name}: "):
        declared = model.list_inputs()
    with prefixing_problems("model.inputs: "):
        inputs = resolve_inputs(model.inputs, declared, specs, default)
    return inputs.with_masks(specs) if model.reads_masks else inputs


def _make_map_ops(
    recipe: Recipe, raw: RawData, key: SplitKey, bucket: Bucket | None
) -> tuple[tuple[MapOp, ...], dict[str, ColumnSpec]]:
    """Return the map ops of a split, after those that encode a table, and the mapped specs."""
    split = getattr(raw, key)
    ops = getattr(recipe.dataset, key).ops
    encode: tuple[MapOp, ...] = ()
    if raw.table is not None or raw.scale is not None:
        from pipeline.data.tables.encode_table import make_encoding_ops

        encode = tuple(make_encoding_ops(raw.table, recipe.model.table_input, raw.scale))
    specs = split.specs()
    if bucket is not None:
        specs = fit_specs_to_bucket(bucket, specs, raw.inputs[0])
    classes = len(raw.targets) if raw.targets.task == "classification" else None
    with prefixing_problems(f"dataset.{key}."):
        return fit_ops(ops, encode, specs, classes, recipe.dataset.ignore_index)


def fit_ops(
    ops: Sequence[MapOp],
    encode: tuple[MapOp, ...],
    specs: Mapping[str, ColumnSpec],
    classes: int | None,
    ignore_index: int | None,
) -> tuple[tuple[MapOp, ...], dict[str, ColumnSpec]]:
    """Return a recipe's ops for columns and a number of classes, after `encode`, which encode a
    table or series, and the mapped specs. Raises ValueError, beginning with the op's position."""
    specs = compute_column_specs(encode, specs)
    ops = tuple(ops) if classes is None else fit_to_classes(ops, classes)
    # A number for each image can't be the labels of its pixels.
    if specs["label"].shape and any(op.moves_pixels for op in ops):
        from pipeline.data.ops.together import make_joint_ops

        ops = make_joint_ops(ops, specs, ignore_index)
    return (*encode, *ops), compute_column_specs(ops, specs)
