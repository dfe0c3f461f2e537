"""Both versions of Hydra compose, register options and describe flags, on every Python."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from pipeline.config.hydra_options import (
    BasicSweeper,
    allow_lazy_help,
    apply_overrides,
    get_args_parser,
    store_option,
)


@pytest.fixture
def eager_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let argparse read the help of a flag when the flag is added, as since Python 3.14."""

    def check(parser: argparse.ArgumentParser, action: argparse.Action) -> None:
        if action.help and "%" in action.help:
            parser._get_formatter()._expand_help(action)

    def add_argument(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> argparse.Action:
        action = original(parser, *args, **kwargs)
        parser._check_help(action)  # type: ignore[attr-defined]
        return action

    original = argparse.ArgumentParser.add_argument
    monkeypatch.setattr(argparse.ArgumentParser, "_check_help", check, raising=False)
    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", add_argument)


@pytest.mark.usefixtures("eager_help")
def test_lazy_flag_help_is_allowed() -> None:
    with allow_lazy_help():
        parsed = get_args_parser().parse_intermixed_args(["--cfg", "job", "seed=1"])
    assert (parsed.cfg, parsed.overrides) == ("job", ["seed=1"])


@pytest.mark.usefixtures("eager_help")
def test_help_of_other_flags_is_still_checked() -> None:
    parser = argparse.ArgumentParser()
    with allow_lazy_help(), pytest.raises(ValueError, match="format"):
        parser.add_argument("--share", help="100 %")
    check = argparse.ArgumentParser._check_help  # type: ignore[attr-defined]
    assert check.__name__ == "check"


def test_stored_option_replaces_an_earlier_one() -> None:
    for node in ({"seed": 1}, {"seed": 2}):
        store_option(group="recipe", name="versions_test", package="_global_", node=node)
    stored = ConfigStore.instance().repo["recipe"].pop("versions_test.yaml")
    assert stored.node == {"seed": 2}


def test_overrides_are_applied_to_a_composed_config() -> None:
    config = OmegaConf.create({"train": {"lr": 0.1, "steps": 5}})
    apply_overrides(OverridesParser.create().parse_overrides(["train.lr=0.2"]), config)
    assert config == {"train": {"lr": 0.2, "steps": 5}}


def test_grid_is_the_product_of_its_values() -> None:
    parsed = OverridesParser.create().parse_overrides(["a=1,2", "b=3"])
    assert BasicSweeper.split_arguments(parsed, None) == [[["a=1", "b=3"], ["a=2", "b=3"]]]
