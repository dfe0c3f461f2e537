"""Made-up distributions with entry points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install_entries(site: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Write the metadata of a distribution into a folder; `groups` has entries by their names."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]))
