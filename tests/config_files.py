"""Hydra's config files, overrides and interpolations, parsed once in all tests of a process.

A recipe is composed of some twenty files, a dozen overrides and as many interpolations, which Hydra
and OmegaConf parse anew for each recipe: half of the 90 ms that it takes.
"""

from __future__ import annotations

import os
import pickle
from functools import cache
from typing import Any

# Hydra has no public interface to what it keeps between two compositions.
import omegaconf.base
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigResult, ConfigSource

_load = ConfigRepository.load_config
_parse_rule = OverridesParser.parse_rule
_parsed: dict[tuple[Any, ...], bytes] = {}
_parsed_rules: dict[tuple[str, str], bytes] = {}


def parse_config_files_once() -> None:
    """Have Hydra copy what it has parsed of a file, as long as the file is unchanged.

    An override is parsed once, too, and so is an interpolation, whose tree is only read.
    """
    ConfigRepository.load_config = _load_copy
    OverridesParser.parse_rule = _parse_rule_copy
    omegaconf.base.parse = cache(omegaconf.base.parse)


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


def _state_of_file(source: ConfigSource, config_path: str) -> tuple[int, ...]:
    """Return what changes with a file's content; nothing for files of an installed package."""
    if source.scheme() == "pkg":
        return ()
    path = os.path.join(source.path, source._normalize_file_name(config_path))
    state = os.stat(path)
    return state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size
