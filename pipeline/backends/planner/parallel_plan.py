"""A plan: a mesh, shardings of parameters, layers' outputs and the batch, and their price.

Plans are saved as YAML files, which can be edited and loaded (`parallel.plan`).
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
from pipeline.backends.planner.decisions import PlanLayouts, locate_array
from pipeline.backends.planner.dimension_groups import Layout, Mesh, convert_region_layout
from pipeline.core.errors import RecipeError, get_system_reason
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.error_text import describe_problems
from pipeline.core.files.safe_yaml import read_yaml
from pipeline.core.files.value_text import join_first, show
from pipeline.core.files.yaml_text import format_yaml
from pipeline.core.registry import Seq, Spec
from pipeline.models.layers.path_patterns import covers
from pipeline.training.parallel.parallel_spec import AXES, MeshSpec

HEAD = """\
# A plan for parallel.plan: edit mesh, batch, specs and constraints as you like.
# A pattern covers a path or all below it, and the last rule that covers a path wins.
# price is the model's, of the plan as it was found; nothing reads it.
"""


def _parse_axis_names(names: Any) -> tuple[str, ...]:
    """Return the axes that shard a dimension, from null, a name or a list of names."""
    if names is None:
        return ()
    axes = list(names) if isinstance(names, list | tuple) else [names]
    if axes != [axis for axis in AXES if axis in axes]:
        raise ValueError(f"{show(names)} must be null, data, model or [data, model]")
    return tuple(axes)


AxisNames = Annotated[tuple[str, ...], BeforeValidator(_parse_axis_names)]
Axes = tuple[AxisNames, ...]
"""The axes of the mesh that shard each dimension of an array, the outermost first."""


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ShardingRule:
    """Axes for the paths that a pattern covers, as in `parallel.specs` and `.constraints`."""

    pattern: Annotated[str, Field(min_length=1), BeforeValidator(str)]
    axes: Axes

    @field_validator("axes")
    @classmethod
    def _refuse_repeated_axis(cls, axes: Axes) -> Axes:
        names = [name for entry in axes for name in entry]
        if len(set(names)) < len(names):
            raise ValueError(f"{format_axes(axes)}: an axis shards one dimension only")
        return axes


@dataclass(frozen=True)
class ParallelPlan:
    """A way to compute a step on several devices, and its modelled price.

    Prices are 0 in plans from files.
    """

    mesh: Mesh
    batch: tuple[str, ...]
    """Axes that shard a batch; after a search the axes of the largest region's samples."""
    specs: tuple[ShardingRule, ...] = ()
    """Shardings of parameters. Other parameters are replicated."""
    constraints: tuple[ShardingRule, ...] = ()
    """Shardings of the outputs of layers that a pattern matches, not of layers inside these."""
    step_ms: float = 0.0
    memory_bytes: float = 0.0
    """Memory of a device."""
    collective_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes of a step's collectives by kind, counted as in `dimension_groups.Collective`."""

    @property
    def is_data_parallel(self) -> bool:
        """Whether every device has all parameters and computes a part of the batch."""
        return not self.specs and not self.constraints and bool(self.batch)

    @property
    def strategy(self) -> str:
        """The plan in a few words: the axes of the batch and of parameters."""
        if self.mesh.devices == 1:
            return "one device"
        if self.is_data_parallel:
            return "data parallel"
        words = [f"batch by {'+'.join(self.batch)}" if self.batch else "batch replicated"]
        if not self.specs:
            return f"{words[0]}, parameters replicated"
        # Rules of weights come first, since rules of biases and scales follow from them.
        by_rank = sorted(self.specs, key=lambda rule: -len(rule.axes))
        words += [f"{rule.pattern} {format_axes(rule.axes)}" for rule in by_rank]
        return join_first(words, 3)


def format_axes(axes: Axes) -> str:
    """Return axes as in a recipe: [null, model]."""
    return f"[{', '.join('+'.join(names) or 'null' for names in axes)}]"


