"""Compile a plan with XLA for 8 devices of this host, and print its collectives as JSON.

    python -m tests.backends.planner.compiled CASE

The number of devices is fixed when jax starts: tests/conftest.py asks for as many.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pipeline.backends.graph.hlo_program import CompiledCollective, read_collectives
from pipeline.backends.planner.blocks import LossToPlan
from pipeline.backends.planner.parallel_plan import Axes, ParallelPlan
from pipeline.backends.planner.rates import load_host_rates
from pipeline.backends.planner.search import search
from pipeline.models.layers.path_patterns import covers
from pipeline.training.parallel.parallel_spec import AXES
from tests.backends.planner.networks import LinkRates
from tests.backends.planner.recipes import GPT2, network_to_plan
from tests.models.build import QUICK

DEVICES = 8
SMALL_GPT = (*GPT2, "model.blocks=2", "model.features=256", "model.hidden=1024", "model.heads=8")
CASES: dict[str, tuple[tuple[Any, ...], LinkRates]] = {
    "head": (
        (("model=lenet5",), 100_000, (64, 28, 28, 1)),
        LinkRates(50.0, 3_000.0),
    ),
    "gpt": (
        (SMALL_GPT, 2048, (8, 64), (8, 64)),
        LinkRates(1.0, 30_000.0),
    ),
    "resnet": (
        (("model=resnet20",), 10, (64, 32, 32, 3)),
        LinkRates(50.0, 3_000.0),
    ),
}
"""Network, classes, shapes of the batch; and links that make several plans worth a look."""


def sharding(mesh: Mesh, axes: Axes) -> NamedSharding:
    """The sharding of an array whose dimensions some axes shard."""
    entries = (names[0] if len(names) == 1 else names or None for names in axes)
    return NamedSharding(mesh, PartitionSpec(*entries))


def compile_plan(
    step: LossToPlan, plan: ParallelPlan
) -> tuple[tuple[CompiledCollective, ...], int]:
    """Collectives of a step of gradient descent under a plan, and its temporaries' bytes."""
    mesh = jax.make_mesh(plan.mesh.sizes, AXES, axis_types=(AxisType.Auto,) * 2)

    def constrain(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        out = call(*args, **kwargs)
        layer = "/".join(context.module.path)
        if context.method_name != "__call__" or not hasattr(out, "ndim"):
            return out
        rules = [rule for rule in plan.constraints if fnmatchcase(layer, rule.pattern)]
        fitting = [rule for rule in rules if len(rule.axes) == out.ndim]
        if not fitting:
            return out
        return jax.lax.with_sharding_constraint(out, sharding(mesh, fitting[-1].axes))

    def update(params: Any, batch: Any) -> Any:
        with nn.intercept_methods(constrain):
            loss, gradients = jax.value_and_grad(step.loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    def place(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        scopes = tuple(entry.key for entry in path)
        rules = [rule for rule in plan.specs if covers(rule.pattern, scopes)]
        axes = rules[-1].axes if rules else ()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(mesh, axes))

    params = jax.tree_util.tree_map_with_path(place, step.params)
    samples = sharding(mesh, (plan.batch,))
    batch = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=samples) for x in step.batch)
    out = (jax.tree.map(lambda leaf: leaf.sharding, params), sharding(mesh, ()))
    compiled = jax.jit(update, out_shardings=out).lower(params, batch).compile(QUICK)
    memory: Any = compiled.memory_analysis()
    return read_collectives(compiled.as_text()), memory.temp_size_in_bytes


def compiled_rows(name: str) -> list[dict[str, Any]]:
    """Return the collectives of each plan of a case, predicted and compiled, on 8 devices."""
    network, links = CASES[name]
    step, _ = network_to_plan(*network, sync_batch_norm=True)
    rates = replace(load_host_rates(), links=links)
    result = search(step, DEVICES, rates)
    rows = []
    for plan in (result.best, *result.runners_up, result.data_parallel):
        if plan is not None:
            collectives, temporaries = compile_plan(step, plan)
            row = {"mesh": str(plan.mesh), "strategy": plan.strategy, "temporaries": temporaries}
            row |= {"predicted": dict(plan.collective_bytes)}
            rows.append(row | {"compiled": [asdict(collective) for collective in collectives]})
    return rows


def main(name: str) -> None:
    """Print the rows of a case."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print(json.dumps(compiled_rows(name)))


if __name__ == "__main__":
    main(sys.argv[1])
