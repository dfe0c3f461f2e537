"""Classes in settings: names of metrics, arguments, and what two of them set."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.config.files import find_groups
from pipeline.config.foreign.adopt import read_table
from pipeline.config.foreign.class_settings import (
    ClassSettings,
    adopt_classes,
    list_leaves,
    mark_repeated,
    translate_metric,
)
from pipeline.config.foreign.script import Expression
from tests.config.foreign.rows import list_rows


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("val_loss", "loss"),
        ("val/acc", "accuracy"),
        ("validation.accuracy", "accuracy"),
        ("val_sparse_categorical_accuracy", "accuracy"),
        ("eval_f1", "f1"),
        ("loss", None),
        ("train_loss", None),
        ("val_dice_loss", None),
        ("val/acc_best", None),
        (3, None),
    ],
)
def test_metric_of_evaluations_is_translated(name: Any, metric: str | None) -> None:
    assert translate_metric(name) == metric


def test_name_without_prefix_may_be_of_evaluations() -> None:
    assert translate_metric("accuracy", is_evaluated=True) == "accuracy"
    assert translate_metric("train_loss", is_evaluated=True) is None


def test_leaves_have_dotted_names() -> None:
    tree = {"a": {"b": [1, 2], "c": {}}, "d.e": [{"f": 1}, 2]}
    leaves = [("a.b", [1, 2]), ("a.c", {}), ("'d.e'.0.f", 1), ("'d.e'.1", 2)]
    assert list(list_leaves(tree)) == leaves


def name_class(setting: str, name: str, **arguments: Any) -> ClassSettings:
    return ClassSettings(setting, f"{setting}.", name, arguments)


def test_second_class_with_the_same_role_is_not_used() -> None:
    classes = [name_class("a", "Adam"), name_class("b", "x.SGD"), name_class("c", "StepLR")]
    assert [item.used for item in mark_repeated("lightning", classes)] == ["", "a", ""]
    callbacks = [name_class("a", "EarlyStopping"), name_class("b", "EarlyStopping")]
    assert [item.used for item in mark_repeated("lightning", callbacks)] == ["", "a"]


def test_argument_that_is_no_constant_has_no_default() -> None:
    settings = {"a": "SGD", "a.lr": Expression("rate")}
    adoption = adopt_classes(
        "lightning", "a file", settings, [name_class("a", "SGD")], [], {"a.lr": "is code"}
    )
    rows = list_rows(adoption)
    assert (rows["a.lr"].keys, rows["a.lr"].note) == ({}, "is code")
    added = adopt_classes("lightning", "", {"a": "SGD"}, [name_class("a", "SGD")], [], {})
    assert list_rows(added)["a.lr"].keys == {"train.optimizer.lr": 0.001}


@pytest.mark.parametrize("name", ["hub_token", "x.api_key", "PASSWORD", "a.apikey"])
def test_values_of_secrets_are_hidden(name: str) -> None:
    adoption = adopt_classes("lightning", "", {name: "mine", "tokens": 3}, [], [], {})
    assert adoption.settings == {name: "(hidden)", "tokens": 3}


@pytest.mark.parametrize("trainer", ["lightning", "keras", "TrainingArguments"])
def test_tables_name_files_that_exist(trainer: str) -> None:
    """Groups in tables are options of conf/, and variants are entries."""
    table = read_table(trainer)
    entries = table.get("classes", {})
    choices = [choice for values in table["choices"].values() for choice in values.values()]
    groups = find_groups()
    for entry in (*entries.values(), *choices):
        assert ("reason" in entry) != ("sets" in entry)
        for key, value in entry.get("sets", {}).items():
            assert "." in key or value in groups[key]
        assert set(entry.get("variants", {}).values()) <= set(entries)