def make_plan(
    blocks: StepBlocks,
    mesh: Mesh,
    plan_layouts: PlanLayouts,
    step_us: float,
    memory_bytes: float,
    collective_bytes: Mapping[str, float],
) -> ParallelPlan:
    """Return the plan of a choice of layouts for the blocks of a step."""
    axes_by_path = dict(_list_parameter_axes(blocks, plan_layouts))
    outputs = {
        output.layer: to_axes(
            convert_region_layout(plan_layouts.regions[output.region], output.groups),
            len(output.groups),
        )
        for output in blocks.outputs
    }
    largest = find_largest_region(blocks)
    axes = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    is_data_parallel = not any(map(any, axes_by_path.values())) and all(
        all(sharding[axis] == use.operator.samples for axis in axes)
        for use, sharding in zip(blocks.operators, plan_layouts.shardings, strict=True)
    )
    return ParallelPlan(
        mesh=mesh,
        batch=find_sample_axes(blocks.regions[largest], plan_layouts.regions[largest]),
        specs=tuple(make_rules(axes_by_path, only_sharded=True)),
        constraints=() if is_data_parallel else tuple(make_rules(outputs)),
        step_ms=step_us / 1e3,
        memory_bytes=memory_bytes,
        collective_bytes=dict(collective_bytes),
    )


def to_axes(layout: Layout, rank: int) -> Axes:
    """Return the axes that shard each dimension of an array, from its layout."""
    return tuple(
        tuple(name for name, axis_dim in zip(AXES, layout, strict=True) if axis_dim == dim)
        for dim in range(rank)
    )


def _list_parameter_axes(
    blocks: StepBlocks, plan_layouts: PlanLayouts
) -> Iterator[tuple[str, Axes]]:
    """Yield the path and the axes of each parameter; of a weight, once for each of its uses."""
    for use, sharding in zip(blocks.operators, plan_layouts.shardings, strict=True):
        weight = blocks.weights[use.weight]
        layout = plan_layouts.shared.get(use.weight)
        if layout is None:
            layout = locate_array(use.operator, sharding, "weight")
        yield weight.path, to_axes(layout, len(weight.shape))
    for parameter in blocks.parameters:
        layout = convert_region_layout(plan_layouts.regions[parameter.region], parameter.groups)
        yield parameter.path, to_axes(layout, len(parameter.shape))


def find_largest_region(blocks: StepBlocks) -> int:
    """Return the number of the region with the most bytes of activations."""
    saved = [sum(extent.nbytes for extent in region.saved) for region in blocks.regions]
    return saved.index(max(saved))


def find_sample_axes(region: Region, layout: Layout) -> tuple[str, ...]:
    """Return the axes that shard the samples of a region, from its layout."""
    if region.samples is None:
        return ()
    return tuple(AXES[axis] for axis, group in enumerate(layout) if group == region.samples)


def make_rules(
    axes_by_path: Mapping[str, Axes], *, only_sharded: bool = False
) -> Iterator[ShardingRule]:
    """Yield rules for the axes of all paths, with one pattern for several paths of equal axes.

    A pattern covers a path and all paths below it. The last rule that covers a path applies, so a
    rule of a path comes before rules of paths below it. If `only_sharded`, replicated arrays have
    no rule.
    """
    paths = {path: tuple(path.split("/")) for path in axes_by_path}
    seen: set[str] = set()
    overridden: list[ShardingRule] = []  # Other rules apply to paths below these.
    rules: list[ShardingRule] = []
    for path, axes in axes_by_path.items():
        if path in seen or (only_sharded and not any(axes)):
            continue
        for pattern in (*_list_patterns(path), path):
            covered = [key for key, parts in paths.items() if covers(pattern, parts)]
            if all(axes_by_path[key] == axes for key in covered):
                seen.update(covered)
                rules.append(ShardingRule(pattern, axes))
                break
        else:
            seen.add(path)
            overridden.append(ShardingRule(path, axes))
    yield from sorted(overridden, key=lambda rule: rule.pattern.count("/"))
    yield from rules


def _list_patterns(path: str) -> Sequence[str]:
    """Return patterns of a path with wildcards for all its numbers, then for fewer of the first."""
    num_numbers = len(re.findall(r"\d+", path))
    return [re.sub(r"\d+", "*", path, count=count) for count in range(num_numbers, 0, -1)]


def _check_rule_form(rule: Any) -> Any:
    """Return a rule. Raises ValueError unless it has keys and values."""
    if not isinstance(rule, dict | ShardingRule):
        raise ValueError(f"{show(rule)} must be {{pattern: ..., axes: [...]}}")
    return rule


