"""Components that are found in the text of the package's modules."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeline.core import registry
from pipeline.core.registry import is_shipped, list_modules, load_all, read_index


@pytest.mark.medium
def test_text_has_the_components_that_modules_register() -> None:
    load_all()
    registered = {
        (kind, name): cls.__module__
        for kind, by_name in registry._components.items()
        for name, cls in by_name.items()
        if is_shipped(cls)
    }
    index = read_index()
    assert registered == {
        (kind, name): module for kind in index for name, module in index[kind].items()
    }
    assert set(registered.values()) <= set(list_modules())


def test_modules_of_components_are_listed_once() -> None:
    assert len(registry.COMPONENT_MODULES) == len(set(registry.COMPONENT_MODULES))


LOADED = """
import sys
from pipeline import load_recipe
load_recipe("lenet5_digits")
from pipeline.core.registry import list_modules
print(*(name for name in list_modules() if name in sys.modules and "source" in name))
print([name for name in ("networks.residual", "imported.model_specs", "layers.tokens")
    if f"pipeline.models.{name}" in sys.modules])
"""


@pytest.mark.slow
def test_recipe_imports_only_the_components_that_it_names() -> None:
    result = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert result.stdout.splitlines() == ["pipeline.data.sources.digits", "[]"], result.stderr


REPEATED = """
from pydantic import ValidationError
from pipeline.core.registry import load_all
from pipeline.config.recipe import Recipe
from pipeline import load_recipe

tree = load_recipe("lenet5_digits").model_dump(mode="json")
CHANGES = [
    ("model", "lenet"), ("model", {"name": "lenet5", "hidden_layers": 1}), ("model", {"init": 1}),
    ("model", 3), ("model", None), ("model", {"name": 5}), ("model", {"name": None}),
    ("model", {"name": "layers", "layers": [{"name": "dense"}, {"name": "relux"}, "relu", 7]}),
    ("model", {"name": "layers", "layers": [{"name": "residual", "layers": ["convo"]}]}),
    ("dataset", {**tree["dataset"], "name": "mnist"}), ("dataset", "records"),
    ("dataset", {**tree["dataset"], "batch_size": "32"}),
    ("device", {"name": "ascend910", "x": 1}), ("device", ["cpu"]),
    *(("train", {**tree["train"], key: value}) for key, value in [
        ("callbacks", ["mlflow", "none"]), ("callbacks", [{"name": "metrics", "x": 1}]),
        ("loss", {"name": "mse", "smoothing": 0.1}), ("optimizer", "adam"), ("loss_scale", -1),
        ("optimizer", {**tree["train"]["optimizer"], "name": "thor"}), ("metrics", ["top0"]),
    ]),
]

def list_errors():
    for key, value in CHANGES:
        try:
            Recipe.model_validate({**tree, key: value})
        except ValidationError as error:
            yield key, error.errors(include_url=False)
        else:
            yield key, None

before = [repr(item) for item in list_errors()]
dumped = Recipe.model_validate(tree).model_dump(mode="json")
as_python = Recipe.model_validate(tree).model_dump()
load_all()
after = [repr(item) for item in list_errors()]
for one, other in zip(before, after, strict=True):
    if one != other:
        print(one, "!=", other)
recipe = Recipe.model_validate(tree)
print(dumped == recipe.model_dump(mode="json") == tree, as_python == recipe.model_dump())
print(sum(not text.endswith("None)") for text in before) > 18)
"""


@pytest.mark.slow
def test_errors_and_values_dont_depend_on_what_is_loaded() -> None:
    result = subprocess.run([sys.executable, "-c", REPEATED], capture_output=True, text=True)
    assert result.stdout.splitlines() == ["True True", "True"], result.stderr


SCHEMA = """
import json, sys
from pipeline.config.recipe import Recipe
from pipeline.core.registry import load_all
from pipeline.models.layers.model_spec import Layer
from pydantic import TypeAdapter
early = Recipe.model_json_schema()
load_all()
late = Recipe.model_json_schema()
print(early == late, TypeAdapter(Layer).json_schema()["anyOf"][0]["enum"][:2])
"""


@pytest.mark.slow
def test_schema_lists_all_components() -> None:
    result = subprocess.run([sys.executable, "-c", SCHEMA], capture_output=True, text=True)
    assert result.stdout.split(" ", 1)[0] == "True", result.stderr


TAKEN = """
from typing import Literal
from pipeline.core.registry import Spec, component
try:
    @component("optimizer")
    class Mine(Spec):
        name: Literal["lamb"] = "lamb"
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_shipped_name_is_refused_before_its_module_is_imported() -> None:
    result = subprocess.run([sys.executable, "-c", TAKEN], capture_output=True, text=True)
    assert result.stdout.startswith("optimizer 'lamb' is already pipeline.training"), result.stderr
