"""Hydra's private modules, and the differences between Hydra 1.3 and 1.4."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigLoadError, ConfigStore
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

__all__ = [
    "HYDRA_DEFAULTS",
    "BasicLauncher",
    "BasicSweeper",
    "allow_lazy_help",
    "apply_overrides",
    "find_stored_recipe",
    "get_args_parser",
    "set_override_dirname",
    "store_option",
]

_IS_1_3 = hydra.__version__.startswith("1.3.")

HYDRA_DEFAULTS: Mapping[str, str] = {"version_base": "1.3"} if _IS_1_3 else {}
"""Arguments that select the defaults of Hydra 1.3, which later versions have without arguments."""


def store_option(group: str, name: str, package: str, node: Any) -> None:
    """Register an option of a group of the config, replacing an earlier option of that name."""
    options: dict[str, Any] = {} if _IS_1_3 else {"replace": True}
    ConfigStore.instance().store(group=group, name=name, package=package, node=node, **options)


def find_stored_recipe(name: str) -> dict[str, Any]:
    """Return the keys of a registered recipe; empty for an unknown recipe."""
    try:
        node = ConfigStore.instance().load(f"recipe/{name}.yaml").node
    except ConfigLoadError:
        return {}
    return cast(dict[str, Any], OmegaConf.to_container(node))


def apply_overrides(overrides: list[Override], config: DictConfig) -> None:
    """Apply overrides of plain values to a composed config, in place."""
    ConfigLoaderImpl._apply_overrides_to_config(overrides, config)


def set_override_dirname(job: DictConfig, overrides: list[Override]) -> None:
    """Set `hydra.job.override_dirname` by overrides. Hydra 1.4 derives it when the key is read."""
    if OmegaConf.is_interpolation(job, "override_dirname"):
        return
    from hydra._internal.config_loader_impl import get_overrides_dirname

    settings = job.config.override_dirname
    job.override_dirname = get_overrides_dirname(
        overrides=overrides,
        kv_sep=settings.kv_sep,
        item_sep=settings.item_sep,
        exclude_keys=settings.exclude_keys,
    )


@contextmanager
def allow_lazy_help() -> Iterator[None]:
    """Allow Hydra to describe a flag by an object that becomes a text when it is shown.

    Since Python 3.14, argparse reads the help of a flag when the flag is added. Hydra 1.3 doesn't
    expect that.
    """
    check = getattr(argparse.ArgumentParser, "_check_help", None)
    if check is None:
        yield
        return

    def check_text(parser: argparse.ArgumentParser, action: argparse.Action) -> None:
        if isinstance(action.help, str):
            check(parser, action)

    parser_class: Any = argparse.ArgumentParser
    parser_class._check_help = check_text
    try:
        yield
    finally:
        parser_class._check_help = check
