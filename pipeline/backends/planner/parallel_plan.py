"""A plan: the mesh, what cuts parameters, layers' outputs and batches, what that costs; its file.

Plans are YAML files that can be saved, edited and loaded (`parallel.plan`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from pipeline.backends.planner.blocks import Region, StepBlocks
from pipeline.backends.planner.decisions import Decided
from pipeline.backends.planner.layouts import Layout, Mesh, seen_by
from pipeline.core.errors import RecipeError, system_reason
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.error_text import describe
from pipeline.core.files.safe_yaml import read_yaml, yaml_text
from pipeline.core.files.value_text import join_first, show
from pipeline.core.registry import Seq, Spec
from pipeline.models.layers.path_patterns import covers
from pipeline.training.parallel.parallel_spec import AXES, MeshSpec

HEAD = """\
# A plan for parallel.plan: edit mesh, batch, specs and constraints as you like.
# A pattern covers a path or all below it, and the last rule that covers a path wins.
# price is the model's, of the plan as it was found; nothing reads it.
"""


def _axis_names(names: Any) -> tuple[str, ...]:
    """Return the axes that cut a dimension: none for null, one by its name, or a list."""
    listed = [] if names is None else list(names) if isinstance(names, list | tuple) else [names]
    if listed != [axis for axis in AXES if axis in listed]:
        raise ValueError(f"{show(names)} must be null, data, model or [data, model]")
    return tuple(listed)


AxisNames = Annotated[tuple[str, ...], BeforeValidator(_axis_names)]
Axes = tuple[AxisNames, ...]
"""For each dimension of an array the axes of the mesh that cut it, the outermost first."""


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CutRule:
    """Axes for what a pattern covers, as in `parallel.specs` and `parallel.constraints`."""

    pattern: Annotated[str, Field(min_length=1), BeforeValidator(str)]
    axes: Axes

    @field_validator("axes")
    @classmethod
    def _each_axis_once(cls, axes: Axes) -> Axes:
        names = [name for entry in axes for name in entry]
        if len(set(names)) < len(names):
            raise ValueError(f"{axes_text(axes)}: an axis cuts one dimension only")
        return axes


@dataclass(frozen=True)
class ParallelPlan:
    """A way to compute a step on several devices, and its modelled price.

    `specs` cut parameters, others are whole; `constraints` cut the outputs of layers, each rule
    of the layers it matches and of none below them. `batch` are the axes that cut the samples
    of most of the step; the batch's arrays are cut by them.
    """

    mesh: Mesh
    batch: tuple[str, ...]
    specs: tuple[CutRule, ...] = ()
    constraints: tuple[CutRule, ...] = ()
    step_ms: float = 0.0
    memory_bytes: float = 0.0
    collective_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes a step in collectives by kind, each as `layouts.Collective` counts them."""

    @property
    def is_data_parallel(self) -> bool:
        """Whether every device holds all parameters and computes a part of the batch."""
        return not self.specs and not self.constraints and bool(self.batch)

    @property
    def strategy(self) -> str:
        """The plan in a few words: what is cut along which axis."""
        if self.mesh.devices == 1:
            return "one device"
        if self.is_data_parallel:
            return "data parallel"
        words = [f"batch by {'+'.join(self.batch)}" if self.batch else "batch whole"]
        if not self.specs:
            return f"{words[0]}, parameters whole"
        # Rules of weights say more than rules of biases and scales, which follow.
        named = sorted(self.specs, key=lambda rule: -len(rule.axes))
        words += [f"{rule.pattern} {axes_text(rule.axes)}" for rule in named]
        return join_first(words, 3)


def axes_text(axes: Axes) -> str:
    """Axes as a recipe writes them: [null, model]."""
    return f"[{', '.join('+'.join(names) or 'null' for names in axes)}]"


def plan_of(
    blocks: StepBlocks,
    mesh: Mesh,
    decided: Decided,
    step_us: float,
    memory_bytes: float,
    collective_bytes: Mapping[str, float],
) -> ParallelPlan:
    """The plan of what was decided about the blocks of a step."""
    cuts = dict(_parameter_cuts(blocks, decided))
    outputs = {
        output.layer: axes_of(
            seen_by(decided.regions[output.region], output.groups), len(output.groups)
        )
        for output in blocks.outputs
    }
    largest = largest_region(blocks)
    axes = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    data_parallel = not any(map(any, cuts.values())) and all(
        all(cut[axis] == use.operator.samples for axis in axes)
        for use, cut in zip(blocks.operators, decided.cuts, strict=True)
    )
    return ParallelPlan(
        mesh=mesh,
        batch=axes_of_samples(blocks.regions[largest], decided.regions[largest]),
        specs=tuple(rules(cuts, only_cut=True)),
        constraints=() if data_parallel else tuple(rules(outputs)),
        step_ms=step_us / 1e3,
        memory_bytes=memory_bytes,
        collective_bytes=dict(collective_bytes),
    )


