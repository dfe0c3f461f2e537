"""Files that an installed package ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.errors import DataError
from pipeline.data.series.series_files import resolve_root


def test_file_of_a_package_is_found_without_an_import() -> None:
    path = resolve_root(Path("data/sources/wine.csv"), "pipeline")
    assert path.is_file()
    assert resolve_root(Path("a.csv"), None) == Path("a.csv")


@pytest.mark.parametrize(
    ("root", "package", "message"),
    [
        ("a.ts", "absent_package", "isn't installed; .* a.ts: pip install absent_package; or set"),
        ("../tests", "pipeline", "leads out of package pipeline; must be inside"),
        ("/etc/passwd", "pipeline", "leads out of package pipeline; must be inside"),
        ("absent.csv", "pipeline", "there is no such file or folder in package pipeline"),
    ],
)
def test_missing_package_and_file_are_named(root: str, package: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        resolve_root(Path(root), package)
