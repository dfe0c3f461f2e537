"""Bases of sources by their root: a file or folder of the user, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema, field_validator

from pipeline.core.files.paths import Address
from pipeline.core.registry import Location
from pipeline.data.dataset_spec import DatasetSpec

RequiredRoot = Annotated[
    Location, WithJsonSchema({"anyOf": [{"type": "string", "format": "path"}, {"type": "null"}]})
]
"""A required root: null in conf/, so that a recipe must set it."""


class LocalDatasetSpec(DatasetSpec):
    """Base of the sources for the user's files, with a required root."""

    root_must_be: ClassVar[str]
    """Description of a valid root, for messages."""
    root: RequiredRoot

    @field_validator("root", mode="before")
    @classmethod
    def _require_root(cls, root: Any) -> Any:
        if root is None:
            raise ValueError(f"missing; it must be {cls.root_must_be}")
        return root


class RootlessDatasetSpec(DatasetSpec):
    """Base of the sources that read no files of the user, whose root must be null."""

    origin: ClassVar[str]
    """Where the samples are from, for messages."""

    @field_validator("root")
    @classmethod
    def _require_no_root(cls, root: Path | Address | None) -> Path | Address | None:
        if root is not None:
            raise ValueError(f"{root}: must be null; {cls.origin}")
        return root
