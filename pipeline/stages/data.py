"""Data: read the dataset that the recipe names, and derive the order of its samples."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console

from pipeline.config.cache import cache_root
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import count_total_steps
from pipeline.core.errors import RecipeError
from pipeline.core.files.name_text import show_name
from pipeline.core.files.value_text import count_noun, join_first
from pipeline.core.reporter import Reporter
from pipeline.data.columns import (
    Column,
    RawData,
    Split,
    SplitKey,
    Targets,
    count_split_bytes,
)
from pipeline.data.host_ops import map_on_host, read_epoch_values
from pipeline.data.inputs import DOCUMENT, Dataset
from pipeline.data.order import Batches, SampleOrder
from pipeline.data.padding.buckets import Padding, compute_canvas, sort_buckets
from pipeline.data.random import seed_words
from pipeline.data.transform import (
    apply_ops,
    choose_variant,
    list_read_columns,
    replace_targets,
    select_variants,
)
from pipeline.stages.key_errors import blaming_key, prefixing_problems
from pipeline.stages.sample_sizes import (
    fit_specs_to_bucket,
    format_buckets,
    map_splits,
    order_in_buckets,
    pad_samples,
)

SPLITS: tuple[SplitKey, ...] = ("train", "eval")
LEFT_OUT_SHARE = 0.1
"""Smallest share of the training samples that an epoch leaves out and a line mentions."""
COUNTED_SAMPLES = 1024
"""Samples whose labels are counted at once."""


def load_data(recipe: Recipe, reporter: Reporter | None = None) -> Dataset:
    """Read the dataset; without a reporter, nothing is printed.

    Raises DataError for data that can't be read, RecipeError for data that doesn't fit the recipe.
    """
    reporter = reporter or Reporter(console=Console(file=io.StringIO()))
    with reporter.clock(f"reading {recipe.dataset.name}"):
        raw = _map_on_host(recipe, read_selected(recipe))
        _warn_of_untrained_classes(raw, recipe.dataset.ignore_index, reporter)
    return _make_dataset(recipe, raw, reporter)


def drop_folds(recipe: Recipe) -> Recipe:
    """Return the recipe with the dataset's two splits in place of folds."""
    dataset = recipe.dataset.model_copy(update={"folds": None})
    return recipe.model_copy(update={"dataset": dataset})


def read_selected(recipe: Recipe) -> RawData:
    """Return the samples of the dataset that the recipe selects, with the splits of its fold.

    Raises DataError for data that can't be read, RecipeError for selections that don't fit it.
    """
    raw = recipe.dataset.load(cache_root(recipe.cache))
    # The numbers of excluded samples are those before the selections.
    samples_read = len(raw.train)
    for key in SPLITS:
        if selections := getattr(recipe.dataset, key).select:
            from pipeline.data.selections import apply_selections

            with prefixing_problems(f"dataset.{key}."):
                raw = apply_selections(selections, raw, key)
    if recipe.dataset.exclude is not None:
        from pipeline.data.selections import exclude_samples

        with prefixing_problems("dataset.exclude = "):
            raw = exclude_samples(raw, recipe.dataset.exclude, samples_read)
    folds = recipe.dataset.folds
    if folds is None:
        return raw
    from pipeline.data.folds import take_fold

    with prefixing_problems("dataset.folds."):
        return take_fold(raw, folds, recipe.dataset.ignore_index)


def _map_on_host(recipe: Recipe, raw: RawData) -> RawData:
    """Return data that applies host ops on reading. Raises RecipeError for ops that don't fit."""
    random_op = next((op for op in recipe.dataset.train.host_ops if op.draws), None)
    if random_op is not None and recipe.train.feed == "resident":
        raise RecipeError(
            "train.feed = resident: must be auto or stream, since dataset.train.host_ops "
            f"({random_op.name}) draws again in each epoch"
        )
    for key in SPLITS:
        ops = getattr(recipe.dataset, key).host_ops
        with prefixing_problems(f"dataset.{key}."):
            raw = raw.with_split(key, map_on_host(getattr(raw, key), ops, recipe.seed))
    return raw


def declare_data(recipe: Recipe, reporter: Reporter) -> Dataset | None:
    """Return the dataset with zeros for samples, if no stage reads them and they aren't on disk.

    Otherwise returns None. Raises RecipeError if the data doesn't fit the recipe.
    """
    spec = recipe.dataset
    # If the data stage runs alone, it reads the samples.
    if (
        {"train", "eval"} & set(recipe.stages)
        or "build" not in recipe.stages
        or recipe.train.loss.needs_class_counts
        or recipe.train.loss.needs_targets
        or spec.train.balance
        or spec.buckets
        or spec.is_changed_on_host
    ):
        return None
    raw = spec.declare(cache_root(recipe.cache))
    if raw is None:
        return None
    dataset = _make_dataset(recipe, raw, reporter)
    reporter.print_stage("data", "not downloaded: no stage reads samples, and the sizes are known")
    return dataset