FileRule = Annotated[ShardingRule, BeforeValidator(_check_rule_form)]


class PlanFile(Spec):
    """The keys of a plan's file, as in `parallel` of a recipe."""

    mesh: MeshSpec
    batch: AxisNames = ()
    specs: Seq[FileRule] = ()
    constraints: Seq[FileRule] = ()
    price: Any = None


def save_plan(plan: ParallelPlan, path: Path) -> None:
    tree = {
        "mesh": {"data": plan.mesh.data, "model": plan.mesh.model},
        "batch": list(plan.batch),
        "specs": [_format_rule(rule) for rule in plan.specs],
        "constraints": [_format_rule(rule) for rule in plan.constraints],
        "price": {
            "step_ms": float(f"{plan.step_ms:.4g}"),
            "memory_bytes": round(plan.memory_bytes),
            "collective_bytes": {k: round(v) for k, v in plan.collective_bytes.items()},
        },
    }
    write_whole(path, HEAD + format_yaml(tree))


def _format_rule(rule: ShardingRule) -> dict[str, Any]:
    axes = [list(names) if len(names) > 1 else next(iter(names), None) for names in rule.axes]
    return {"pattern": rule.pattern, "axes": axes}


def load_plan(path: Path, devices: int, parameters: Mapping[str, Sequence[int]]) -> ParallelPlan:
    """Read a plan and check it for devices and parameters' shapes. Raises RecipeError with all
    problems."""
    try:
        tree = read_yaml(path)
    except (OSError, ValueError) as error:
        problem = f"parallel.plan = {path}: can't be read: {get_system_reason(error)}"
        raise RecipeError(problem) from error
    place = f"parallel.plan {path}"
    if not isinstance(tree, dict):
        keys = ", ".join(PlanFile.model_fields)
        raise RecipeError([f"{place}: plan = {show(tree)}: must have the keys {keys}"])
    problems: list[str] = []
    try:
        file = PlanFile.model_validate(tree)
    except ValidationError as error:
        file = _read_valid_keys(tree)
        problems = describe_problems(error, tree)
    mesh = Mesh(file.mesh.data, file.mesh.model)
    if not problems and mesh.devices != devices:
        problems.append(f"mesh = {mesh}: has {mesh.devices} devices; must have {devices}")
    for number, rule in enumerate(file.specs):
        problems += _find_rule_problems(f"specs.{number}", rule, mesh, parameters)
    if problems:
        raise RecipeError([f"{place}: {problem}" for problem in problems])
    return ParallelPlan(mesh, file.batch, file.specs, file.constraints)


def _read_valid_keys(tree: Mapping[str, Any]) -> PlanFile:
    """Return the mesh and the rules for parameters of a file, without invalid keys."""
    valid: dict[str, Any] = {"mesh": {}}
    for key in ("mesh", "specs"):
        with suppress(ValidationError):
            PlanFile.model_validate({"mesh": {}, key: tree.get(key)})
            valid[key] = tree[key]
    return PlanFile.model_validate(valid)


def _find_rule_problems(
    key: str, rule: ShardingRule, mesh: Mesh, parameters: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """Yield the problem of a rule that covers no parameter, or shards one into unequal pieces."""
    covered = [path for path in parameters if covers(rule.pattern, tuple(path.split("/")))]
    if not covered:
        nearest = get_close_matches(rule.pattern, parameters, 1, 0.0)
        hint = f"; {nearest[0]} is one" if nearest else ""
        yield f"{key}.pattern = {rule.pattern}: covers no parameter{hint}"
    problem = f"{key}.axes = {format_axes(rule.axes)}:"
    for path in covered:
        shape = list(parameters[path])
        if len(shape) != len(rule.axes):
            entries = "1 entry" if len(shape) == 1 else f"{len(shape)} entries"
            yield f"{problem} must have {entries}, as {path} is {shape}"
            return
        for dim, names in enumerate(rule.axes):
            count = mesh.count_along([AXES.index(name) for name in names])
            if shape[dim] % count:
                divisor = max(n for n in range(1, count) if shape[dim] % n == 0)
                yield (
                    f"{problem} {count} devices don't divide dimension {dim} of {path} {shape}; "
                    f"{divisor} would, or a size of {-(-shape[dim] // count) * count}"
                )
                return
