"""Components chosen by a custom file: `device=./mine.yaml`.

References between keys: nothing else in a file, no circles, and bounded sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from pipeline import load_recipe
from pipeline.config.hydra_options import resolve_recipe
from pipeline.config.overrides import quote_value
from pipeline.config.recipe_file import (
    MAX_CHAIN,
    find_refused_references,
    iterate_texts,
    require_bounded,
)
from pipeline.core.errors import RecipeError
from pipeline.core.files.paths import CONF
from pipeline.data.sources.image_folder import ImageFolder


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def problem(*overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe("lenet5_digits", overrides)
    (found,) = caught.value.problems
    return found


@pytest.mark.slow
def test_component_can_be_selected_by_file(tmp_path: Path) -> None:
    """It may start from a shipped one, and replaces the recipe's component as a name does."""
    net = write(tmp_path, "thin.yaml", "defaults: [resnet20, _self_]\nwidths: [8, 16, 32]\n")
    loss = write(tmp_path, "distance.yaml", "defaults: [mse, _self_]\n")
    recipe = load_recipe(
        "lenet5_digits", [f"model={net}", f"loss={loss}", "model.block=bottleneck"]
    )
    plain = load_recipe("lenet5_digits", ["model=resnet20", "model.block=bottleneck", "loss=mse"])
    assert recipe.model == plain.model.model_copy(update={"widths": (8, 16, 32)})
    assert recipe.train == plain.train


def test_recipe_file_may_define_an_image_folder(tmp_path: Path) -> None:
    """Over the keys of the default dataset; the two that only this one has need not be given."""
    section = f"dataset: {{name: image_folder, root: {tmp_path}}}"
    recipe = load_recipe(str(write(tmp_path, "own.yaml", f"{section}\ntrain: {{steps: 2}}\n")))
    assert isinstance(recipe.dataset, ImageFolder)
    assert (recipe.dataset.follow_links, recipe.dataset.image_size) == (False, None)


@pytest.mark.medium
def test_custom_device_with_missing_key_is_refused(tmp_path: Path) -> None:
    shipped = (CONF / "device" / "ascend910.yaml").read_text()
    own = "".join(line for line in shipped.splitlines(True) if not line.startswith("hbm_gib:"))
    assert problem(f"device={write(tmp_path, 'mine.yaml', own)}") == (
        "device.name = ascend: the section lacks hbm_gib (GiB); give that, or choose it whole: "
        "device=ascend910 (in a recipe file, `override /device: ascend910` in its defaults)"
    )


def test_circular_defaults_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "mine.yaml", "defaults: [mine, _self_]\n")
    assert problem(f"device={file}").startswith("defaults: must not be circular")


def test_component_file_can_be_swept(tmp_path: Path) -> None:
    file = write(tmp_path, "mine.yaml", "name: cpu\n")
    assert resolve_recipe([f"device={file},cpu"])[-1] == "device=mine,cpu"
    assert resolve_recipe(["device=cpu,gpu"])[-1] == "device=cpu,gpu"


@pytest.mark.slow
def test_problem_of_a_file_is_reported(tmp_path: Path) -> None:
    assert problem("device=none.yaml") == "device = none.yaml: there is no such file"
    taken = write(tmp_path, "cpu.yaml", "name: cpu\n")
    assert problem(f"device={taken}") == (
        f"device = {taken}: cpu is a shipped device; rename the file"
    )
    code = write(tmp_path, "code.yaml", "name: cpu\nhydra: {}\n")
    assert "hydra: must not be in a file" in problem(f"device={code}")
    misspelt = write(tmp_path, "gpus.yaml", "name: gpu\nindxe: 0\nindex: 1\n")
    assert problem(f"device={misspelt}") == (
        "device.indxe = 0: there is no such key; did you mean device.index?"
    )


@pytest.mark.medium
@given(st.text(alphabet="a\\'\" ,=[]{}()é\n$#:~+"))
def test_quoted_value_is_read_literally_by_hydra(text: str) -> None:
    parsed = OverridesParser.create().parse_override(f"key={quote_value(text)}")
    assert str(parsed.value()) == text


