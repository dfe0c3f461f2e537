"""Each annex is imported through its doors alone, and its absence costs only what needs it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.annexes import ANNEXES, ROOT, copy_without, describe_absence
from tests.test_layering import imports, modules


@pytest.fixture
def copy() -> Iterator[Path]:
    """An empty folder beside the repository, whose files can be linked into it."""
    with tempfile.TemporaryDirectory(dir=ROOT.parent) as folder:
        yield Path(folder)


def list_doors(annex: str) -> list[str]:
    """The modules outside of an annex that import one of its modules, at any place of a file; of a
    template, the modules that name it."""
    if "/" in annex:
        assert (ROOT / annex).is_file()
        named = f'"{Path(annex).name}"'
        found = [name for name, file in modules().items() if named in file.read_text()]
        return [name.removeprefix("pipeline.") for name in found]
    folder = f"pipeline.{annex}"
    inside = {name for name in modules() if f"{name}.".startswith(f"{folder}.")}
    assert inside, f"there is no {folder}"
    outside = (name for name in modules() if name not in inside and imports(name) & inside)
    return sorted(name.removeprefix("pipeline.") for name in outside)


@pytest.mark.medium
@pytest.mark.parametrize("annex", ANNEXES)
def test_annex_is_imported_by_its_doors_alone(annex: str) -> None:
    assert list_doors(annex) == sorted(ANNEXES[annex].doors)


@pytest.mark.slow
@pytest.mark.parametrize("annex", ANNEXES)
def test_default_recipe_trains_without_annex_and_its_use_is_refused(annex: str, copy: Path) -> None:
    copy_without([annex], copy)
    assert set(describe_absence(copy, [annex]).values()) == {""}


@pytest.mark.slow
def test_default_recipe_trains_without_all_annexes(copy: Path) -> None:
    copy_without(ANNEXES, copy)
    wrong = {name: text for name, text in describe_absence(copy, ANNEXES).items() if text}
    assert wrong == {}
