"""The stages of a run that shares its program with others."""

from __future__ import annotations

from collections.abc import Generator

from pipeline.observe.monitors import SinkReport
from pipeline.population.shared_program import OtherLoweringsError, SharedProgram
from pipeline.runner.context import RunContext
from pipeline.runner.initial_state import read_restored
from pipeline.runner.record.guards import timed
from pipeline.runner.run import (
    CompiledRun,
    open_backend,
    record_data,
    run_compiled,
    run_stages,
)
from pipeline.stages.build import build
from pipeline.stages.data import load_data
from pipeline.stages.learning_rates import read_rate_files


def run_member_stages(
    program: SharedProgram, context: RunContext
) -> Generator[SinkReport, None, None]:
    """Run the stages as `run_stages` does, but for what is shared: lowering and compiling.

    A run that is resumed from other lowerings than those of the group has programs of its own.
    Raises CompiledInError where numbers of the group's runs decide what is compiled.
    """
    recipe, reporter, summary = context.recipe, context.reporter, context.summary
    trains, evaluates = "train" in recipe.stages, "eval" in recipe.stages
    if not (trains or evaluates):
        yield from run_stages(context)
        return
    rate_files = read_rate_files(recipe.train)
    backend = open_backend(context)
    with timed(summary, "data_s"):
        dataset = load_data(recipe, reporter)
    with timed(summary, "build_s"):
        built = build(recipe, dataset, reporter)
    restored = read_restored(context, dataset, built)
    try:
        with timed(summary, "compile_s"):
            built, executable = program.open(context, dataset, built, backend)
    except OtherLoweringsError:
        reporter.stage("lower", "not as the other runs of the sweep: programs of its own")
        yield from run_stages(context)
        return
    record_data(context, dataset, backend.device, rate_files)
    summary.parameters = built.parameters
    compiled = CompiledRun(dataset, built, built, executable, backend, None, restored)
    yield from run_compiled(context, compiled)
