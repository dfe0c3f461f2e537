"""Programs of a run: its step, lowered and compiled for the device."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

from pipeline.stages.compile import (
    CompileOptions,
    compile_programs,
    make_program_key,
    write_figures,
)
from pipeline.stages.lower import lower
from pipeline.stages.runner.context import BuiltRun, CompiledRun


def lower_and_compile(built_run: BuiltRun, *, reuses_programs: bool = False) -> CompiledRun:
    """Lower a step and compile its programs.

    With `reuses_programs`, programs that an earlier process has written are used without tracing
    the step. This requires that the code of this process is equal to the files on disk.
    """
    context = built_run.context
    recipe = built_run.recipe
    dataset = built_run.dataset
    backend = built_run.backend
    folder = context.folder
    reporter = context.reporter
    built = lower(recipe, dataset, built_run.built, backend, folder, reporter)
    is_plain = context.ranks.size == 1 and recipe.profile.mode == "off"
    key = None
    if reuses_programs and is_plain:
        assert context.process is not None, "a single process has a provenance"
        key = make_program_key(asdict(context.process), recipe, built)
    evaluates_later = is_plain and "train" in recipe.stages and recipe.parallel.mode == "none"
    options = CompileOptions(key, evaluates_later)
    executable = context.features.compile(replace(built_run, built=built), options)
    if executable is None:
        executable = compile_programs(recipe, dataset, built, backend, reporter, options)
    context.summary.time["compile_s"] = executable.report.compile_s
    folder.accepted.add(partial(write_figures, folder.path, executable.report))
    return CompiledRun(context, dataset, built, backend, executable)
