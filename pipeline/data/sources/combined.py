"""Datasets that are combined from other datasets, called their sources."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BeforeValidator, ValidationInfo, field_validator, model_validator

from pipeline.core.errors import DataError
from pipeline.core.registry import ComponentOf, Expected, Seq, component
from pipeline.data.columns import RawData, Split
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.file_errors import name_file
from pipeline.data.row_views import join_splits, select_samples

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


@component("dataset")
class Concat(CombinedSpec):
    """Datasets with the same classes, one after the other, in both splits."""

    name: Literal["concat"] = "concat"
    sources: Seq[Source]
    """The datasets: for each its name, root and other keys, or only its name."""

    @model_validator(mode="after")
    def _require_sources(self) -> Self:
        if not self.sources:
            raise ValueError("sources = []: must have at least one dataset")
        return self

    def read(self, cache: Path) -> RawData:
        """Return the samples of all sources, in order."""
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
        return replace(first, train=train, eval=evaluated, notes=notes)


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
