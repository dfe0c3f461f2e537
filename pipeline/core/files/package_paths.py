"""Paths of the package and its files, in a checkout and in a wheel, and of the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]


def _find_shipped(name: str) -> Path:
    """Return the path of a file or folder: in the package in a wheel, beside it in a checkout."""
    path_in_wheel = PACKAGE / name
    return path_in_wheel if path_in_wheel.exists() else PACKAGE.parent / name


CONF = _find_shipped("conf")
RECIPES = _find_shipped("recipes")
PROJECT = _find_shipped("examples") / "project"
"""The project that `new` copies."""
LOCK = _find_shipped("pylock.toml")
"""Versions of all packages of the Python 3.11 environment that is tested completely (PEP 751)."""


def find_user_cache() -> Path:
    """Return `pipeline` in $XDG_CACHE_HOME, or in ~/.cache. Raises RuntimeError without a home."""
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "pipeline"
