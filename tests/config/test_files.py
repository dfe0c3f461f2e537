"""Groups and recipes by name, and the first words of their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.files import (
    SECTIONS,
    find_groups,
    find_recipes,
    make_recipe_name,
    read_description,
)


def test_working_folder_recipe_overrides_shipped_recipe(tmp_path: Path) -> None:
    shipped = find_recipes(tmp_path)
    custom = tmp_path / "recipes" / "lenet5_digits.yaml"
    custom.parent.mkdir()
    custom.write_text("")
    (custom.parent / "notes.txt").write_text("")
    there = find_recipes(tmp_path)
    assert there["lenet5_digits"] == custom
    assert set(there) == set(shipped)


@pytest.mark.parametrize(
    ("file", "name"),
    [("a b/my net+1.yaml", "my_net+1"), (".+-x.yaml", "x"), ("x" * 120, "x" * 100), ("+", "new")],
)
def test_recipe_name_has_what_a_recipe_accepts(file: str, name: str) -> None:
    assert make_recipe_name(Path(file), "new") == name


def test_every_group_of_a_section_has_files_with_a_description() -> None:
    groups = find_groups()
    assert set(SECTIONS) <= set(groups)
    assert all(read_description(file) for files in groups.values() for file in files.values())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("# A small network.\nname: mlp\n", "A small network."),
        ("# @package model\n#\n# yaml-language-server: x\n# Words\n", "Words"),
        ("name: mlp\n# too late\n", ""),
        ("", ""),
    ],
)
def test_directives_are_not_read_as_description(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "part.yaml"
    file.write_text(text)
    assert read_description(file) == line
    assert read_description(tmp_path / "missing.yaml") == ""
