"""Plan: the mesh of devices and the shardings of arrays, if `parallel.mode=auto`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict
from pydantic import TypeAdapter

from pipeline.backends.planner.blocks import LossToPlan, make_loss
from pipeline.backends.planner.dimension_groups import Mesh
from pipeline.backends.planner.parallel_plan import ParallelPlan, ShardingRule, load_plan, save_plan
from pipeline.backends.planner.rates import load_host_rates
from pipeline.backends.planner.search import (
    GIB,
    format_moved,
    format_plan_table,
    price_shardings,
    search,
)
from pipeline.backends.rates import DeviceGroup, Rates
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.files.safe_yaml import read_yaml
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.stages.build import Built
from pipeline.stages.record.run_directory import PLAN, RunFolder
from pipeline.stages.runner.context import BuiltRun
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.parallel.devices import count_devices
from pipeline.training.parallel.parallel_spec import AXES, MeshSpec, ShardingSpec
from pipeline.training.update import shape_batch


def plan_devices(
    recipe: Recipe, dataset: Dataset, built: Built, folder: RunFolder, reporter: Reporter
) -> Recipe:
    """Return the recipe with mode `semi_auto`, and with the mesh and shardings of a plan.

    The run directory's plan comes first, then the plan file of the recipe, then the fastest one of
    a search. If the run directory's plan is for other devices, so may be the plan file, which is
    then left out. The first of several processes plans for all, since the rates of their machines
    differ. Raises RecipeError if no plan fits, or if a file's plan doesn't fit.
    """
    plans = TypeAdapter(ParallelPlan)

    def plan_as_json() -> Any:
        return plans.dump_python(_plan_run(recipe, dataset, built, folder, reporter), mode="json")

    return with_plan(recipe, plans.validate_python(folder.ranks.agree(plan_as_json)))


def _plan_run(
    recipe: Recipe, dataset: Dataset, built: Built, folder: RunFolder, reporter: Reporter
) -> ParallelPlan:
    """Return the plan of a run, and write a new plan into the run directory."""
    run_file = folder.path / PLAN
    plan_file = recipe.parallel.plan
    if run_file.exists():
        devices = count_devices(recipe.parallel)
        if _read_mesh_size(run_file) == devices:
            plan_file = run_file
        else:
            reason = "is for other devices, or can't be read"
            reporter.print_stage("plan", f"{run_file} {reason}; planned again")
            if plan_file is not None and _read_mesh_size(plan_file) != devices:
                plan_file = None
    plan = find_plan(recipe, dataset, built, plan_file, reporter)
    if plan_file != run_file:
        # `accepted` writes at once, or for a resumed run after its checks.
        folder.accepted.add(partial(save_plan, plan, run_file))
    return plan


def find_plan(
    recipe: Recipe, dataset: Dataset, built: Built, plan_file: Path | None, reporter: Reporter
) -> ParallelPlan:
    """Report and return the plan of a file; without a file, the fastest plan.

    Raises RecipeError if no plan fits, or if the file's plan doesn't fit.
    """
    devices = count_devices(recipe.parallel)
    if plan_file is None:
        rates = _find_rates(recipe)
        memory_bytes = rates.memory_bytes
        if recipe.parallel.memory_gib is not None:
            memory_bytes = recipe.parallel.memory_gib * GIB
        plans = search(trace_step(recipe, dataset, built), devices, rates, memory_bytes)
        reporter.print_lines(format_plan_table(plans))
        _require_whole_batches(recipe, plans.best, "the fastest plan")
        return plans.best
    shapes = {"/".join(path): leaf.shape for path, leaf in flatten_dict(built.state.params).items()}
    plan = load_plan(plan_file, devices, shapes)
    _require_whole_batches(recipe, plan, f"parallel.plan {plan_file}")
    reporter.print_stage("plan", f"{plan.mesh} devices, {plan.strategy}; from {plan_file}")
    return plan


def _require_whole_batches(recipe: Recipe, plan: ParallelPlan, name: str) -> None:
    """Raise RecipeError if the devices along a plan's batch don't divide a batch."""
    parts = plan.mesh.count_along([AXES.index(axis) for axis in plan.batch])
    sizes = {
        "train.batch_size": recipe.train.batch_size,
        "dataset.eval.batch_size": recipe.dataset.eval.batch_size or recipe.train.batch_size,
    }
    for key, size in sizes.items():
        if size % parts:
            raise RecipeError(
                f"{name}: batch = [{', '.join(plan.batch)}]: {parts} devices don't divide "
                f"{key} = {size}"
            )


def _read_mesh_size(file: Path) -> int | None:
    """Return the number of devices of a file's plan; None if it can't be read."""
    try:
        mesh = MeshSpec.model_validate(read_yaml(file)["mesh"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return mesh.data * mesh.model


def trace_step(recipe: Recipe, dataset: Dataset, built: Built) -> LossToPlan:
    """Trace the loss of a recipe's step on its global batch."""
    batch = shape_batch(dataset.inputs, dataset.train_label, recipe.train.batch_size)
    return make_loss(recipe.name, built.step_config, built.state, batch, sync_batch_norm=True)


