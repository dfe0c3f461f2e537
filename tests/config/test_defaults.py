"""Recipes from before a key was a key.

Keys that have a default in their type are set without a `+`, whether conf/ has them or not.
"""

from __future__ import annotations

import json
from collections import defaultdict
from copy import deepcopy
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from pipeline import load_recipe
from pipeline.config.compose import check, check_tree
from pipeline.config.defaults import (
    fill_missing,
    mark_optional_keys,
    names_every_component,
    normalise_recipe,
)
from pipeline.config.files import SECTIONS, find_groups
from pipeline.config.hydra_options import HYDRA_DEFAULTS, resolve_recipe
from pipeline.config.overrides import list_swept_keys
from pipeline.config.recipe import Recipe
from pipeline.core.files.paths import CONF
from pipeline.core.files.safe_yaml import parse_written_yaml
from pipeline.core.registry import list_components
from pipeline.study.sweep.directory import Command, Sweeper

KEYS = [
    "seed",
    "debug",
    "autotune_search",
    "cache",
    "cache.compiled",
    "monitor.early_stop",
    "monitor.early_stop.patience",
    "checkpoint.rules",
    "train.mode",
    "train.dispatch_seconds",
    "train.ema",
    "train.ema.warmup",
    "train.clip",
    "train.optimizer.nesterov",
    "train.loss.smoothing_convention",
    "dataset.buckets",
    "dataset.train.num_shards",
    "dataset.eval.batch_size",
    "model.init",
]


def without(tree: dict[str, Any], *keys: str) -> dict[str, Any]:
    stripped = deepcopy(tree)
    for key in keys:
        *path, last = key.split(".")
        section = stripped
        for name in path:
            section = section.get(name, {})
        section.pop(last, None)
    return stripped


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return load_recipe("mlp_mnist").model_dump(mode="json")


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_missing_key_takes_its_default(key: str, whole: dict[str, Any]) -> None:
    stripped = without(whole, key)
    assert stripped != whole
    assert check_tree(fill_missing(stripped)) == check_tree(whole)


@pytest.mark.medium
def test_missing_keys_are_filled_and_present_keys_unchanged(whole: dict[str, Any]) -> None:
    changed = without(whole, *KEYS)
    changed["train"]["optimizer"]["lr"] = 0.123
    changed["dataset"]["train"]["shuffle"] = False
    filled = fill_missing(changed)
    assert filled["train"]["optimizer"]["lr"] == 0.123
    assert filled["dataset"]["train"]["shuffle"] is False
    assert check_tree(without(filled)) is not None


@pytest.mark.slow
def test_missing_component_key_takes_default_of_closest_option() -> None:
    """All ResNets have one name, and each has a file of its own."""
    for name in ("resnet20_cifar10", "resnet50_cifar10"):
        tree = load_recipe(name).model_dump(mode="json")
        for key in set(tree["model"]) - {"name"}:
            filled = normalise_recipe(without(tree, f"model.{key}"))
            assert filled["model"].keys() == tree["model"].keys()


@pytest.mark.slow
def test_missing_device_key_takes_default_of_base_file() -> None:
    tree = load_recipe("lenet5_digits", ["device=ascend910_proa"]).model_dump(mode="json")
    assert normalise_recipe(without(tree, "device.strict", "device.hbm_gib")) == tree


def test_key_without_default_remains_missing(whole: dict[str, Any]) -> None:
    filled = fill_missing(without(whole, "train.optimizer", "train.loss.name"))
    assert "optimizer" not in filled["train"]
    assert "name" not in filled["train"]["loss"]


def test_invalid_values_are_left_to_validation(whole: dict[str, Any]) -> None:
    wrong = without(whole, "seed")
    wrong["train"]["batch_size"] = "many"
    wrong["unheard_of"] = 1
    filled = fill_missing(wrong)
    assert filled["seed"] == 1
    assert normalise_recipe(wrong) == filled


def test_recipe_without_a_component_does_not_name_every_component(whole: dict[str, Any]) -> None:
    assert names_every_component(whole)
    assert not names_every_component({**whole, "defaults": []})
    for component in ("model", "train.loss", "train.schedule.name"):
        assert not names_every_component(without(whole, component))
    assert not names_every_component({"train": {"loss": 3}})


