"""Hydra's config files, parsed once in all tests of a process.

A recipe is composed of some twenty files, which Hydra parses anew for each recipe: a third of the
90 ms that it takes.
"""

from __future__ import annotations

import copy
import os
from typing import Any

# Hydra has no public interface to what it keeps between two compositions.
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource

_load = ConfigRepository.load_config
_parsed: dict[tuple[Any, ...], ConfigResult | None] = {}


def parse_config_files_once() -> None:
    """Have Hydra copy what it has parsed of a file, as long as the file is unchanged."""
    ConfigRepository.load_config = _load_copy


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
