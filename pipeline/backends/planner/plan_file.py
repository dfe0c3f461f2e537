"""Plans as YAML files, which can be saved, edited and loaded (`parallel.plan`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.backends.planner.layouts import Mesh
from pipeline.backends.planner.parallel_plan import Axes, CutRule, ParallelPlan, axes_text
from pipeline.core.errors import RecipeError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.error_text import describe
from pipeline.core.files.safe_yaml import read_yaml, yaml_text
from pipeline.core.registry import Seq, Spec
from pipeline.models.layers.path_patterns import covers
from pipeline.training.parallel.parallel_spec import AXES, Axis, MeshSpec, ShardRule

HEAD = """\
# A plan for parallel.plan: edit mesh, batch, specs and constraints as you like.
# A pattern covers a path or all below it, and the last rule that covers a path wins.
# price is the model's, of the plan as it was found; nothing reads it.
"""


class PlanFile(Spec):
    """The keys of a plan's file, as `parallel` has them in a recipe."""

    mesh: MeshSpec
    batch: Axis | Seq[Axis] | None = None
    specs: Seq[ShardRule] = ()
    constraints: Seq[ShardRule] = ()
    price: Any = None


def save_plan(plan: ParallelPlan, path: Path) -> None:
    """Write a plan."""
    write_whole(path, plan_text(plan))


def plan_text(plan: ParallelPlan) -> str:
    """A plan as YAML."""
    return HEAD + yaml_text(
        {
            "mesh": {"data": plan.mesh.data, "model": plan.mesh.model},
            "batch": list(plan.batch),
            "specs": [_rule_keys(rule) for rule in plan.specs],
            "constraints": [_rule_keys(rule) for rule in plan.constraints],
            "price": {
                "step_ms": float(f"{plan.step_ms:.4g}"),
                "memory_bytes": round(plan.memory_bytes),
                "collective_bytes": {k: round(v) for k, v in plan.collective_bytes.items()},
            },
        }
    )


def _rule_keys(rule: CutRule) -> dict[str, Any]:
    axes = [None if not a else a[0] if len(a) == 1 else list(a) for a in rule.axes]
    return {"pattern": rule.pattern, "axes": axes}


def load_plan(path: Path, devices: int, parameters: Mapping[str, Sequence[int]]) -> ParallelPlan:
    """Read a plan and check it against a number of devices and the shapes of all parameters.

    Raises RecipeError with every problem: the key in the file, its value, and what would be right.
    """
    try:
        tree = read_yaml(path)
    except (OSError, ValueError) as error:
        raise RecipeError([f"parallel.plan = {path}: can't be read: {error}"]) from error
    return check_plan(tree, str(path), devices, parameters)


def check_plan(
    tree: Any, name: str, devices: int, parameters: Mapping[str, Sequence[int]]
) -> ParallelPlan:
    """Make a plan of parsed YAML. Raises RecipeError as `load_plan`."""
    place = f"parallel.plan {name}"
    if not isinstance(tree, dict):
        keys = ", ".join(PlanFile.model_fields)
        raise RecipeError([f"{place}: plan = {tree}: should have the keys {keys}"])
    try:
        file = PlanFile.model_validate(tree)
    except ValidationError as error:
        raise RecipeError([f"{place}: {line}" for line in describe(error, tree)]) from error
    mesh = Mesh(file.mesh.data, file.mesh.model)
    batch = (file.batch,) if isinstance(file.batch, str) else file.batch or ()
    specs, constraints = (
        tuple(CutRule(rule.pattern, rule.entries) for rule in rules)
        for rules in (file.specs, file.constraints)
    )
    problems = []
    if mesh.devices != devices:
        problems.append(f"mesh = {mesh}: is of {mesh.devices} devices; should be of {devices}")
    problems += _order_problems("batch", (batch,))
    for key, rules in (("specs", specs), ("constraints", constraints)):
        for number, rule in enumerate(rules):
            problems += _order_problems(f"{key}.{number}.axes", rule.axes)
    for number, rule in enumerate(specs):
        problems += _rule_problems(f"specs.{number}", rule, mesh, parameters)
    if problems:
        raise RecipeError([f"{place}: {problem}" for problem in problems])
    return ParallelPlan(mesh, batch, specs, constraints)


def _order_problems(key: str, axes: Axes) -> Iterator[str]:
    """Report dimensions that are cut along axes in another order than the mesh's."""
    for names in axes:
        if names != tuple(axis for axis in AXES if axis in names):
            yield f"{key} = {axes_text((names,))}: should be null, data, model or [data, model]"


def _rule_problems(
    key: str, rule: CutRule, mesh: Mesh, parameters: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """Report a rule that covers no parameter, or does not cut one into equal pieces."""
    covered = [path for path in parameters if covers(rule.pattern, tuple(path.split("/")))]
    if not covered:
        near = get_close_matches(rule.pattern, parameters, 1, 0.0)
        hint = f"; {near[0]} is one" if near else ""
        yield f"{key}.pattern = {rule.pattern}: covers no parameter{hint}"
    problem = f"{key}.axes = {axes_text(rule.axes)}:"
    for path in covered:
        shape = list(parameters[path])
        if len(shape) != len(rule.axes):
            yield f"{problem} {path} {shape} has {len(shape)} dimensions"
            return
        for dim, names in enumerate(rule.axes):
            count = mesh.size_of([AXES.index(name) for name in names])
            if shape[dim] % count:
                fitting = max(n for n in range(1, count) if shape[dim] % n == 0)
                yield (
                    f"{problem} {count} devices don't divide dimension {dim} of {path} {shape}; "
                    f"{fitting} would, or a size of {-(-shape[dim] // count) * count}"
                )
                return
