"""Datasets that are combined from other datasets, called their sources."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from pydantic import (
    BeforeValidator,
    NonNegativeFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipeline.core.errors import DataError
from pipeline.core.files.value_text import show
from pipeline.core.registry import ComponentOf, Expected, Seq, Spec, component
from pipeline.data.columns import RawData, Split
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.file_errors import name_file
from pipeline.data.row_views import join_splits, select_samples

if TYPE_CHECKING:
    from pipeline.data.order import SampleOrder

INHERITED = ("mirrors", "buckets", "padding_mask", "oversized", "ignore_index", "train", "eval")
"""Keys whose values a source takes from the combined dataset, unless its own section sets them."""


def _inherit(source: Any, info: ValidationInfo) -> Any:
    """Return the section of a source, or the name that stands for it, with the keys `INHERITED`."""
    if isinstance(source, str):
        source = {"name": source}
    if not isinstance(source, dict):
        return source
    if source.get("exclude") is not None:
        raise ValueError("exclude: must be null; set dataset.exclude instead")
    shared = {key: info.data[key] for key in INHERITED if key in info.data}
    return {"root": None, **shared, **source}


Source = Annotated[DatasetSpec, ComponentOf("dataset"), BeforeValidator(_inherit)]


class CombinedSpec(DatasetSpec):
    """Base of the datasets made of other datasets, which inherit the keys `INHERITED`."""

    root: Annotated[None, Expected("null, since each source has its own")] = None


class JoinedSpec(CombinedSpec):
    """Base of the datasets of several sources with the same classes."""

    sources: Seq[Source]
    """The datasets: for each its name, root and other keys, or only its name."""

    @model_validator(mode="after")
    def _require_sources(self) -> Self:
        if not self.sources:
            raise ValueError("sources = []: must have at least one dataset")
        return self

    def read(self, cache: Path) -> RawData:
        """Return the samples of all sources, in order."""
        return self._read_parts(cache)[0]

    def _read_parts(self, cache: Path) -> tuple[RawData, list[RawData]]:
        """Return the joined sources, and each source."""
        parts = [source.load(cache) for source in self.sources]
        first = parts[0]
        for number, part in enumerate(parts):
            if (
                part.targets != first.targets
                or part.text != first.text
                or part.audio != first.audio
                or part.table is not None
            ):
                raise DataError(
                    f"dataset.sources.{number}: predicts {part.targets}, and dataset.sources.0 "
                    f"{first.targets}; must be the same classes, without a table"
                )
            if part.scale != first.scale:
                raise DataError(
                    f"dataset.sources.{number}: its series have other means or deviations than "
                    "those of dataset.sources.0; must have dataset.standardise = false in both"
                )
        with name_file("dataset.sources"):
            train = join_splits([part.train for part in parts])
            evaluated = join_splits([part.eval for part in parts])
        notes = tuple(note for part in parts for note in part.notes)
        return replace(first, train=train, eval=evaluated, notes=notes), parts


@component("dataset")
class Concat(JoinedSpec):
    """Datasets with the same classes, one after the other, in both splits."""

    name: Literal["concat"] = "concat"


Weights = Seq[NonNegativeFloat]


class WeightChange(Spec):
    """Other weights of the sources of a mixture."""

    after_steps: PositiveInt
    weights: Weights


@component("dataset")
class Mixture(JoinedSpec):
    """Datasets with the same classes, from which training draws samples by weights.

    Of 1,000 draws each source has its share, rounded, but at least one if its weight isn't 0. Its
    samples are shuffled again and again, whatever its size. The evaluation split has all sources.
    """

    name: Literal["mixture"] = "mixture"
    weights: Weights
    """The weight of each source, in any unit."""
    changes: Seq[WeightChange] = ()
    """Weights after a number of steps, in ascending order."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        named = {"weights": self.weights}
        named |= {f"changes.{n}.weights": item.weights for n, item in enumerate(self.changes)}
        for key, weights in named.items():
            if len(weights) != len(self.sources):
                raise ValueError(
                    f"{key} = {list(weights)}: must have {len(self.sources)} numbers, one for each "
                    "source"
                )
            if not 0 < sum(weights) < math.inf:
                raise ValueError(
                    f"{key} = {list(weights)}: must be numbers of which one is above 0"
                )
        steps = [change.after_steps for change in self.changes]
        if any(first >= second for first, second in pairwise(steps)):
            raise ValueError(f"changes: after_steps are {steps}; must be in ascending order")
        defaults = {"buffer_size": None, "num_shards": None, "balance": False, "interleave": None}
        for key, default in defaults.items():
            if getattr(self.train, key) != default:
                raise ValueError(
                    f"train.{key}: must be {show(default)}, since weights draw samples"
                )
        if self.buckets is not None:
            raise ValueError("buckets: must be null, since weights draw samples of any size")
        return self

    def read(self, cache: Path) -> RawData:
        """Return the samples of all sources, in order."""
        raw, parts = self._read_parts(cache)
        return replace(raw, train=replace(raw.train, files=tuple(len(p.train) for p in parts)))

    def make_order(self, raw: RawData, settings: Mapping[str, Any]) -> SampleOrder:
        from pipeline.data.order_kinds import MixedOrder, divide_cycle

        sizes = raw.train.files
        weights = [(0, self.weights), *((item.after_steps, item.weights) for item in self.changes)]
        if len(sizes) != len(self.sources):
            raise ValueError("train.select: must keep the sequence of samples in a mixture")
        for number, size in enumerate(sizes):
            if not size and any(by_source[number] for _, by_source in weights):
                raise ValueError(f"weights.{number}: must be 0, as the source has no samples left")
        shares = tuple((step, divide_cycle(by_source)) for step, by_source in weights)
        return MixedOrder(**settings, sizes=sizes, shares=shares)


@component("dataset")
class Zip(CombinedSpec):
    """The images of one dataset with the labels of another, sample by sample. The last samples of
    the longer dataset are left out."""

    name: Literal["zip"] = "zip"
    images: Source | None
    labels: Source | None

    @field_validator("images", "labels")
    @classmethod
    def _require_source(cls, source: DatasetSpec | None) -> DatasetSpec:
        if source is None:
            raise ValueError("must be a dataset, such as {name: digits}")
        return source

    def read(self, cache: Path) -> RawData:
        assert self.images is not None, "the recipe was checked"
        assert self.labels is not None, "the recipe was checked"
        images = self.images.load(cache)
        labels = self.labels.load(cache)
        return replace(
            images,
            train=_zip_splits(images.train, labels.train),
            eval=_zip_splits(images.eval, labels.eval),
            targets=labels.targets,
            notes=images.notes + labels.notes,
        )


def _zip_splits(images: Split, labels: Split) -> Split:
    rows = np.arange(min(len(images), len(labels)))
    images = select_samples(images, rows)
    label = select_samples(labels, rows).columns["label"]
    return replace(images, columns={**images.columns, "label": label})
