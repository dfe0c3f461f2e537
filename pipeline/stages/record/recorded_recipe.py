"""Recipe in a run directory: written, read, compared with a recipe that resumes the run, and its
reference: the original training's accuracy, speed and first losses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import LENGTH_UNITS
from pipeline.core.errors import DataError, RecipeError
from pipeline.core.files.atomic_write import sync_ancestors, write_whole
from pipeline.core.files.error_text import describe_problems
from pipeline.core.files.paths import RECIPES
from pipeline.core.files.safe_yaml import read_yaml
from pipeline.core.files.tree_diff import Difference, TreePath, iterate_leaves, list_differences
from pipeline.core.registry import Seq, Spec
from pipeline.engine.monitors.log_lines import METRICS, finite_number, read_lines
from pipeline.stages.record.run_directory import RECIPE
from pipeline.stages.record.summary import Summary

LENGTH = tuple(("train", key) for key in (*LENGTH_UNITS, "end_step"))
FREE_TO_CHANGE = (
    *LENGTH,
    *(("train", key) for key in ("planned_for", "sink", "sink_size", "mechanism")),
    *(("train", key) for key in ("dispatch_seconds", "feed", "memory", "resume", "resume_changed")),
    *(("dataset", key) for key in ("root", "mirrors")),
    *((key,) for key in ("stages", "autotune", "autotune_search", "debug", "checkpoint", "eval")),
    *((key,) for key in ("monitor", "dump", "receipt", "cache", "profile")),
    *(("parallel", key) for key in ("devices", "mesh")),
    ("launch",),
)
"""Keys that a resumed run may change if `train.resume` names its directory. Only those in `LENGTH`
change losses, since the learning-rate schedule is as long as the run."""
MODE = ("parallel", "mode")
EQUAL_MODES = ("data", "fsdp")
"""Values of `parallel.mode` with which training computes the same losses and weights."""


def forbids_change(path: TreePath, free: Sequence[tuple[str, ...]] = FREE_TO_CHANGE) -> bool:
    """Return whether a resumed run can't change a key: no prefix of its path is in `free`."""
    return not any(path[: len(prefix)] == prefix for prefix in free)


def hash_recipe(recipe: Mapping[str, Any]) -> str:
    """Return a SHA-256 of the keys of a resolved recipe that a resumed run can't change."""
    leaves = {}
    for path, leaf in iterate_leaves(recipe):
        if forbids_change(path):
            has_equal_mode = path == MODE and leaf in EQUAL_MODES
            leaves[json.dumps(path)] = EQUAL_MODES[0] if has_equal_mode else leaf
    return hashlib.sha256(json.dumps(leaves, sort_keys=True).encode()).hexdigest()


def write_recipe(run_dir: Path, recipe: Recipe) -> None:
    """Write the resolved recipe into its run directory, and sync it to the disk."""
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    write_whole(run_dir / RECIPE, text)
    sync_ancestors(run_dir)


def read_recorded_recipe(run_dir: Path) -> Mapping[str, Any]:
    """Read the recipe of a run, with defaults for keys that are newer than the run.

    Raises DataError if it can't be read.
    """
    # Imported here, since few runs are resumed.
    from pipeline.config.defaults import normalise_recipe

    path = run_dir / RECIPE
    try:
        tree = read_yaml(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: can't be read: {error}") from error
    if not isinstance(tree, dict):
        raise DataError(f"{path}: must hold keys and values, not {type(tree).__name__}")
    return normalise_recipe(tree)


def find_changes(
    recipe: Mapping[str, Any],
    recorded: Mapping[str, Any],
    free: Sequence[tuple[str, ...]] = FREE_TO_CHANGE,
) -> list[Difference]:
    """Return the differences of two resolved recipes, except in `free` keys and `EQUAL_MODES`."""
    changes = []
    for change in list_differences(recipe, recorded):
        modes = {change.value, change.other_value} if change.path == MODE else None
        if forbids_change(change.path, free) and modes != set(EQUAL_MODES):
            changes.append(change)
    return changes


FOLDER = "references"


class Reference(Spec):
    """Figures of the original training. Those that are missing aren't compared."""

    source: str
    """Framework, versions and machine of the original."""
    metrics: Mapping[str, float] = {}
    """Metrics of the last evaluation by name, as in a summary."""
    step_ms: Annotated[float, Field(gt=0)] | None = None
    """Mean time of a step in milliseconds."""
    losses: Seq[float] = ()
    """Losses of the first steps."""

    def compare(self, summary: Summary, run_dir: Path) -> dict[str, Any]:
        """Return the figures of the reference beside a run's, for summary.json.

        A figure that the run lacks is None. Raises DataError if the log of steps can't be read.
        """
        step_ms = {} if self.step_ms is None else {"step_ms": self.step_ms}
        run = {**summary.metrics, "step_ms": summary.time.get("step_ms")}
        figures = {
            name: {"reference": value, "run": finite_number(run.get(name))}
            for name, value in {**self.metrics, **step_ms}.items()
        }
        log = run_dir / METRICS
        lines = islice(read_lines(log), len(self.losses)) if log.exists() else ()
        losses = {line.step: line.numbers().get("loss") for line in lines}
        pairs = ((losses.get(step), expected) for step, expected in enumerate(self.losses, 1))
        differences = [abs(loss - expected) for loss, expected in pairs if loss is not None]
        return {
            "source": self.source,
            "figures": figures,
            "losses": {
                "steps": len(differences),
                "largest_difference": max(differences, default=0.0),
            },
        }


def find_reference(name: str, recipe_folder: Path | None = None) -> Reference | None:
    """Read the reference of a recipe; None without one.

    `recipe_folder` is the folder of a recipe file; None for `recipes/` in the working folder, or
    else the folder of the shipped recipes. Raises RecipeError with every problem.
    """
    folders = [recipe_folder] if recipe_folder is not None else [Path("recipes"), RECIPES]
    files = [folder / FOLDER / f"{name}.yaml" for folder in folders]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return None
    try:
        tree = read_yaml(file)
    except (OSError, ValueError) as error:
        raise RecipeError([f"{file}: can't be read: {error}"]) from error
    if not isinstance(tree, dict):
        raise RecipeError([f"{file}: must hold keys and values"])
    try:
        return Reference.model_validate(tree)
    except ValidationError as error:
        problems = describe_problems(error, tree)
        raise RecipeError([f"{file}: {problem}" for problem in problems]) from error


def describe_comparison(comparison: Mapping[str, Any]) -> str:
    """Return the result of `Reference.compare` as a line for the log."""
    parts = []
    for name, figure in comparison["figures"].items():
        if figure["run"] is None:
            parts.append(f"no {name}")
        else:
            difference = figure["run"] - figure["reference"]
            parts.append(f"{name} {figure['run']:.4g} ({difference:+.2g})")
    losses = comparison["losses"]
    if losses["steps"]:
        difference = losses["largest_difference"]
        parts.append(f"the first {losses['steps']} losses at most {difference:.2g} apart")
    return f"{', '.join(parts) or 'no figures'}; from {comparison['source']}"
