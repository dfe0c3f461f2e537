"""Plans as YAML files, which can be saved, edited and loaded (`parallel.plan`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pipeline.backends.planner.layouts import Mesh
from pipeline.backends.planner.parallel_plan import Axes, CutRule, ParallelPlan, axes_text
from pipeline.core.errors import RecipeError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.safe_yaml import read_yaml, yaml_text
from pipeline.models.layers.path_patterns import covers
from pipeline.training.parallel.parallel_spec import AXES

KEYS = ("mesh", "batch", "specs", "constraints", "price")
HEAD = """\
# A plan for parallel.plan: edit mesh, batch, specs and constraints as you like.
# A pattern covers a path or all below it, and the last rule that covers a path wins.
# price is the model's, of the plan as it was found; nothing reads it.
"""


def save_plan(plan: ParallelPlan, path: Path) -> None:
    """Write a plan."""
    write_whole(path, plan_text(plan))


def plan_text(plan: ParallelPlan) -> str:
    """A plan as YAML."""
    return HEAD + yaml_text(
        {
            "mesh": {"data": plan.mesh.data, "model": plan.mesh.model},
            "batch": list(plan.batch),
            "specs": [_rule(rule) for rule in plan.specs],
            "constraints": [_rule(rule) for rule in plan.constraints],
            "price": {
                "step_ms": float(f"{plan.step_ms:.4g}"),
                "memory_bytes": round(plan.memory_bytes),
                "collective_bytes": {k: round(v) for k, v in plan.collective_bytes.items()},
            },
        }
    )


def _rule(rule: CutRule) -> dict[str, Any]:
    axes = [None if not a else a[0] if len(a) == 1 else list(a) for a in rule.axes]
    return {"pattern": rule.pattern, "axes": axes}


def load_plan(path: Path, devices: int, parameters: Mapping[str, Sequence[int]]) -> ParallelPlan:
    """Read a plan and check it against a number of devices and the shapes of all parameters.

    Raises RecipeError with every problem: the key in the file, its value, and what would be right.
    """
    try:
        given = read_yaml(path)
    except (OSError, ValueError) as error:
        raise RecipeError([f"parallel.plan = {path}: can't be read: {error}"]) from error
    return check_plan(given, str(path), devices, parameters)


def check_plan(
    given: Any, name: str, devices: int, parameters: Mapping[str, Sequence[int]]
) -> ParallelPlan:
    """Make a plan of parsed YAML. Raises RecipeError as `load_plan`."""
    reader = _Reader(f"parallel.plan {name}")
    plan = reader.plan(given, devices, parameters)
    if reader.problems or plan is None:
        raise RecipeError(reader.problems)
    return plan


class _Reader:
    """Reads the parts of a plan, and collects what is wrong with them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[str] = []

    def refuse(self, key: str, value: Any, right: str) -> None:
        """Add a problem."""
        self.problems.append(f"{self.name}: {key} = {value}: {right}")

    def plan(
        self, given: Any, devices: int, parameters: Mapping[str, Sequence[int]]
    ) -> ParallelPlan | None:
        """The plan, unless something is wrong."""
        if not isinstance(given, dict):
            self.refuse("plan", given, f"should have the keys {', '.join(KEYS)}")
            return None
        for key in given:
            if key not in KEYS:
                near = get_close_matches(key, KEYS, 1)
                guess = f"; did you mean {near[0]}?" if near else ""
                self.refuse(key, "...", f"there is no such key{guess}")
        mesh = self.mesh(given.get("mesh"), devices)
        batch = self.names("batch", given.get("batch", []))
        specs = self.rules("specs", given.get("specs", []))
        constraints = self.rules("constraints", given.get("constraints", []))
        if mesh is None or batch is None:
            return None
        for number, rule in enumerate(specs):
            self.fits(f"specs[{number}]", rule, mesh, parameters)
        return ParallelPlan(mesh, batch, specs, constraints)

    def mesh(self, given: Any, devices: int) -> Mesh | None:
        """The mesh: whole numbers whose product is the number of devices."""
        if not isinstance(given, dict) or not set(given) <= set(AXES):
            self.refuse("mesh", given, "should be {data: NUMBER, model: NUMBER}")
            return None
        sizes = [given.get(axis, 1) for axis in AXES]
        if not all(type(size) is int and size > 0 for size in sizes):
            self.refuse("mesh", given, "should have whole numbers of 1 or more")
            return None
        if math.prod(sizes) != devices:
            self.refuse("mesh", given, f"is of {math.prod(sizes)} devices; should be of {devices}")
            return None
        return Mesh(*sizes)

    def names(self, key: str, given: Any) -> tuple[str, ...] | None:
        """Axes of the mesh that cut one dimension, the outermost first."""
        listed = [given] if isinstance(given, str) else given if given is not None else []
        if isinstance(listed, list) and listed in ([], *([axis] for axis in AXES), [*AXES]):
            return tuple(listed)
        self.refuse(key, given, "should be null, data, model or [data, model]")
        return None

    def rules(self, key: str, given: Any) -> tuple[CutRule, ...]:
        """Rules of pattern and axes."""
        if not isinstance(given, list):
            self.refuse(key, given, "should be a list of {pattern: ..., axes: [...]}")
            return ()
        found = []
        for number, rule in enumerate(given):
            place = f"{key}[{number}]"
            if not isinstance(rule, dict) or set(rule) != {"pattern", "axes"}:
                self.refuse(place, rule, "should be {pattern: ..., axes: [...]}")
                continue
            axes = self.axes(f"{place}.axes", rule["axes"])
            if axes is not None:
                found.append(CutRule(str(rule["pattern"]), axes))
        return tuple(found)

    def axes(self, key: str, given: Any) -> Axes | None:
        """Axes of each dimension, each axis once."""
        if not isinstance(given, list):
            self.refuse(key, given, "should be a list with an entry for each dimension")
            return None
        named = [self.names(f"{key}[{dim}]", entry) for dim, entry in enumerate(given)]
        if any(entry is None for entry in named):
            return None
        axes = tuple(entry for entry in named if entry is not None)
        flat = [axis for entry in axes for axis in entry]
        if len(set(flat)) < len(flat):
            self.refuse(key, axes_text(axes), "an axis cuts one dimension only")
            return None
        return axes

    def fits(
        self, key: str, rule: CutRule, mesh: Mesh, parameters: Mapping[str, Sequence[int]]
    ) -> None:
        """Check that a rule covers parameters, and cuts them into equal pieces."""
        covered = [p for p in parameters if covers(rule.pattern, tuple(p.split("/")))]
        if not covered:
            near = get_close_matches(rule.pattern, parameters, 1, 0.0)
            right = f"covers no parameter; {near[0]} is one" if near else "covers no parameter"
            self.refuse(f"{key}.pattern", rule.pattern, right)
        for path in covered:
            shape = tuple(parameters[path])
            if len(shape) != len(rule.axes):
                right = f"{path} {list(shape)} has {len(shape)} dimensions"
                self.refuse(f"{key}.axes", axes_text(rule.axes), right)
                return
            for dim, names in enumerate(rule.axes):
                count = mesh.size_of([AXES.index(name) for name in names])
                if shape[dim] % count:
                    fitting = max(n for n in range(1, count) if shape[dim] % n == 0)
                    self.refuse(
                        f"{key}.axes",
                        axes_text(rule.axes),
                        f"{count} devices don't divide dimension {dim} of {path} {list(shape)}; "
                        f"{fitting} would, or a size of {-(-shape[dim] // count) * count}",
                    )
                    return