def test_arguments_of_custom_networks_keep_their_names(whole: dict[str, Any]) -> None:
    arguments = {"passes": 3, "inner": {"every_passes": 2}}
    model = {"name": "function", "call": "net:build", "arguments": arguments}
    assert fill_missing({**whole, "model": model})["model"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ({"epochs": 10, "passes": None, "sink_size": 1000}, {"epochs": None, "sink_epochs": 10}),
        ({"epochs": 90, "passes": None, "sink_size": -1}, {"epochs": 90, "sink_epochs": None}),
        ({"epochs": 90, "passes": None, "sink_size": "auto"}, {"epochs": 90, "sink_epochs": None}),
        ({"epochs": None, "passes": 40, "sink_size": 200}, {"epochs": 40, "sink_epochs": None}),
        ({"epochs": None, "passes": None, "steps": 7}, {"epochs": None, "sink_epochs": None}),
    ],
)
def test_run_of_an_earlier_version_has_the_length_that_it_had(
    former: dict[str, Any], now: dict[str, Any]
) -> None:
    """`train.epochs` counted sinks of a positive size, and an epoch was called a pass."""
    tree = load_recipe("lenet5_digits").model_dump(mode="json")
    train = {**tree["train"], "steps": None, **former}
    del train["sink_epochs"]
    saving = {key: value for key, value in tree["checkpoint"].items() if key != "every_epochs"}
    old = {**tree, "train": train, "checkpoint": {**saving, "every_passes": 3}}
    filled = fill_missing(old)
    assert {key: filled["train"][key] for key in now} == now
    assert "passes" not in filled["train"]
    assert filled["checkpoint"]["every_epochs"] == 3
    assert old["train"] == train
    if any(now.values()):
        assert check_tree(filled).train.epochs == now["epochs"]


def composed(*overrides: str) -> Recipe:
    """The config that Hydra composes from a command line at the first attempt."""
    known = resolve_recipe(["+recipe=lenet5_digits", *overrides])
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), job_name="test", **HYDRA_DEFAULTS):
        return check(compose("config", known), known)


def optional_keys_that_conf_lacks() -> dict[tuple[str, str], dict[str, object]]:
    """Defaults by key, by (group, option); for one option of every component."""
    found = {}
    for group in SECTIONS:
        for option, file in find_groups()[group].items():
            tree = parse_written_yaml(file.read_text("utf-8"))
            spec = list_components(group).get(tree.get("name", ""))
            for field, info in spec.model_fields.items() if spec is not None else ():
                if not info.is_required() and field not in tree:
                    key = ".".join((*SECTIONS[group], field))
                    found[tree["name"], field] = (group, option, key, info.default)
    by_option: dict[tuple[str, str], dict[str, object]] = defaultdict(dict)
    for group, option, key, default in found.values():
        by_option[group, option][key] = default
    return by_option


OPTIONAL_KEYS = optional_keys_that_conf_lacks()


@pytest.mark.slow
@pytest.mark.parametrize(("group", "option"), OPTIONAL_KEYS)
def test_every_optional_key_that_conf_lacks_can_be_set(group: str, option: str) -> None:
    defaults = OPTIONAL_KEYS[group, option]
    keys = [f"{key}={json.dumps(default)}" for key, default in defaults.items()]
    if option in ("image_folder", "image_masks", "numpy", "records"):
        keys.append("dataset.root=x")
    if option == "audio_folder":
        keys.append("dataset.seconds=1")
    recipe = composed(f"{group}={option}", *keys)
    for key, default in defaults.items():
        value: object = recipe
        for name in key.split("."):
            value = getattr(value, name)
        assert value == default, key


RULES = "[{pattern: 'conv_*', init: zeros}]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    [
        f"model.init.rules={RULES}",
        f"model.init={{rules: {RULES}}}",
        f"+model.init.rules={RULES}",
        f"++model.init.rules={RULES}",
    ],
)
def test_rules_for_initial_weights_can_be_set(override: str) -> None:
    init = composed("model=resnet18", override).model.init
    assert [rule.pattern for rule in init.rules] == ["conv_*"]
    assert init.conv.name == "he_normal"


@pytest.mark.slow
def test_nested_components_accept_their_keys() -> None:
    train = composed(
        "train.on_nan={name: rollback, most: 5}",
        "train.loss_scale={name: dynamic, factor: 4}",
        "checkpoint.every_steps=5",
    ).train
    assert train.on_nan.most == 5
    assert train.loss_scale.factor == 4


def test_only_optional_keys_are_added() -> None:
    overrides = [
        *("train.steps=3", "model.name=resnet", "train.optimizer.lr=1", "model=resnet18"),
        *("model.paddin=same", "hydra.sweep.dir=x", "+model.padding=same", "~model", "nonsense"),
    ]
    assert mark_optional_keys(overrides) == overrides
    assert mark_optional_keys(["model.padding=same"]) == ["++model.padding=same"]


def test_optional_keys_can_be_swept() -> None:
    known = resolve_recipe(["model=resnet18", "model.padding=same,symmetric"])
    assert list_swept_keys(known) == ["model.padding"]
    command = Command(overrides=(), sweeper=Sweeper(params={"model.padding": "same,symmetric"}))
    assert command.arguments == ["++model.padding=same,symmetric"]
