"""Parts of the package that an installation lacks."""

from __future__ import annotations

import importlib
from functools import partial

import pytest

from pipeline.core.absent_parts import (
    find_absent_part,
    import_unless_absent,
    list_absent_parts,
    note_broken_part,
)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.core.absent_parts._absent", {})


def load(name: str) -> None:
    import_unless_absent(name, partial(importlib.import_module, name))


@pytest.mark.usefixtures("absent")
def test_absent_part_is_remembered_by_the_module_that_needs_it() -> None:
    load("pipeline.backends.nothing")
    load("pipeline.core.errors")
    assert list_absent_parts() == {
        "pipeline.backends.nothing": "pipeline.backends.nothing isn't installed"
    }


@pytest.mark.usefixtures("absent")
def test_missing_package_of_others_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing_of_others"):
        load("nothing_of_others")
    assert list_absent_parts() == {}


@pytest.mark.usefixtures("absent")
def test_broken_part_has_its_reason() -> None:
    note_broken_part("mine", "can't be imported: ImportError: no")
    assert list_absent_parts() == {"mine": "can't be imported: ImportError: no"}


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (ModuleNotFoundError("no", name="pipeline.backends.ascend"), "pipeline.backends.ascend"),
        (ModuleNotFoundError("no", name="pipeline_of_mine.parts"), None),
        (ModuleNotFoundError("no"), None),
        (ImportError("no", name="pipeline.backends.ascend"), None),
    ],
)
def test_only_modules_of_the_package_are_absent_parts(error: Exception, part: str | None) -> None:
    assert find_absent_part(error) == part