@pytest.mark.medium
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("dataset: [1]", "dataset = [1]: must be a section of keys"),
        pytest.param(
            "monitor: [3]\neval: [4]",
            "monitor = [3]: must be a section of keys",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "train: {loss: [mse]}",
            "train.loss = ['mse']: must be a section of keys",
            marks=pytest.mark.slow,
        ),
        pytest.param("stages: {a: 3}", "stages = {'a': 3}: must be a list", marks=pytest.mark.slow),
        pytest.param(
            "dataset: {train: {ops: {a: 3}}}",
            "dataset.train.ops = {'a': 3}: must be a list",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_list_in_place_of_a_section_is_named(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text + "\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(file))
    assert problem in caught.value.problems
    file.write_text("seed: 3\ntrain: {steps: 4}\n")
    assert load_recipe(str(file)).seed == 3


@pytest.mark.slow
def test_several_values_for_one_run_are_refused_with_a_hint() -> None:
    expected = (
        "seed=1,2: has several values; must have one, a list in brackets, or a text in quotes, as "
        "'seed=\"1,2\"'; -m runs each"
    )
    assert problem("seed=1,2") == expected


def test_invalid_mirror_address_is_refused_with_its_pattern() -> None:
    assert problem("dataset=mnist", "dataset.mirrors=[ftp://x]") == (
        "dataset.mirrors.0 = ftp://x: must match ^https?://[^@?#]*$"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("hydra/sweeper=junk", "hydra/sweeper = junk: there is no such sweeper. Choose from basic"),
        (
            "hydra/launcher=junk",
            "hydra/launcher = junk: there is no such launcher. Choose from basic",
        ),
        ("=3", "=3: must be KEY=VALUE"),
    ],
)
def test_hydra_groups_and_overrides_without_key_are_refused(override: str, expected: str) -> None:
    assert problem(override).startswith(expected)


def test_texts_are_listed_with_their_paths() -> None:
    tree = {"a": "x", "b": [1, {"c": "y"}], "d": None}
    assert dict(iterate_texts(tree)) == {("a",): "x", ("b", 1, "c"): "y"}


@pytest.mark.parametrize(
    "text", ["${oc.env:HOME}", "${a}${oc.create:{}}", "${${a}}", "${a", "${.a}"]
)
def test_resolver_is_refused(text: str) -> None:
    (problem,) = find_refused_references({"train": {"steps": text}})
    assert problem.startswith("train.steps = ")
    assert "resolvers such as oc.env are for the command line" in problem


@pytest.mark.parametrize(
    "text", ["${train.batch_size}", "a${b}-${c[0].d}", "${a-b.c}", "no reference", "$a"]
)
def test_reference_to_a_key_is_allowed(text: str) -> None:
    assert list(find_refused_references({"a": [text]})) == []


@pytest.mark.parametrize(
    "tree",
    [
        {"a": "${b}", "b": "${a}"},
        {"a": "${a}"},
        {"a": {"b": "${a}"}},
        {"a": "${b.c}", "b": "${a}"},
        {"a-b": "${c}", "c": "${a-b}"},
    ],
)
def test_circular_or_deep_reference_is_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must not be circular|levels deep|chain of references"):
        require_bounded(tree)


def test_exponential_references_are_refused() -> None:
    tree: dict[str, Any] = {"a0": ["x"] * 10}
    for level in range(1, 8):
        tree[f"a{level}"] = [f"${{a{level - 1}}}"] * 10
    with pytest.raises(ValueError, match="references make more than 100,000 values of it"):
        require_bounded(tree)


@pytest.mark.parametrize("length", [MAX_CHAIN - 1, MAX_CHAIN + 1])
def test_reference_chain_length_is_bounded(length: int) -> None:
    tree: dict[str, Any] = {f"a{number}": f"${{a{number + 1}}}" for number in range(length)}
    tree[f"a{length}"] = 1
    if length < MAX_CHAIN:
        require_bounded(tree)
        return
    with pytest.raises(ValueError, match="a chain of references must have at most 24"):
        require_bounded(tree)


def test_reference_to_missing_key_is_not_checked() -> None:
    """The composition reports a missing key; a check of it here would raise ValueError."""
    require_bounded({"a": "${b.c}", "b": 1})