def axes_of(layout: Layout, rank: int) -> Axes:
    """The axes that cut each dimension of an array, from its layout."""
    return tuple(
        tuple(AXES[axis] for axis, at in enumerate(layout) if at == dim) for dim in range(rank)
    )


def _parameter_cuts(blocks: StepBlocks, decided: Decided) -> Iterator[tuple[str, Axes]]:
    for use, cut in zip(blocks.operators, decided.cuts, strict=True):
        weight = blocks.weights[use.weight]
        layout = decided.shared.get(use.weight)
        if layout is None:
            layout = tuple(None if d is None else use.operator.dims[d].weight for d in cut)
        yield weight.path, axes_of(layout, len(weight.shape))
    for parameter in blocks.parameters:
        layout = seen_by(decided.regions[parameter.region], parameter.groups)
        yield parameter.path, axes_of(layout, len(parameter.shape))


def largest_region(blocks: StepBlocks) -> int:
    """The number of the region with most activations."""

    def saved_bytes(number: int) -> int:
        return sum(extent.nbytes for extent in blocks.regions[number].saved)

    return max(range(len(blocks.regions)), key=saved_bytes)


def axes_of_samples(region: Region, layout: Layout) -> tuple[str, ...]:
    """The axes that cut the samples of a region, from its layout."""
    if region.samples is None:
        return ()
    return tuple(AXES[axis] for axis, group in enumerate(layout) if group == region.samples)


def rules(cuts: Mapping[str, Axes], *, only_cut: bool = False) -> Iterator[CutRule]:
    """Rules that give each path its axes, few patterns for many paths of equal axes.

    A pattern covers a path or all below it, and the last rule that covers a path wins; so if a
    path has others below it with other axes, its rule comes before theirs. With `only_cut` arrays
    that are whole need no rule.
    """
    paths = {path: tuple(path.split("/")) for path in cuts}
    done: set[str] = set()
    general: list[CutRule] = []
    special: list[CutRule] = []
    for path, axes in cuts.items():
        if path in done or (only_cut and not any(axes)):
            continue
        for pattern in (*_patterns(path), path):
            covered = [other for other, parts in paths.items() if covers(pattern, parts)]
            if all(cuts[other] == axes for other in covered):
                done.update(covered)
                special.append(CutRule(pattern, axes))
                break
        else:
            done.add(path)
            general.append(CutRule(path, axes))
    yield from sorted(general, key=lambda rule: rule.pattern.count("/"))
    yield from special


def _patterns(path: str) -> Sequence[str]:
    """Patterns for a path and those that differ in numbers: in all of them, then in fewer."""
    numbers = list(re.finditer(r"\d+", path))
    patterns = []
    for count in range(len(numbers), 0, -1):
        text = path
        for number in reversed(numbers[:count]):
            text = f"{text[: number.start()]}*{text[number.end() :]}"
        patterns.append(text)
    return patterns


def _rule_keys_of(rule: Any) -> Any:
    if not isinstance(rule, dict | CutRule):
        raise ValueError(f"{show(rule)} must be {{pattern: ..., axes: [...]}}")
    return rule


FileRule = Annotated[CutRule, BeforeValidator(_rule_keys_of)]


class PlanFile(Spec):
    """The keys of a plan's file, as `parallel` has them in a recipe."""

    mesh: MeshSpec
    batch: AxisNames = ()
    specs: Seq[FileRule] = ()
    constraints: Seq[FileRule] = ()
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
        raise RecipeError(
            [f"parallel.plan = {path}: can't be read: {system_reason(error)}"]
        ) from error
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
        problems = []
    except ValidationError as error:
        file = _read_sound_keys(tree)
        problems = describe(error, tree)
    mesh = Mesh(file.mesh.data, file.mesh.model)
    if not problems and mesh.devices != devices:
        problems.append(f"mesh = {mesh}: is of {mesh.devices} devices; should be of {devices}")
    for number, rule in enumerate(file.specs):
        problems += _rule_problems(f"specs.{number}", rule, mesh, parameters)
    if problems:
        raise RecipeError([f"{place}: {problem}" for problem in problems])
    return ParallelPlan(mesh, file.batch, file.specs, file.constraints)


def _read_sound_keys(tree: Mapping[str, Any]) -> PlanFile:
    """Read the mesh and the rules for parameters of a wrong file, each as far as it is sound."""
    sound: dict[str, Any] = {"mesh": {}}
    for key in ("mesh", "specs"):
        with suppress(ValidationError):
            PlanFile.model_validate({"mesh": {}, key: tree.get(key)})
            sound[key] = tree[key]
    return PlanFile.model_validate(sound)


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
