"""The promises of docs/versions.md: deprecations, and what may change on resume."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from pipeline import load_recipe
from pipeline.core.deprecations import DEPRECATIONS, Deprecation
from pipeline.core.files.tree_diff import iterate_leaves
from pipeline.stages.record.continuity import REFUSED, WARNED
from pipeline.stages.record.recorded_recipe import (
    EQUAL_MODES,
    FREE_TO_CHANGE,
    LENGTH,
    MODE,
    forbids_change,
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
KEPT_MINORS = 2
RULE = "| --- | --- | --- |"


def project_version() -> Version:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return Version(project["version"])


def find_broken_promises(entries: tuple[Deprecation, ...], present: Version) -> list[str]:
    """Return the names that are removed too early, or that should be gone."""
    broken = []
    for entry in entries:
        since, removal = Version(entry.since), Version(entry.removal)
        is_late = removal.major > since.major or removal.minor - since.minor >= KEPT_MINORS
        if removal.major < since.major or not is_late or present >= removal:
            broken.append(entry.name)
    return broken


def test_deprecations_last_two_minor_versions_and_end_later() -> None:
    assert find_broken_promises(DEPRECATIONS, project_version()) == []


@pytest.mark.parametrize(
    ("since", "removal", "present", "is_kept"),
    [
        ("1.0", "1.2", "1.1.9", True),
        ("1.0", "1.1", "1.0.0", False),
        ("1.0", "1.2", "1.2.0", False),
        ("1.0", "2.0", "1.9", True),
        ("1.0", "0.9", "0.8", False),
    ],
)
def test_broken_promise_is_found(since: str, removal: str, present: str, is_kept: bool) -> None:
    entry = Deprecation("recipe.yaml", "old", "new", since, removal)
    assert find_broken_promises((entry,), Version(present)) == ([] if is_kept else ["old"])


def make_deprecations() -> Iterator[str]:
    yield "| file | name | new spelling | since | removed in |\n| --- | --- | --- | --- | --- |"
    for entry in DEPRECATIONS:
        yield (
            f"| {entry.file} | `{entry.name}` | `{entry.new_name}` | {entry.since} "
            f"| {entry.removal} |"
        )


def make_resume_table() -> Iterator[str]:
    """Yield the rows of keys by what a resumed run may do with them."""
    yield f"| what | | |\n{RULE}"
    tree = load_recipe("lenet5_digits").model_dump(mode="json")
    for section in tree:
        yield from _make_rows(section, tree[section])
    for part in WARNED:
        yield f"| {part} | free with a warning | |"
    for part in REFUSED:
        yield f"| {part} | refused | a warning with `train.resume_changed=allow` |"


def _make_rows(section: str, value: Any) -> Iterator[str]:
    leaves = [path[:2] for path, _ in iterate_leaves({section: value})]
    of_others = [path for path in FREE_TO_CHANGE if path[0] == section and len(path) > 1]
    paths = list(dict.fromkeys([*leaves, *of_others])) or [(section,)]
    refused = [path for path in paths if forbids_change(path)]
    free = [path for path in paths if path not in refused]
    if not (refused and free):
        yield f"| `{section}` | {'refused' if refused else 'free'} | |"
        return
    length = [path for path in free if path in LENGTH]
    others = [path for path in free if path not in LENGTH]
    if length:
        yield f"| {_list_keys(length)} | free | later rates follow the new length |"
    yield f"| {_list_keys(others)} | free | |"
    note = f"`mode`: {' and '.join(EQUAL_MODES)} are equal" if MODE in refused else ""
    yield f"| other keys of `{section}` | refused | {note} |".replace("|  |", "| |")


def _list_keys(paths: list[Any]) -> str:
    return ", ".join(f"`{'.'.join(path)}`" for path in sorted(paths))


@pytest.mark.parametrize(
    ("name", "make"), [("deprecations", make_deprecations), ("resume", make_resume_table)]
)
def test_table_is_current(name: str, make: Any, request: pytest.FixtureRequest) -> None:
    """Rewritten with `pytest tests/test_promises.py --update-golden`."""
    pattern = re.compile(rf"(<!-- {name} -->\n\n)(.*?)(\n?<!-- end -->)", re.DOTALL)
    table = "\n".join(make()) + "\n"
    text = PAGE.read_text()
    if request.config.getoption("--update-golden"):
        text = pattern.sub(lambda match: f"{match[1]}{table}\n<!-- end -->", text)
        PAGE.write_text(text)
    found = pattern.search(text)
    assert found is not None
    assert found[2] == table
