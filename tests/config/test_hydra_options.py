"""Recipes and components that overrides choose: the default recipe, files beside a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline import load_recipe
from pipeline.config import hydra_options
from pipeline.config.compose import compose_and_check
from pipeline.config.hydra_options import DEFAULT_COMPONENTS, find_stored_recipe, resolve_recipe
from pipeline.core.errors import RecipeError
from pipeline.core.files.paths import CONF
from pipeline.core.registry import find_component


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


@pytest.mark.slow
def test_default_recipe_applies_to_its_dataset_and_model_only() -> None:
    """Another network on other data is another run, and 40 epochs are not its length."""
    recipe = compose_and_check(["dataset=mnist", "model=resnet20", "train.epochs=3"])
    assert (recipe.name, recipe.train.epochs) == ("resnet20_mnist", 3)
    assert compose_and_check(["model=mlp", "train.steps=3"]).name == "mlp_digits"
    assert compose_and_check(["dataset=mnist", "train.steps=3", "name=mine"]).name == "mine"
    with pytest.raises(RecipeError, match=r"none is given; add one, as in train.epochs=10, or nam"):
        compose_and_check(["dataset=mnist", "model=resnet20"])


@pytest.mark.slow
def test_default_recipe_survives_overrides_of_its_components() -> None:
    for overrides in ([], ["optimizer=adam"], ["device=cpu"], ["model.name=lenet5"]):
        recipe = compose_and_check(overrides)
        assert (recipe.name, recipe.train.epochs) == ("lenet5_digits", 40)
    named = compose_and_check(["+recipe=lenet5_digits", "model=mlp", "model.hidden=[16]"])
    assert (named.name, named.train.epochs, named.model.name) == ("lenet5_digits", 40, "mlp")


def test_model_sweep_jobs_are_named_after_their_model() -> None:
    swept = resolve_recipe(["model=mlp,lenet5", "train.steps=3"])
    assert swept[-1] == "name=${model.name}_digits"
    assert compose_and_check(["model=mlp", *swept[1:]]).name == "mlp_digits"


def test_default_components_match_conf() -> None:
    defaults = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    assert all({group: name} in defaults for group, name in DEFAULT_COMPONENTS.items())


def test_two_recipes_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"given 2 times, \+recipe=a \+recipe=b; give one"):
        compose_and_check(["+recipe=a", "+recipe=b"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["12", "null", "ä", "recipe (1)", "a'b", "~t"])
def test_recipe_file_may_have_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(f"{name}.yaml").write_text("defaults: [lenet5_digits]\nseed: 7\n")
    assert load_recipe(f"./{name}.yaml").seed == 7


def test_recipe_file_may_be_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("defaults: [lenet5_digits]\nseed: 7\n")
    assert load_recipe("~/mine.yaml").seed == 7


def test_sweep_has_recipe_files_of_equal_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file of a sweep is an option, also beside one of its name in another folder."""
    monkeypatch.chdir(tmp_path)
    files = ["mine.yaml", "other/mine.yaml", "b.yaml", "a,b.yaml"]
    (tmp_path / "other").mkdir()
    for seed, file in enumerate(files):
        Path(file).write_text(f"defaults: [lenet5_digits]\nseed: {seed}\n")
    (swept,) = resolve_recipe(["+recipe=mine.yaml,other/mine.yaml,b.yaml,lenet5_digits"])
    names = swept.removeprefix("+recipe=").split(",")
    assert (names[0], *names[2:]) == ("mine", "b", "lenet5_digits")
    seeds = [find_stored_recipe(name)["seed"] for name in names[:3]]
    assert seeds == [0, 1, 2]
    assert load_recipe("a,b.yaml").seed == 3
    # A file beside others doesn't replace a shipped recipe, which may be another file's base.
    Path("lenet5_digits.yaml").write_text("defaults: [mlp_mnist]\nseed: 9\n")
    (swept,) = resolve_recipe(["+recipe=mine.yaml,lenet5_digits.yaml"])
    name = swept.split(",")[1]
    assert name.startswith("file-lenet5_digits-")
    assert find_stored_recipe(name)["seed"] == 9
    # Names of more than a path may have, together.
    shipped = ",".join(["lenet5_digits"] * 20)
    assert resolve_recipe([f"+recipe={shipped}"]) == [f"+recipe={shipped}"]
    with pytest.raises(RecipeError, match=r"recipe = none\.yaml: there is no such file"):
        resolve_recipe(["+recipe=mine.yaml,none.yaml"])


