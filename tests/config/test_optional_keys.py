"""Keys that have a default in their type are set without a `+`, whether conf/ has them or not."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from pipeline.config.compose import check
from pipeline.config.files import SECTIONS, find_groups
from pipeline.config.hydra_options import resolve_recipe
from pipeline.config.hydra_versions import HYDRA_DEFAULTS
from pipeline.config.optional_keys import mark_optional_keys
from pipeline.config.overrides import list_swept_keys
from pipeline.config.recipe import Recipe
from pipeline.core.files.package_paths import CONF
from pipeline.core.files.safe_yaml import parse_written_yaml
from pipeline.core.registry import list_components
from pipeline.study.sweep.command import Command, Sweeper


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
