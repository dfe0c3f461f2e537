"""The table of names from other frameworks: every name of this project in it exists (G-06)."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pipeline import load_recipe
from pipeline.cli.commands.root import ROOT as CLI
from pipeline.config.adapter_words import AdapterWords
from pipeline.config.recipe import Recipe
from pipeline.core.plugins.loading import FLAG
from pipeline.core.registry import list_components
from tests.conftest import ROOT

DOCUMENT = ROOT / "docs" / "api-names.md"
GOLDEN = ROOT / "tests" / "golden" / "api_names.txt"
KINDS = ("dataset", "initializer", "layer", "loss", "loss_scale", "model", "op", "optimizer")
COMPONENT = re.compile(rf"({'|'.join((*KINDS, 'schedule', 'selection'))}) (\w+)(?:\(([\w, ]+)\))?")
GROUP = re.compile(r"(device|launch)=(\w+)")
COMMAND = re.compile(r"python -m pipeline(?: (\w+))?")
PYTHON = re.compile(r"(pipeline(?:\.\w+)*)\.(\w+)")
KEY = re.compile(r"[a-z_]+(?:\.[a-z0-9_]+)*(?:=\w+)?")
ELSEWHERE = {"__call__", "jax.custom_vjp", "conv_0/kernel", "smoothing_convention: uniform"}
"""Names of Python, of jax, of parameters, and a key with its value."""


def rows() -> list[str]:
    """The rows of all tables, without their headings."""
    lines = DOCUMENT.read_text().splitlines()
    tables = [line for line in lines if line.startswith("|") and not line.startswith("| ---")]
    return [line for line in tables if "here |" not in line]


def names_by_rule() -> list[str]:
    """The components that the lists of foreign names stand for, as the tables write them."""
    lists = DOCUMENT.read_text().partition("\n* Layers: ")[2].partition("\n\n")[0]
    foreign = re.findall(r"`(nn|optim|vision)\.(\w+)((?:\([\w, ]+\))?)`", " ".join(lists.split()))
    return [component_name(module, name) + keys for module, name, keys in foreign]


def component_name(module: str, name: str) -> str:
    """Return the kind and the name of the component of a foreign name, by the document's rule."""
    kind = {"nn": "layer", "optim": "optimizer", "vision": "op"}[module]
    if name.endswith("Loss"):
        kind, name = "loss", name.removesuffix("Loss")
    words = name.removesuffix("2d").replace("ReLU", "Relu")
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", words) if kind in ("layer", "op") else words
    return f"{kind} {snake.lower()}"


def names() -> list[str]:
    """The names by rule, and those in backquotes of the tables' last column, without links."""
    last = [row.rstrip(" |").rsplit(" | ", 1)[1] for row in rows()]
    found = {name for cell in last for name in re.findall(r"`([^`]+)`", cell)}
    return sorted((found - ELSEWHERE) | set(names_by_rule()))


@cache
def tree() -> dict[str, Any]:
    """A recipe with every key that has a default."""
    recipe: Recipe = load_recipe("lenet5_digits", ["device=gpu"])
    return recipe.model_dump()


def is_key(name: str) -> bool:
    """Whether a recipe has a key."""
    if name in {f"train.{word}" for word in AdapterWords.model_fields}:
        return True
    node: Any = tree()
    for key in name.partition("=")[0].split("."):
        if not isinstance(node, dict) or key not in node:
            return False
        node = node[key]
    return True


def exists(name: str) -> bool:
    """Whether a component, a key, a group's file, a command, a flag or a Python name is there."""
    if name == FLAG:
        return True
    if match := COMPONENT.fullmatch(name):
        cls, fields = list_components(match[1]).get(match[2]), (match[3] or "").split(", ")
        return cls is not None and {field for field in fields if field} <= set(cls.model_fields)
    if match := GROUP.fullmatch(name):
        return (ROOT / "conf" / match[1] / f"{match[2]}.yaml").is_file()
    if match := COMMAND.fullmatch(name):
        return match[1] is None or match[1] in CLI.commands
    if match := PYTHON.fullmatch(name):
        return hasattr(importlib.import_module(match[1]), match[2])
    return KEY.fullmatch(name) is not None and is_key(name)


@pytest.mark.parametrize("name", names())
def test_names_of_the_last_column_exist(name: str) -> None:
    assert exists(name)


def test_unknown_names_are_detected() -> None:
    for wrong in ("layer linear", "layer dense(units)", "train.batchsize", "device=tpu"):
        assert not exists(wrong)
    assert not exists(component_name("nn", "Linear"))
    for wrong in ("python -m pipeline fit", "pipeline.core.registry.components_of"):
        assert not exists(wrong)


@pytest.mark.slow
def test_documented_key_values_are_valid() -> None:
    valued = [name for name in names() if re.fullmatch(r"[a-z_]+\.[a-z_.]+=\w+", name)]
    assert valued
    needs = {"parallel.mode=semi_auto": ["parallel.reproducible=layout", "parallel.devices=2"]}
    for name in valued:
        extra = ["parallel.devices=2"] if name == "parallel.mode=data" else needs.get(name, [])
        load_recipe("lenet5_digits", [name, *extra])


@pytest.mark.parametrize("kind", ["loss", "op", "optimizer"])
def test_components_are_in_the_table(kind: str) -> None:
    named = {
        match[2] for name in names() if (match := COMPONENT.fullmatch(name)) and match[1] == kind
    }
    assert set(list_components(kind)) == named


def test_table_rows_are_complete(golden: Callable[[Path, str], str]) -> None:
    """H-04. What the tables have had is still there; new rows need no change of the golden file."""
    subjects = [row.rstrip("| ").rpartition(" | ")[0] for row in rows()] + names_by_rule()
    expected = golden(GOLDEN, "\n".join([*subjects, ""]))
    assert Counter(expected.splitlines()) - Counter(subjects) == Counter()
    assert {row.count("|") - 1 for row in rows()} == {2, 4, 5}


def test_table_of_frameworks_has_the_documents_features() -> None:
    """H-04."""
    table = DOCUMENT.read_text().partition("## What each framework has")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["feature", "PyTorch", "MindSpore", "Keras", "here"]
    mindspore = {row[0]: row[2] for row in cells[2:]}
    assert mindspore == {
        "devices": "CPU, GPU, Ascend",
        "data and model parallel": "`DATA_PARALLEL`, `SEMI_AUTO_PARALLEL`",
        "auto parallel": "`AUTO_PARALLEL`",
        "second-order optimizer": "THOR",
        "eager and graph mode": "both",
        "security and privacy": "MindArmour",
        "dashboard and lineage": "MindInsight",
    }
    assert all(row[-1] for row in cells[2:])
