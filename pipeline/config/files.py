"""Files of shipped recipes and of component groups, and the descriptions in these files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pipeline.core.files.bounded_read import read_bytes
from pipeline.core.files.paths import CONF, RECIPES

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "dataset": ("dataset",),
    "model": ("model",),
    "device": ("device",),
    "loss": ("train", "loss"),
    "optimizer": ("train", "optimizer"),
    "schedule": ("train", "schedule"),
}
"""Path in a recipe of each group's component."""


def find_recipes(working_folder: Path) -> Mapping[str, Path]:
    """Return files by recipe name: shipped recipes, then `recipes/*.yaml` of the working folder."""
    folders = (RECIPES, working_folder / "recipes")
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


def make_recipe_name(file: Path, default: str) -> str:
    """Return a file's name as a recipe may have it, or `default` if nothing of it remains."""
    return re.sub(r"[^\w.+-]", "_", file.stem)[:100].lstrip(".+-") or default


def find_groups() -> Mapping[str, Mapping[str, Path]]:
    """Return the files under conf/, by group and then by option."""
    groups: dict[str, dict[str, Path]] = {}
    for file in sorted(CONF.glob("*/*.yaml")):
        groups.setdefault(file.parent.name, {})[file.stem] = file
    return groups


def read_description(file: Path) -> str:
    """Return a YAML file's first comment line, except directives and commands; "" without one."""
    try:
        text = read_bytes(file).decode(errors="replace")
    except (OSError, ValueError):
        return ""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comment = line.lstrip("# ").strip()
        if comment and not comment.startswith(("@package", "yaml-language-server", "python -m")):
            return comment
    return ""
