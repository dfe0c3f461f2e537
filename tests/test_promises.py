"""The promises of docs/versions.md: deprecations, and what may change on resume."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from pipeline import load_recipe
from pipeline.__main__ import main
from pipeline.core import deprecations
from pipeline.core.deprecations import (
    COMMAND,
    DEPRECATIONS,
    KEY,
    OPTION,
    Deprecation,
    rename_arguments,
)
from pipeline.core.errors import RecipeError
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


def find_broken_promises(entries: Sequence[Deprecation], present: Version) -> list[str]:
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


@pytest.fixture
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deprecations of names that no version has had."""
    names: list[tuple[Any, str, str]] = [
        (KEY, "train.batch", "train.batch_size"),
        (KEY, "model.units", "model.hidden"),
        (KEY, "cache.folder", "cache.root"),
        (KEY, "device.bank", "device.tune_bank"),
        (KEY, "averages", "train.ema"),
        (COMMAND, "complete", "completion"),
        (COMMAND, "convert parameters", "convert weights"),
        (OPTION, "export --format", "--to"),
    ]
    table = [Deprecation(place, name, new, "1.1", "1.3") for place, name, new in names]
    monkeypatch.setattr(deprecations, "DEPRECATIONS", table)
    monkeypatch.setattr(deprecations, "_warned", set())


WARNING = "is called %s now; the former name works until version 1.3\n"


@pytest.mark.usefixtures("_made_up")
def test_deprecated_key_works_with_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        recipe = load_recipe("lenet5_digits", ["train.batch=16", "++averages.decay=0.9"])
        assert recipe.train.batch_size == 16
        assert recipe.train.ema is not None
        assert recipe.train.ema.decay == 0.9
    printed = capsys.readouterr().err
    assert printed == (
        f"warning: train.batch: {WARNING % 'train.batch_size'}"
        f"warning: averages: {WARNING % 'train.ema'}"
    )


@pytest.mark.usefixtures("_made_up")
def test_deprecated_key_of_a_file_works_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network, file = tmp_path / "network.yaml", tmp_path / "mine.yaml"
    network.write_text("name: mlp\nunits: [16]\n")
    file.write_text(
        "defaults: [lenet5_digits, {override /model: ./network.yaml}, _self_]\n"
        "train: {batch: 16, optimizer: {lr: '${train.batch}'}}\naverages: {decay: 0.9}\n"
    )
    recipe = load_recipe(str(file), ["train.clip.norm=${train.batch}"])
    assert recipe.model.model_dump()["hidden"] == (16,)
    assert (recipe.train.batch_size, recipe.train.optimizer.model_dump()["lr"]) == (16, 16)
    assert recipe.train.clip.norm == 16
    assert recipe.train.ema is not None
    assert sorted(capsys.readouterr().err.splitlines(keepends=True)) == [
        f"warning: {file}: averages: {WARNING % 'train.ema'}",
        f"warning: {file}: train.batch: {WARNING % 'train.batch_size'}",
        f"warning: {network}: model.units: {WARNING % 'model.hidden'}",
    ]


@pytest.mark.usefixtures("_made_up")
def test_deprecated_key_of_a_run_is_read_without_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe("lenet5_digits").model_dump(mode="json")
    recipe["train"]["batch"] = recipe["train"].pop("batch_size") + 1
    recipe["cache"]["folder"] = "/elsewhere"
    del recipe["cache"]["root"]
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    read = load_recipe(str(file))
    assert read.train.batch_size == recipe["train"]["batch"]
    assert read.cache.root is None
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("_made_up")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train: {batch: 8, batch_size: 8}",
            "train.batch: is called train.batch_size now; give one",
        ),
        ("averages: {decay: 0.9}\ntrain: 3", "averages: is called train.ema now; give one"),
        ("cache: {folder: /x}", "cache.root = /x: must not be in a file"),
    ],
)
def test_former_and_new_spelling_are_checked_alike(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"defaults: [lenet5_digits, _self_]\n{text}\n")
    with pytest.raises(RecipeError, match=re.escape(f"{file}: {message}")):
        load_recipe(str(file))
    device = tmp_path / "chip.yaml"
    device.write_text("name: ascend910\nbank: /x\n")
    with pytest.raises(RecipeError, match=re.escape(f"{device}: device.tune_bank = /x: must not")):
        load_recipe("lenet5_digits", [f"device={device}"])


@pytest.mark.usefixtures("_made_up")
def test_deprecated_commands_and_options_work_with_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["complete", "bash"]) == 0
    printed = capsys.readouterr()
    assert "pipeline" in printed.out
    assert printed.err == f"warning: complete: {WARNING % 'completion'}"
    assert rename_arguments(["convert", "parameters", "run", "weights.npz"]) == [
        *("convert", "weights", "run", "weights.npz")
    ]
    assert rename_arguments(["export", "run", "out", "--format=onnx"])[-1] == "--to=onnx"
    assert rename_arguments(["report", "run", "--format=x"])[-1] == "--format=x"
    assert rename_arguments(["-m", "+train.batch=1,2", "~averages"]) == [
        *("-m", "+train.batch_size=1,2", "~train.ema")
    ]


def make_deprecations() -> Iterator[str]:
    yield "| in | name | new spelling | since | removed in |\n| --- | --- | --- | --- | --- |"
    for entry in DEPRECATIONS:
        yield (
            f"| {entry.place} | `{entry.name}` | `{entry.new_name}` | {entry.since} "
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
