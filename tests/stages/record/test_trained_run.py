from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipeline.core.errors import DataError, RecipeError
from pipeline.data.columns import ColumnSpec
from pipeline.stages.record.trained_run import parse_samples, read_run_recipe

OLDER = {
    "image": {"shape": [8, 8, 1], "dtype": "uint8", "layout": "hwc"},
    "classes": ["no", "yes"],
    "targets": {"task": "classification", "mean": [], "std": []},
}
"""Samples as runs and exports described them without names of columns."""


def test_images_of_older_runs_are_read() -> None:
    samples = parse_samples(OLDER, Path())
    assert samples.columns == {"image": ColumnSpec((8, 8, 1), "uint8")}
    assert samples.classes == ("no", "yes")


@pytest.mark.parametrize("kind", ["text", "table"])
def test_other_samples_of_older_runs_are_refused(kind: str) -> None:
    with pytest.raises(DataError, match=f"beside its {kind}: .* older version; train it again"):
        parse_samples({**OLDER, kind: {}}, Path())


RECIPE = "name: demo\ntrain:\n  loss:\n    name: custom_loss\n"


def write_run(folder: Path, command: str, plugins: list[str]) -> Path:
    process = {"command": command, "folder": str(folder), "plugins": {name: {} for name in plugins}}
    (folder / "provenance.json").write_text(json.dumps({"processes": [process]}))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.mark.medium
def test_run_with_a_plugin_names_its_flag(tmp_path: Path) -> None:
    """A file by its path, a module by its name."""
    (tmp_path / "my losses.py").touch()
    command = "python -m pipeline --plugin 'my losses.py' --plugin=my_package.parts +recipe=demo"
    run_dir = write_run(tmp_path, command, ["my losses", "my_package.parts"])
    flags = f"--plugin '{tmp_path}/my losses.py' --plugin my_package.parts"
    with pytest.raises(RecipeError, match=re.escape(f"runs load no code: add {flags}")) as caught:
        read_run_recipe(run_dir)
    assert len(caught.value.problems) == 1


@pytest.mark.medium
@pytest.mark.parametrize(
    ("command", "plugins"),
    [("python -m pipeline", []), ("python '", ["a"]), ("python --plugin", ["a"])],
)
def test_other_unknown_component_is_named(tmp_path: Path, command: str, plugins: list[str]) -> None:
    with pytest.raises(RecipeError, match="there is no such loss"):
        read_run_recipe(write_run(tmp_path, command, plugins))
