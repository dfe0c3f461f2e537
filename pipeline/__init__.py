"""A training pipeline whose runs are described by recipes, which are YAML files.

`load_recipe` composes a recipe and `run` executes it. A `Trainer` also evaluates and predicts, and
`load_run` reads a saved run. `sink` runs many steps of a custom function in one dispatch.
`Interrupted` is raised if a signal stops a run. `pipeline.api` has the classes for custom code.
"""

from importlib import import_module
from typing import Any

# Modules are imported when their names are first used: importing jax takes ten times as long as
# starting a command. Type checkers read __init__.pyi.
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
