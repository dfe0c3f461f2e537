"""Paths of the package, conf/ and the recipes, in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def _shipped(folder: str) -> Path:
    inside_wheel = PACKAGE / folder
    return inside_wheel if inside_wheel.is_dir() else PACKAGE.parent / folder


CONF = _shipped("conf")
RECIPES = _shipped("recipes")
PROJECT = _shipped("examples") / "project"
"""The project that `new` copies."""
