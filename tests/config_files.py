"""Hydra's config files, overrides and interpolations, parsed once in all tests of a process.

A recipe is composed of some twenty files, a dozen overrides and as many interpolations, which Hydra
and OmegaConf parse anew for each recipe: half of the 90 ms that it takes. A sixth is a map of
choices for defaults lists that interpolate them, which Hydra makes for all defaults lists.
"""

from __future__ import annotations

import os
import pickle
from functools import cache
from typing import Any

# Hydra has no public interface to what it keeps between two compositions.
import omegaconf.base
from hydra._internal import defaults_list as hydra_defaults
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig

_load = ConfigRepository.load_config
_parse_rule = OverridesParser.parse_rule
_create_map = getattr(hydra_defaults, "_create_interpolation_map", None)
_parsed: dict[tuple[Any, ...], bytes] = {}
_parsed_rules: dict[tuple[str, str], bytes] = {}


def parse_config_files_once() -> None:
    """Have Hydra copy what it has parsed of a file, as long as the file is unchanged.

    An override is parsed once, too, and so is an interpolation, whose tree is only read.
    """
    ConfigRepository.load_config = _load_copy
    OverridesParser.parse_rule = _parse_rule_copy
    omegaconf.base.parse = cache(omegaconf.base.parse)
    if _create_map is not None:
        hydra_defaults._create_interpolation_map = _create_map_if_used


def _load_copy(self: ConfigRepository, config_path: str) -> ConfigResult | None:
    source = self._find_object_source(config_path, ObjectType.CONFIG)
    # Others are registered from Python, at any time.
    if source is None or source.scheme() not in ("file", "pkg"):
        return _load(self, config_path)
    key = (source.provider, source.path, config_path, *_state_of_file(source, config_path))
    if key not in _parsed:
        _parsed[key] = pickle.dumps(_load(self, config_path))
    return pickle.loads(_parsed[key])  # copy.deepcopy takes several times as long


def _parse_rule_copy(self: OverridesParser, text: str, rule: str) -> Any:
    """The functions of overrides are the same in all parsers; what is refused is parsed again."""
    if (text, rule) not in _parsed_rules:
        _parsed_rules[text, rule] = pickle.dumps(_parse_rule(self, text, rule))
    return pickle.loads(_parsed_rules[text, rule])


def _create_map_if_used(overrides: Any, defaults_list: list[Any], self_added: bool) -> DictConfig:
    used = [item for item in defaults_list if not item.is_self() and not item.is_override()]
    if any(item.is_interpolation() for item in used):
        return _create_map(overrides, defaults_list, self_added)
    return DictConfig({})


def _state_of_file(source: ConfigSource, config_path: str) -> tuple[int, ...]:
    """Return what changes with a file's content; nothing for files of an installed package."""
    if source.scheme() == "pkg":
        return ()
    path = os.path.join(source.path, source._normalize_file_name(config_path))
    state = os.stat(path)
    return state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size
