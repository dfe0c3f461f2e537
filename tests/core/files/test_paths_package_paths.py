"""The files beside the package are there, in a checkout; tests/test_wheel.py looks into a wheel."""

from __future__ import annotations

from pipeline.core.files.paths import CONF, LOCK, PACKAGE, PROJECT, RECIPES


def test_shipped_files_exist() -> None:
    assert (PACKAGE / "__main__.py").is_file()
    assert (CONF / "config.yaml").is_file()
    assert (RECIPES / "lenet5_digits.yaml").is_file()
    assert (PROJECT / "README.md").is_file()
    assert LOCK.is_file()