def test_missing_base_of_a_recipe_is_explained(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [lenet5_digit]\n")
    with pytest.raises(RecipeError, match="no such recipe; did you mean lenet5_digits"):
        load_recipe(str(tmp_path / "mine.yaml"))


def test_component_with_the_name_of_a_shipped_option_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shipped option would have been chosen silently."""
    others = {"model": {"resnet18": find_component("model", "mlp")}}
    monkeypatch.setattr(hydra_options, "list_other_components", lambda group: others.get(group, {}))
    assert load_recipe("lenet5_digits").model.name == "lenet5"
    with pytest.raises(RecipeError, match="model = resnet18: is a shipped model and a custom one"):
        load_recipe("lenet5_digits", ["model=resnet18"])


def test_custom_component_takes_defaults_of_its_name(tmp_path: Path) -> None:
    own = write(tmp_path, "quick.yaml", "name: adam\nlr: 0.5\n")
    plain = load_recipe("lenet5_digits", ["optimizer=adam", "train.optimizer.lr=0.5"])
    assert load_recipe("lenet5_digits", [f"optimizer={own}"]) == plain
    data = write(tmp_path, "fixed.yaml", "name: digits\ntrain: {shuffle: false}\n")
    digits = load_recipe("lenet5_digits", [f"dataset={data}"]).dataset
    assert not digits.train.shuffle
    assert digits.train.drop_remainder


@pytest.mark.medium
def test_component_with_ambiguous_defaults_is_refused(tmp_path: Path) -> None:
    """Which of the ResNets a file means can't be guessed."""
    own = write(tmp_path, "mine.yaml", "name: resnet\nwidths: [8, 16, 32]\n")
    with pytest.raises(RecipeError, match=r"resnet: the section lacks block, blocks, stem; give"):
        load_recipe("lenet5_digits", [f"model={own}"])


@pytest.mark.slow
def test_recipe_selects_a_component_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "components").mkdir()
    write(tmp_path / "components", "quick.yaml", "name: adam\nlr: 0.5\n")
    write(tmp_path, "thin.yaml", "defaults: [resnet20, _self_]\nwidths: [8, 16, 32]\n")
    chosen = "[override /optimizer: ./components/quick.yaml, override /model: thin.yaml]"
    mine = write(tmp_path, "mine.yaml", f"defaults: {chosen}\ntrain: {{steps: 3}}\n")
    recipe = load_recipe(str(mine))
    assert (recipe.train.optimizer.name, recipe.train.optimizer.lr) == ("adam", 0.5)
    assert recipe.model.model_dump()["widths"] == (8, 16, 32)
    assert load_recipe(str(mine), ["optimizer=sgd"]).train.optimizer.name == "sgd"


@pytest.mark.slow
def test_recipes_of_two_folders_may_share_file_names(tmp_path: Path) -> None:
    rates = {"one": 0.1, "two": 0.2}
    for name, lr in rates.items():
        folder = tmp_path / name
        folder.mkdir()
        write(folder, "quick.yaml", f"name: adam\nlr: {lr}\n")
        chosen = "defaults: [override /optimizer: quick.yaml]"
        write(folder, f"{name}.yaml", f"{chosen}\ntrain: {{steps: 3}}\n")
    for name, lr in rates.items():
        recipe = load_recipe(str(tmp_path / name / f"{name}.yaml"))
        assert recipe.train.optimizer.lr == lr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "typed", "expected"),
    [
        ("{a: image, b: features}", "[image,features]", ("image", "features")),
        ("{a: image, b: features}", "{c: image}", {"c": "image"}),
        ("[image, features]", "{c: image}", {"c": "image"}),
        ("{a: image, b: features}", "image", "image"),
        ("{a: image, b: features}", "null", None),
    ],
)
def test_inputs_replace_those_of_the_recipe(
    written: str, typed: str, expected: object, tmp_path: Path
) -> None:
    """A section isn't merged with the recipe's, and a list may take its place."""
    lines = ["# @package _global_", "defaults: [override /model: mlp]", "train: {steps: 1}"]
    file = write(tmp_path, "mine.yaml", "\n".join([*lines, f"model: {{inputs: {written}}}"]))
    assert compose_and_check([f"+recipe={file}", f"model.inputs={typed}"]).model.inputs == expected


def test_replaced_overrides_are_resolved_once() -> None:
    once = resolve_recipe(["model.inputs=[image]"])
    assert resolve_recipe(once) == once