def _make_dataset(recipe: Recipe, raw: RawData, reporter: Reporter) -> Dataset:
    """Return the dataset of raw data, with its map ops and the order of its samples."""
    spec = recipe.dataset
    buckets = sort_buckets(spec.buckets or ())
    padding = Padding(buckets, spec.padding_mask, raw.inputs[0])
    raw = pad_samples(raw, padding, spec, recipe.train.batch_size)
    # Every bucket is checked. The last one, the largest, has the shapes of the dataset.
    mapped = [map_splits(recipe, raw, padding, bucket) for bucket in buckets or (None,)][-1]
    inputs = mapped.inputs
    raw, plain_order = _plant_canaries(recipe, raw, _make_train_order(recipe, raw))
    train_order = order_in_buckets(plain_order, raw.train, buckets, uses_all=True)
    eval_split = _sample_evaluation(recipe, raw.eval, train_order)
    targets = replace_targets(spec.eval.ops, raw.targets)
    task = recipe.train.loss.choose_task(targets.task)
    naive_mae = targets.naive_mae if eval_split is raw.eval else None
    raw = replace(raw, targets=replace(targets, task=task, naive_mae=naive_mae))
    raw, loss_line = _describe_targets(recipe, raw)
    counts_classes = recipe.train.loss.needs_class_counts
    raw_specs = raw.eval.specs()
    if buckets:
        raw_specs = fit_specs_to_bucket(compute_canvas(buckets), raw_specs, padding.column)
    # A prediction is of one document.
    columns_read = list_read_columns(mapped.eval_ops, set(inputs.columns) - {DOCUMENT})
    dataset = Dataset(
        train=raw.train,
        eval=eval_split,
        targets=_count_classes(raw, spec.ignore_index) if counts_classes else raw.targets,
        inputs=inputs,
        train_inputs=tuple(inputs.with_specs(specs) for specs in mapped.drawn_specs),
        padding=padding,
        train_label=mapped.train_label,
        eval_label=mapped.eval_label,
        train_order=train_order,
        eval_order=order_in_buckets(_make_eval_order(recipe, eval_split), eval_split, buckets),
        train_ops=mapped.train_ops,
        eval_ops=mapped.eval_ops,
        raw_inputs={name: raw_specs[name] for name in columns_read if name in raw_specs},
        whole_eval=raw.eval,
        table=raw.table,
        unit=raw.unit,
        text=raw.text,
        audio=raw.audio,
        scale=raw.scale,
    )
    lines = [f"{spec.name}: {_format_summary(raw, dataset)}"]
    lines += [f"columns: {raw.table}"] if raw.table is not None else []
    lines += [*raw.notes, loss_line] if loss_line else raw.notes
    lines += [format_buckets(raw.train, buckets, raw.unit.samples)] if buckets else []
    lines += _describe_left_out(recipe, dataset, raw.unit.samples)
    for line in lines:
        reporter.print_stage("data", line)
    return dataset


def _plant_canaries(
    recipe: Recipe, raw: RawData, order: SampleOrder
) -> tuple[RawData, SampleOrder]:
    """Return data and order with the canaries of an audit; unchanged without an audit."""
    if recipe.privacy is None or recipe.privacy.audit is None:
        return raw, order
    # Imported here, since few runs are audited.
    from pipeline.data.canaries import choose_canaries, plant_canaries
    from pipeline.data.poisson_order import PoissonOrder

    assert isinstance(order, PoissonOrder), "an audit needs Poisson sampling"
    with prefixing_problems("privacy.audit: "):
        canaries = choose_canaries(len(raw.train), recipe.privacy.audit.canaries, recipe.seed)
        return plant_canaries(raw, canaries, recipe.seed), replace(order, canaries=canaries)


def _sample_evaluation(recipe: Recipe, split: Split, train_order: SampleOrder) -> Split:
    """Return `eval.samples` evaluation samples, evenly spread; all if the split has no more."""
    samples = recipe.eval.samples
    if samples == "trained" and "train" in recipe.stages:
        steps = count_total_steps(recipe.train, train_order.steps_per_epoch)
        samples = steps * train_order.batch_size
    # Without training, "trained" means all.
    if not isinstance(samples, int) or samples >= len(split):
        return split
    rows = np.arange(samples) * len(split) // samples
    columns = {name: column[rows] for name, column in split.columns.items()}
    return Split(columns, original_rows=split.list_rows()[rows], locate=split.locate)


