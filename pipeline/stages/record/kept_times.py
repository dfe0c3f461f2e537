"""Times that are kept from run to run: of steps, evaluations and compilations on this machine.

A file beside the compiled programs has the times of the last run with the same network, data and
training, whatever its length, rates and seed. They tell a later run how long it will take.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config.cache import cache_root
from pipeline.config.recipe import Recipe
from pipeline.config.run_length import LENGTH_UNITS
from pipeline.core.errors import RecipeError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.ownership import make_private
from pipeline.core.files.strict_json import format_json
from pipeline.core.host.limits import read_limits

FOLDER = "times-1"
"""Folder in the cache. Its number is raised if the format changes."""
MAX_FILE_BYTES = 1 << 16
SECTIONS = frozenset({"model", "dataset", "device", "parallel", "train", "autotune"})
"""Sections of a recipe on which the time of a step depends."""
FREE_KEYS = frozenset(
    {*LENGTH_UNITS, "end_step", "planned_for", "resume", "resume_changed", "callbacks"}
    | {"schedule", "dispatch_seconds", "ledger"}
)
"""Keys of `train` on which it hardly depends."""


@dataclass(frozen=True)
class KeptTimes:
    """Seconds that parts of an earlier run took; None if they are unknown."""

    step_s: float | None = None
    """Mean time of a step, waiting for data included."""
    evaluation_s: float | None = None
    compile_s: Mapping[str, float] = field(default_factory=dict)
    """Time of each program that was compiled, by its name; a program from the cache keeps it."""


def locate_times(recipe: Recipe, device: str) -> Path | None:
    """Return the file of a recipe's times on a device; None if the recipe keeps no programs."""
    if not recipe.cache.compiled:
        return None
    tree = recipe.model_dump(mode="json", include=set(SECTIONS))
    train = {key: value for key, value in tree["train"].items() if key not in FREE_KEYS}
    train["optimizer"] = train["optimizer"]["name"]
    evaluated = recipe.model_dump(mode="json", include={"eval": {"samples", "on_train"}})
    identity = {**tree, **evaluated, "train": train, "on": device, "cores": read_limits().cores}
    digest = hashlib.sha256(format_json(identity).encode()).hexdigest()
    try:
        return cache_root(recipe.cache) / FOLDER / f"{digest[:32]}.json"
    except RecipeError:  # no home folder
        return None


def read_times(path: Path | None) -> KeptTimes:
    """Read a file of `keep_times`. A missing or damaged file has no times."""
    if path is None:
        return KeptTimes()
    try:
        tree = read_json(path, MAX_FILE_BYTES)
        compile_s = {str(name): _parse_seconds(s) for name, s in tree["compile_s"].items()}
        known_s = {name: s for name, s in compile_s.items() if s is not None}
        return KeptTimes(
            _parse_seconds(tree["step_s"]), _parse_seconds(tree["evaluation_s"]), known_s
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return KeptTimes()


def keep_times(path: Path | None, times: KeptTimes) -> None:
    """Replace the times in a file by those that aren't None. A file that can't be written is left
    out, since only forecasts need it."""
    if path is None:
        return
    tree = asdict(read_times(path))
    tree["compile_s"] |= times.compile_s
    for name in ("step_s", "evaluation_s"):
        if getattr(times, name) is not None:
            tree[name] = getattr(times, name)
    with suppress(OSError):
        make_private(path.parent)
        write_whole(path, format_json(tree) + "\n")


def _parse_seconds(value: Any) -> float | None:
    """Return a positive finite number as float; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < math.inf else None
