"""A file that mirrors have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RemoteFile:
    """A file as published: every mirror has it under this name."""

    name: str
    md5: str
    size_bytes: int | None = None
