"""The JSON schema of recipes, and the files that editors hold against it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pipeline.cli.schema import recipe_schema
from pipeline.core.files.paths import CONF, RECIPES

ROOT = CONF.parent
FILES = sorted([CONF / "config.yaml", *CONF.glob("*/*.yaml"), *RECIPES.glob("*.yaml")])
MARK = "# yaml-language-server: $schema="


@cache
def whole_schema() -> dict[str, Any]:
    return recipe_schema()


def schema_of(file: Path) -> dict[str, Any]:
    """The schema that a file's first lines name, its fragment looked up as an editor does.

    The file is not committed: docs/recipes.md has the command that makes it for an editor.
    """
    (line,) = [x for x in file.read_text().splitlines()[:3] if x.startswith(MARK)]
    target, _, fragment = line.removeprefix(MARK).partition("#")
    assert (file.parent / target).resolve() == ROOT / "recipe.schema.json"
    node = whole_schema()
    for key in fragment.strip("/").split("/") if fragment else ():
        node = node[key]
    return {"$defs": whole_schema()["$defs"], **node}


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_shipped_file_fits_the_schema_it_names(file: Path) -> None:
    tree = yaml.safe_load(file.read_text())
    tree.pop("hydra", None)
    schema = schema_of(file)
    problems = jsonschema.validators.validator_for(schema)(schema).iter_errors(tree)
    assert [problem.message for problem in problems] == []


def test_schema_is_checked_for_every_shipped_file() -> None:
    assert len(FILES) > 35


@pytest.mark.slow
@pytest.mark.parametrize(
    "tree",
    [
        {"train": {"sink_sise": 5}},
        {"train": {"batch_size": "32"}},
        {"model": {"name": "lenet6"}},
        {"dataset": {"train": {"ops": ["resise"]}}},
    ],
)
def test_schema_refuses_wrong_recipes(tree: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree, whole_schema())