def read_batch(
    recipe: Recipe,
    dataset: Dataset,
    key: SplitKey,
    batches: Batches,
    step: int,
    max_samples: int | None = None,
) -> dict[str, np.ndarray]:
    """Return the first batch of `batches` after the map ops of its split, by column.

    `step` is the number of steps before the batch. Only the first `max_samples` samples are read;
    None reads all.
    """
    split = getattr(dataset, key)
    ops = dataset.train_ops if key == "train" else dataset.eval_ops
    indices = batches.indices[0][:max_samples]
    rows = batches.rows[0][:max_samples]
    epoch = batches.epochs[0]
    columns = {
        name: read_epoch_values(column, rows, indices, int(epoch))
        for name, column in split.columns.items()
    }
    seed = seed_words(recipe.seed)
    ops = select_variants(ops, int(choose_variant(np, ops, seed, epoch, step)))
    return apply_ops(np, ops, columns, seed, epoch, indices)


def _make_train_order(recipe: Recipe, raw: RawData) -> SampleOrder:
    """Return the order before buckets. Raises RecipeError for settings that don't fit the data."""
    spec = recipe.dataset.train
    settings: dict[str, Any] = {
        "seed": recipe.seed,
        "samples": len(raw.train),
        "batch_size": recipe.train.batch_size,
        "shuffle": spec.shuffle,
        "buffer_size": spec.buffer_size,
        "drop_remainder": spec.drop_remainder,
        "repeat": spec.repeat,
        "num_shards": spec.num_shards or 1,
        "shard_id": spec.shard_id or 0,
    }
    with prefixing_problems("dataset."):
        order = recipe.dataset.make_order(raw, settings)
    if order is not None:
        if recipe.privacy is not None:
            raise RecipeError(f"privacy: must be null with dataset = {recipe.dataset.name}")
        return order
    if recipe.privacy is not None and recipe.privacy.sampling == "poisson":
        from pipeline.data.poisson_order import make_poisson_order

        with prefixing_problems("train."):
            privacy = recipe.privacy
            return make_poisson_order(settings, privacy.delta, privacy.expected_batch_size)
    if spec.interleave is not None:
        return _make_interleaved_order(recipe, raw.train.files, settings)
    with prefixing_problems("train.batch_size: "):
        order = SampleOrder(**settings)
    if not spec.balance:
        return order
    from pipeline.data.order_kinds import BalancedOrder

    labels = raw.train.columns["label"]
    if raw.targets.task != "classification" or len(labels.shape) != 1:
        raise RecipeError(
            "dataset.train.balance = true: must be false unless each sample has one class"
        )
    settings["ignore_index"] = recipe.dataset.ignore_index
    with prefixing_problems("dataset.train.balance = true: "):
        return BalancedOrder(**settings, labels=np.asarray(labels[:]))


def _make_interleaved_order(
    recipe: Recipe, files: tuple[int, ...], settings: dict[str, Any]
) -> SampleOrder:
    """Return an order that reads several files by turns. `files` are their numbers of samples."""
    from pipeline.data.order_kinds import FileShardedOrder, InterleavedOrder

    spec = recipe.dataset.train
    if not files:
        raise RecipeError(
            f"dataset.train.interleave = {spec.interleave}: must be null, since "
            f"{recipe.dataset.name} doesn't read samples from files one after the other; "
            "tfrecord and records do"
        )
    file_shards = spec.file_shards or 1
    if file_shards > len(files) or recipe.train.batch_size % file_shards:
        raise RecipeError(
            f"dataset.train.file_shards = {file_shards}: must divide train.batch_size = "
            f"{recipe.train.batch_size}, and be at most the {len(files)} files"
        )
    if len(files) < settings["num_shards"]:
        raise RecipeError(
            f"dataset.train.num_shards = {spec.num_shards}: must be at most {len(files)}, since "
            "with interleave each shard reads different files"
        )
    settings = {**settings, "cycle_length": spec.interleave, "files": files}
    with prefixing_problems("train.batch_size: "):
        if spec.file_shards is None:
            return InterleavedOrder(**settings)
        return FileShardedOrder(**settings, file_shards=file_shards)


def _make_eval_order(recipe: Recipe, split: Split) -> SampleOrder:
    batch_size = recipe.dataset.eval.batch_size or recipe.train.batch_size
    fixed: dict[str, Any] = {"shuffle": False, "buffer_size": None, "drop_remainder": False}
    return SampleOrder(
        seed=recipe.seed, samples=len(split), batch_size=batch_size, repeat=1, **fixed
    )


