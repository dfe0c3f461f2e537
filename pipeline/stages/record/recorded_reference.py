"""Recorded reference of a recipe: the original training's accuracy, speed and first losses.

It is the file `references/NAME.yaml` in the folder of the recipe:

    source: MindSpore 2.0, a laptop
    metrics: {accuracy: 0.902}
    step_ms: 3.4
    losses: [2.3026, 2.3019]    # of the first steps
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from pipeline.core.errors import RecipeError
from pipeline.core.files.error_text import describe_problems
from pipeline.core.files.package_paths import RECIPES
from pipeline.core.files.safe_yaml import read_yaml
from pipeline.core.registry import Seq, Spec
from pipeline.engine.monitors.log_lines import METRICS, finite_number, read_lines
from pipeline.stages.record.summary import Summary

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
