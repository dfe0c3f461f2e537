"""Programs of a run: its step, lowered and compiled for the device."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from pipeline.backends.base import Backend
from pipeline.config.recipe import Recipe
from pipeline.data.dataset import Dataset
from pipeline.stages.build import Built
from pipeline.stages.compile import (
    CompileOptions,
    compile_programs,
    make_program_key,
    write_figures,
)
from pipeline.stages.lower import lower
from pipeline.stages.runner.context import CompiledRun, RunContext


def lower_and_compile(
    context: RunContext,
    recipe: Recipe,
    dataset: Dataset,
    built: Built,
    backend: Backend,
    *,
    reuses_programs: bool = False,
) -> CompiledRun:
    """Lower a step and compile its programs.

    `recipe` is the context's recipe, with a plan for devices. With `reuses_programs`, programs that
    an earlier process has written are used without tracing the step. This requires that the code of
    this process is equal to the files on disk.
    """
    folder = context.folder
    reporter = context.reporter
    built = lower(recipe, dataset, built, backend, folder, reporter)
    is_plain = context.ranks.size == 1 and recipe.profile.mode == "off"
    key = None
    if reuses_programs and is_plain:
        assert context.process is not None, "a single process has a provenance"
        key = make_program_key(asdict(context.process), recipe, built)
    evaluates_later = is_plain and "train" in recipe.stages and recipe.parallel.mode == "none"
    options = CompileOptions(key, evaluates_later)
    if recipe.train.memory is None:
        executable = compile_programs(recipe, dataset, built, backend, reporter, options)
    else:
        # Imported here, since few runs need it.
        from pipeline.stages.fit_memory import compile_to_fit

        figures = context.summary.memory
        executable = compile_to_fit(recipe, dataset, built, backend, reporter, figures)
    context.summary.time["compile_s"] = executable.report.compile_s
    folder.accepted.add(partial(write_figures, folder.path, executable.report))
    return CompiledRun(context, dataset, built, backend, executable)
