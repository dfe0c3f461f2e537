"""Times that are kept from run to run: of steps, evaluations and compilations on this machine.

A file beside the compiled programs has the times of the last runs with the same network, data and
training, whatever their length, rates and seed. They tell a later run how long it will take.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.config.cache import cache_root
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import LENGTH_UNITS
from pipeline.core.errors import RecipeError
from pipeline.core.files.atomic_write import format_json, write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.trusted_files import make_private
from pipeline.core.host.limits import read_limits

FOLDER = "times-2"
"""Folder in the cache. Its number is raised if the format changes."""
MAX_FILE_BYTES = 1 << 16
NUM_RUNS = 5
"""Runs whose times of a step are kept. Their median counts, as other work slows some runs."""
SECTIONS = frozenset({"model", "dataset", "device", "parallel", "train", "autotune"})
"""Sections of a recipe on which the time of a step depends."""
FREE_KEYS = frozenset(
    {*LENGTH_UNITS, "end_step", "planned_for", "resume", "resume_changed", "callbacks"}
    | {"schedule", "dispatch_seconds", "ledger"}
)
"""Keys of `train` on which it hardly depends."""


@dataclass(frozen=True)
class KeptTimes:
    """Seconds that parts of earlier runs took; None if they are unknown."""

    steps_s: tuple[float, ...] = ()
    """Mean time of a step in each of the last runs, waiting for data included."""
    evaluation_s: float | None = None
    """Time of the last run's shortest evaluation."""
    compile_s: Mapping[str, float] = field(default_factory=dict)
    """Time of each program that was compiled, by its name; a program from the cache keeps it."""

    @property
    def step_s(self) -> float | None:
        """Median of the runs; None without any."""
        return median(self.steps_s) if self.steps_s else None


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
        steps_s = tuple(filter(None, map(_parse_seconds, tree["steps_s"])))
        return KeptTimes(steps_s, _parse_seconds(tree["evaluation_s"]), known_s)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return KeptTimes()


def keep_times(path: Path | None, times: KeptTimes) -> None:
    """Add the times of a run to a file. A file that can't be written is left out, since only
    forecasts need it."""
    if path is None:
        return
    earlier = read_times(path)
    merged = KeptTimes(
        (*earlier.steps_s, *times.steps_s)[-NUM_RUNS:],
        earlier.evaluation_s if times.evaluation_s is None else times.evaluation_s,
        {**earlier.compile_s, **times.compile_s},
    )
    with suppress(OSError):
        make_private(path.parent)
        write_whole(path, format_json(asdict(merged)) + "\n")


def _parse_seconds(value: Any) -> float | None:
    """Return a positive finite number as float; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < math.inf else None
