"""The command `adopt`: the file that it writes, its report and its refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeline import load_recipe
from pipeline.core.errors import RecipeError, RunError, UsageError
from tests.command_line import adopt
from tests.config.foreign.files import (
    HYDRA,
    KERAS,
    LIGHTNING_CLI,
    PLAIN_RUN,
    SMALL,
    TIMM,
    TRAINING_ARGUMENTS,
    to_yaml,
)

FILES = [
    *("squeezenet.yaml", "args.yaml", "train.py"),
    *("config.yaml", "fit.yaml", "digits.py", "training_args.json"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a file of each trainer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "squeezenet.yaml").write_text(to_yaml({**SMALL, "mystery": 7}))
    (tmp_path / "args.yaml").write_text(to_yaml(TIMM))
    (tmp_path / "train.py").write_text(PLAIN_RUN)
    (tmp_path / "config.yaml").write_text(HYDRA)
    (tmp_path / "fit.yaml").write_text(LIGHTNING_CLI)
    (tmp_path / "digits.py").write_text(KERAS)
    (tmp_path / "training_args.json").write_text(json.dumps(TRAINING_ARGUMENTS))
    return tmp_path


@pytest.mark.medium
@pytest.mark.parametrize("name", FILES)
def test_adopted_file_becomes_recipe_of_its_name(name: str, folder: Path) -> None:
    assert adopt([name]) == 0
    stem = Path(name).stem
    assert (folder / "recipes" / f"{stem}.yaml").exists()
    assert load_recipe(stem).name == stem


@pytest.mark.medium
def test_report_has_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert adopt(["squeezenet.yaml", "--out", "mine.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "mapped    epoch_size = 2: train.epochs=2" in lines
    assert "unmapped  mystery = 7: has no counterpart in a recipe" in lines
    assert lines[-2] == "mindcv's squeezenet.yaml: 25 of 33 settings mapped"
    text = Path("mine.yaml").read_text()
    assert "# Unmapped: mystery = 7: has no counterpart in a recipe\n" in text


def test_key_with_a_line_break_stays_in_its_comment() -> None:
    text = 'seed: 1\nseed_everything: 2\ntrainer: {"a\\nseed: 3\\nb": {_target_: SGD}}\n'
    text += "model: {_target_: Adam}"
    Path("broken.yaml").write_text(text)
    assert adopt(["broken.yaml"]) == 0
    lines = Path("recipes", "broken.yaml").read_text().splitlines()
    assert [line for line in lines if line.startswith("seed:")] == ["seed: 1"]


@pytest.mark.medium
def test_json_output_has_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert adopt(["train.py", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["file"] == "recipes/train.yaml"
    states = {fact["setting"]: fact["state"] for fact in facts["settings"]}
    assert states["iterations_per_loop"] == "mapped"
    assert states["device"] == "added"


def test_yaml_that_runs_code_is_refused(folder: Path) -> None:
    Path("evil.yaml").write_text('epoch_size: !!python/object/apply:os.system ["touch executed"]')
    with pytest.raises(RecipeError, match=r"evil\.yaml: .*!!python/object/apply:os\.system"):
        adopt(["evil.yaml"])
    assert not (folder / "executed").exists()
    assert not (folder / "recipes").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- 1", "must be a YAML file of mindcv"),
        ("train: {steps: 3}", "must be a YAML file of mindcv"),
        ("a: *a", "not readable as data"),
        ("epoch_size: 0\nmodel: resnet18", "train.epochs = 0"),
        (
            "defaults: [_self_, {data: mnist}]\nseed: 3",
            "a part of a config, with a list of defaults",
        ),
        ("trainer: {max_epochs: 0}", "train.epochs = 0"),
        ("num_train_epochs: many", "num_train_epochs = many: must be a number"),
    ],
)
def test_unrecognised_yaml_is_refused(text: str, problem: str) -> None:
    Path("other.yaml").write_text(text)
    with pytest.raises(RecipeError, match=problem):
        adopt(["other.yaml"])
    assert not Path("recipes").exists()


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("wrong.json", '{"seed": 1,', "not readable as data: .*line 1 column 12"),
        ("wrong.json", '{"seed": 1}', "must be a YAML file of mindcv .*, a JSON file"),
        ("wrong.py", "import keras\nmodel.compile('adam')", "never calls fit"),
        ("wrong.py", "import keras\nmodel.fit(", "isn't Python"),
        ("wrong.py", "import torch", "has no Keras and has 0 calls of NPURunConfig; must be"),
    ],
)
def test_wrong_file_is_refused(name: str, text: str, problem: str) -> None:
    Path(name).write_text(text)
    with pytest.raises(RecipeError, match=problem):
        adopt([name])
    assert not Path("recipes").exists()


def test_script_of_both_is_the_adapters() -> None:
    Path("both.py").write_text(f"from tensorflow import keras\n{PLAIN_RUN}")
    assert adopt(["both.py"]) == 0
    assert "NPURunConfig of both.py" in Path("recipes", "both.yaml").read_text()


def test_unreadable_files_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"nowhere\.yaml: can't be read"):
        adopt(["nowhere.yaml"])
    os.mkfifo("pipe.py")
    with pytest.raises(RecipeError, match=r"pipe\.py: .*isn't a regular file"):
        adopt(["pipe.py"])


def test_existing_file_is_not_replaced() -> None:
    Path("mine.yaml").write_text("name: mine")
    with pytest.raises(UsageError, match=r"--out mine\.yaml: exists already; must be a new file"):
        adopt(["args.yaml", "--out", "mine.yaml"])
    assert Path("mine.yaml").read_text() == "name: mine"
    with pytest.raises(UsageError, match=r"--out mine\.txt: must end in \.yaml"):
        adopt(["args.yaml", "--out", "mine.txt"])


def test_uncreatable_folder_is_an_error() -> None:
    with pytest.raises(RunError, match=r"args\.yaml: can't be written: File exists"):
        adopt(["train.py", "--out", "args.yaml/mine.yaml"])
