"""Rows of an adoption, checked without what made them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import load_recipe
from pipeline.config.foreign.adopt import Adoption, KeyRow, make_recipe_text
from pipeline.config.recipe import Recipe


def count_leaves(tree: Any) -> int:
    """Return the number of values of a tree. A list counts as one, unless it has mappings."""
    if isinstance(tree, dict) and tree:
        return sum(map(count_leaves, tree.values()))
    if isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        return sum(map(count_leaves, tree))
    return 1


def require_a_row_each(adoption: Adoption) -> None:
    """Fail unless each setting has one row, with keys or a reason."""
    names = [row.setting for row in adoption.rows]
    assert len(names) == len(set(names))
    assert set(adoption.settings) <= set(names)
    assert all(row.keys or row.note for row in adoption.rows)


def find_conflicts(adoption: Adoption) -> Iterator[str]:
    """Yield each key that two rows have with different values."""
    values: dict[str, Any] = {}
    for row in adoption.rows:
        for key, value in row.keys.items():
            if key in values and values[key] != value:
                yield key
            values[key] = value


def list_rows(adoption: Adoption) -> dict[str, KeyRow]:
    return {row.setting: row for row in adoption.rows}


def list_keys(adoption: Adoption) -> dict[str, Any]:
    """Return the values of all keys."""
    return {key: value for row in adoption.rows for key, value in row.keys.items()}


def write_recipe(folder: Path, adoption: Adoption, *overrides: str) -> Recipe:
    """Write an adoption as a file, and return its recipe with overrides."""
    file = folder / "adopted.yaml"
    file.write_text(make_recipe_text(adoption, file))
    return load_recipe(str(file), overrides)