def describe_shardings(recipe: Recipe, dataset: Dataset, built: Built) -> str:
    """Return a line for the log that compares the recipe's shardings with data parallelism.

    Both steps are priced with the planner's rates of the recipe's devices.
    """
    parallel = recipe.parallel
    devices = count_devices(parallel)
    sizes = MeshSpec(data=devices) if parallel.mesh is None else parallel.mesh
    mesh = Mesh(sizes.data, sizes.model)
    rates = _find_rates(recipe)
    specs = tuple(map(_make_sharding_rule, parallel.specs))
    constraints = tuple(map(_make_sharding_rule, parallel.constraints))
    step = trace_step(recipe, dataset, built)
    priced = price_shardings(step, mesh, parallel.batch_axes, specs, constraints, rates)
    if priced is None:
        line = f"a step with these shardings on {mesh} devices has no price"
        return f"{line}: the planner doesn't support them"
    plan, data_parallel = priced
    time = f"{plan.step_ms:.3g} ms by the planner's rates"
    line = f"with these shardings on {mesh} devices a step takes {time}"
    if data_parallel is not None:
        ratio = plan.step_ms / data_parallel.step_ms
        line += f", {ratio:.2f}x that of data parallelism"
    return f"{line}; {plan.memory_bytes / GIB:.2f} GiB a device, {format_moved(plan)} moved"


def describe_gathering(recipe: Recipe, built: Built) -> str:
    """Return a line for the log with the time to gather the parameters that devices share."""
    nbytes = built.parameter_bytes
    devices = DeviceGroup(count_devices(recipe.parallel))
    gather_ms = _find_rates(recipe).collective_us("all_gather", nbytes, devices) / 1e3
    return (
        f"parallel.mode = fsdp: the estimated memory is for one device, the time for mode data; "
        f"{gather_ms:.3g} ms more to gather {nbytes / 1e6:,.1f} MB of parameters in each step"
    )


def _find_rates(recipe: Recipe) -> Rates:
    """Return the rates of the recipe's devices; those measured on this host if it states none."""
    return recipe.device.rates() or load_host_rates()


def with_plan(recipe: Recipe, plan: ParallelPlan) -> Recipe:
    """Return the recipe with a plan in place of `auto`."""
    planned: dict[str, Any] = {
        "mode": "semi_auto",
        "devices": plan.mesh.devices,
        "mesh": MeshSpec(data=plan.mesh.data, model=plan.mesh.model),
        "specs": tuple(map(_make_sharding_spec, plan.specs)),
        "constraints": tuple(map(_make_sharding_spec, plan.constraints)),
        "batch_axes": plan.batch,
        "plan": None,
        "memory_gib": None,
    }
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=planned)})


def _make_sharding_rule(spec: ShardingSpec) -> ShardingRule:
    return ShardingRule(spec.pattern, tuple(map(tuple, spec.entries)))


def _make_sharding_spec(rule: ShardingRule) -> ShardingSpec:
    axes = [list(names) or None for names in rule.axes]
    return ShardingSpec.model_validate({"pattern": rule.pattern, "axes": axes})


class PlannedDevices(RunFeature):
    """The plan of a run with `parallel.mode = auto`."""

    def plan(self, built_run: BuiltRun) -> BuiltRun:
        """Return the run with the mesh and shardings of a plan, and with its devices open."""
        context = built_run.context
        recipe = plan_devices(
            built_run.recipe,
            built_run.dataset,
            built_run.built,
            context.folder,
            context.reporter,
        )
        return replace(built_run, recipe=recipe, backend=recipe.device.open(recipe.parallel))