def _describe_targets(recipe: Recipe, raw: RawData) -> tuple[RawData, str]:
    """Return raw data with what the loss needs of the training labels, and a line for the log.
    Raises RecipeError for labels that the loss doesn't take."""
    loss = recipe.train.loss
    if not loss.needs_targets or "label" not in raw.train.columns:
        return raw, ""
    labels = np.asarray(raw.train.columns["label"][:])
    with blaming_key(f"train.loss = {loss.name}"):
        targets, line = loss.describe_targets(raw.targets, labels)
    return replace(raw, targets=targets), line


def _count_classes(raw: RawData, ignore_index: int | None) -> Targets:
    """Return the targets, with the number of training labels of each class for integer labels."""
    labels = raw.train.columns["label"]
    if not np.issubdtype(np.dtype(labels.dtype), np.integer):
        return raw.targets
    counts = _count_labels(labels, len(raw.targets), ignore_index)
    return replace(raw.targets, counts=tuple(counts.tolist()))


def _count_labels(labels: Column, classes: int, ignore_index: int | None) -> np.ndarray:
    """Return the number of labels of each class, int64 (classes,), of a column of integers."""
    counts = np.zeros(classes, np.int64)
    for start in range(0, labels.shape[0], COUNTED_SAMPLES):
        chunk = np.asarray(labels[start : start + COUNTED_SAMPLES]).ravel()
        valid = chunk[chunk != ignore_index]  # all for None
        counts += np.bincount(valid, minlength=classes)[:classes]
    return counts


def _warn_of_untrained_classes(raw: RawData, ignore_index: int | None, reporter: Reporter) -> None:
    """Print a warning if evaluation labels have classes that no training label has. Only labels in
    memory are read for it, not masks that are decoded on demand."""
    columns = [split.columns["label"] for split in (raw.train, raw.eval)]
    is_counted = raw.targets.task == "classification" and all(
        isinstance(column, np.ndarray) and np.issubdtype(column.dtype, np.integer)
        for column in columns
    )
    if not is_counted:
        return
    trained, evaluated = (_count_labels(part, len(raw.targets), ignore_index) for part in columns)
    untrained = np.flatnonzero((evaluated > 0) & (trained == 0))
    if untrained.size:
        names = join_first([show_name(raw.classes[label]) for label in untrained], 3)
        reporter.warn(
            f"dataset: no training label is of class {names}, which can't be learned; "
            f"{evaluated[untrained].sum():,} of {evaluated.sum():,} evaluation labels are"
        )


def _describe_left_out(recipe: Recipe, dataset: Dataset, unit: str) -> list[str]:
    """Return a line about the samples, called `unit`, that an epoch leaves out; empty for less
    than `LEFT_OUT_SHARE` of them."""
    order = dataset.train_order
    split = recipe.dataset.train
    # A private run draws its batches by chance, and a balanced one some samples several times.
    draws_again = recipe.privacy is not None or split.balance
    left_out = order.samples_left_out
    if (
        "train" not in recipe.stages
        or draws_again
        or left_out < LEFT_OUT_SHARE * order.shard_samples
    ):
        return []
    cures = "a smaller train.batch_size reads more"
    if split.file_shards is None and not dataset.mixes_samples:
        cures += ", dataset.train.drop_remainder=false all (not with batch norm)"
    others = ", others each time," if split.shuffle else ""
    return [
        f"each epoch leaves out {left_out:,} of {order.shard_samples:,} training {unit}{others} "
        f"that fill no batch of {order.batch_size:,}, and has "
        f"{count_noun(order.steps_per_epoch, 'step')}; {cures}"
    ]


def _format_summary(raw: RawData, dataset: Dataset) -> str:
    unit = raw.unit
    specs = raw.train.specs()
    size = unit.size or ", ".join("x".join(map(str, specs[name].shape)) for name in raw.inputs)
    if dataset.inputs.image is not None and unit.size is None:
        read = "x".join(map(str, dataset.inputs.shape))
        size += "" if read == size else f", read as {read}"
    size_mb = (count_split_bytes(raw.train) + count_split_bytes(raw.eval)) / 1e6
    order = dataset.train_order
    shard = f" in shard {order.shard_id} of {order.num_shards}" if order.num_shards > 1 else ""
    steps = count_noun(order.steps_per_epoch, "step")
    part = "" if dataset.eval is raw.eval else f"{len(dataset.eval):,} of "
    return (
        f"{len(raw.train):,} training and {part}{len(raw.eval):,} evaluation {unit.samples} "
        f"{size}, {raw.targets}, {size_mb:,.1f} MB; {steps} an epoch{shard}"
    )
