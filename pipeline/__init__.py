"""A training pipeline whose recipe is data.

`load_recipe` composes a recipe and `run` executes it. A `Trainer` also returns what comes of it,
and `load_run` reads that back. `sink` runs a custom step, many a dispatch. `Interrupted` is raised
if a signal stopped them. `pipeline.api` has what custom code needs.
"""

from importlib import import_module
from typing import Any

# Nothing is imported before it is used: a command starts in a tenth of the time that jax takes.
# The types are in __init__.pyi.
_MODULES = {
    "Interrupted": "pipeline.core.host.signals",
    "Trainer": "pipeline.api.trainer",
    "load_recipe": "pipeline.config.compose",
    "load_run": "pipeline.api.loaded_run",
    "run": "pipeline.api.trainer",
    "sink": "pipeline.engine.sink",
}

__all__ = ["Interrupted", "Trainer", "load_recipe", "load_run", "run", "sink"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
