"""Access to Hydra's private modules, and to functions that differ between Hydra 1.3 and 1.4."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_launcher import BasicLauncher as BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper as BasicSweeper
from hydra._internal.utils import get_args_parser as get_args_parser
from hydra.core.config_store import ConfigLoadError, ConfigStore
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

_IS_1_3 = hydra.__version__.startswith("1.3.")

HYDRA_DEFAULTS: Mapping[str, str] = {"version_base": "1.3"} if _IS_1_3 else {}
"""Arguments of Hydra's functions for the defaults of version 1.3. Hydra 1.4 needs no argument."""


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
    """Set `override_dirname` of `job`, Hydra's section `hydra.job`, to a text of the overrides."""
    if OmegaConf.is_interpolation(job, "override_dirname"):
        return  # Hydra 1.4 makes the text when the key is read.
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
    """Let argparse accept Hydra's help of a flag that is an object, and no text until it is shown.

    Since Python 3.14, argparse checks the help when a flag is added, and would reject Hydra 1.3's.
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
