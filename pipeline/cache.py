"""Where downloads and compiled programs are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.config.recipe import CacheSpec


def cache_root(cache: CacheSpec) -> Path:
    """The cache folder: the recipe's, else `$XDG_CACHE_HOME/pipeline`, else `~/.cache/pipeline`."""
    if cache.root is not None:
        return cache.root
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "pipeline"
