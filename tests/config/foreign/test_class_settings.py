"""Classes in settings: names of metrics, arguments, and what two of them set."""

from __future__ import annotations

from pathlib import Path
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
from pipeline.core.files.safe_yaml import parse_yaml
from tests.config.foreign.rows import list_rows, write_recipe


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


ARGUMENTS: dict[str, Any] = parse_yaml("""
{lr: 0.5, learning_rate: 0.5, initial_learning_rate: 0.5, weight_decay: 0.25, momentum: 0.5,
nesterov: true, betas: [0.5, 0.75], beta_1: 0.5, beta_2: 0.75, eps: 0.25, epsilon: 0.25, alpha: 0.5,
rho: 0.5, centered: true, initial_accumulator_value: 0.5, gamma: 0.5, step_size: 3, power: 2.0,
decay_steps: 3, decay_rate: 0.5, staircase: true, warmup_steps: 2, ignore_class: 3, delta: 0.5,
decay: 0.5, patience: 3, min_delta: 0.25, write_graph: true, data_dir: data, factor: 0.5,
min_lr: 0.25}
""")
"""A value of each argument that has a key."""


@pytest.mark.medium
@pytest.mark.parametrize("trainer", ["lightning", "keras"])
def test_every_entry_of_a_table_composes(trainer: str, tmp_path: Path) -> None:
    """Each class with all its arguments makes a valid recipe that has their values."""
    entries = read_table(trainer)["classes"]
    for name, entry in entries.items():
        uses = entry.get("uses", {})
        if "reason" in entry or " " in name or "boundaries" in entry.get("needs", ""):
            continue
        arguments = {argument: ARGUMENTS[argument] for argument in uses}
        settings = {"a": name, **{f"a.{key}": value for key, value in arguments.items()}}
        adoption = adopt_classes(
            trainer, "", settings, [name_class("a", name, **arguments)], [], {}
        )
        # Early stop and plateaus have a metric by a rule.
        if not uses.keys() & {"min_lr", "patience"}:
            write_recipe(tmp_path, adoption)
        for argument, key in uses.items():
            value = ARGUMENTS[argument]
            keys = dict(zip(key, value, strict=True)) if isinstance(key, list) else {key: value}
            row = list_rows(adoption)[f"a.{argument}"]
            # An argument may choose a variant that another argument isn't used by.
            assert row.keys in (keys, {})
            assert row.keys or entry.get("variants")
