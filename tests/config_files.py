"""Recipes composed in less time: config files and overrides are parsed once in a process.

A recipe is composed of some twenty files, which Hydra parses anew for each recipe: a third of the
90 ms that it takes. Overrides are a tenth of it, and maps of choices for files whose defaults
interpolate none a sixth.
"""

from __future__ import annotations

import copy
import os
from typing import Any

# Hydra has no public interface to what it keeps between two compositions.
from hydra._internal import defaults_list as hydra_defaults
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig

_load = ConfigRepository.load_config
_parse = OverridesParser.parse_rule
_create_map = getattr(hydra_defaults, "_create_interpolation_map", None)
_parsed: dict[tuple[Any, ...], ConfigResult | None] = {}
_parsed_overrides: dict[str, Override] = {}


def parse_config_files_once() -> None:
    """Have Hydra copy what it has parsed of a file, as long as the file is unchanged.

    It copies parsed overrides, too, and makes no map of choices that nothing interpolates.
    """
    ConfigRepository.load_config = _load_copy
    OverridesParser.parse_rule = _parse_copy
    if _create_map is not None:
        hydra_defaults._create_interpolation_map = _create_map_if_used


def _parse_copy(self: OverridesParser, text: str, rule: str) -> Any:
    if rule != "override":
        return _parse(self, text, rule)
    if text not in _parsed_overrides:
        _parsed_overrides[text] = _parse(self, text, rule)
    return copy.copy(_parsed_overrides[text])


def _create_map_if_used(overrides: Any, defaults_list: list[Any], self_added: bool) -> DictConfig:
    used = [item for item in defaults_list if not item.is_self() and not item.is_override()]
    if any(item.is_interpolation() for item in used):
        return _create_map(overrides, defaults_list, self_added)
    return DictConfig({})


def _load_copy(self: ConfigRepository, config_path: str) -> ConfigResult | None:
    source = self._find_object_source(config_path, ObjectType.CONFIG)
    # Others are registered from Python, at any time.
    if source is None or source.scheme() not in ("file", "pkg"):
        return _load(self, config_path)
    key = (source.provider, source.path, config_path, *_state_of_file(source, config_path))
    if key not in _parsed:
        _parsed[key] = _load(self, config_path)
    return copy.deepcopy(_parsed[key])


def _state_of_file(source: ConfigSource, config_path: str) -> tuple[int, ...]:
    """Return what changes with a file's content; nothing for files of an installed package."""
    if source.scheme() == "pkg":
        return ()
    path = os.path.join(source.path, source._normalize_file_name(config_path))
    state = os.stat(path)
    return state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size
