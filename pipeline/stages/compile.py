"""Compile: put the data where the device can reach it and compile the step into programs.

The programs of a run and its state must fit into the memory of the host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from flax import linen as nn
from pydantic import BaseModel

from pipeline.backends.base import Backend, CompileInputs, CompileReport, Executable, ProgramReport
from pipeline.backends.loading.loader import Loader, make_loader
from pipeline.backends.loading.window import LoaderSource
from pipeline.config.cache import find_program_folder
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import list_event_periods
from pipeline.core.errors import RecipeError, RunError
from pipeline.core.files.atomic_write import format_json, write_whole
from pipeline.core.files.compile_cache import enable_compile_cache
from pipeline.core.files.value_text import format_bytes, format_duration
from pipeline.core.host.jax_private import with_names_in_cache_key
from pipeline.core.host.limits import find_usable_bytes
from pipeline.core.host.memory import read_available_bytes, return_free_pages
from pipeline.core.host.platforms import get_platform
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.engine.schedule import Event
from pipeline.models.layers import standard
from pipeline.models.lowerings.formulas import onednn
from pipeline.models.modules.network import Network
from pipeline.stages.build import Built
from pipeline.stages.key_errors import blaming_key
from pipeline.stages.record.kept_times import KeptTimes, keep_times, locate_times, read_times
from pipeline.stages.record.run_directory import COMPILED
from pipeline.training.parallel.microbatches import find_smaller_microbatches
from pipeline.training.parallel.parallel_spec import make_shards
from pipeline.training.parallel.sharding_rules import make_sharding_rules
from pipeline.training.parallel.state_sharing import make_state_sharing
from pipeline.training.state import count_bytes

LONG_S = 2.0
"""Seconds of compiling programs with oneDNN after which `ONEDNN_NOTE` is printed."""
ONEDNN_NOTE = (
    "each start of this recipe compiles anew, since XLA can't write programs with oneDNN's faster "
    "layers to disk, and {reason}; autotune=off leaves them out, for runs of few steps"
)
BLOCKS = (standard.Residual, standard.Branches, standard.DualPath)
"""Layers whose inner activations are recomputed; of nested layers, the outermost."""
NOT_COMPILED = frozenset(
    {"name", "cache", "checkpoint", "monitor", "receipt", "launch", "debug", "stages"}
)
"""Keys of a recipe that no program depends on."""
MACHINE_KEYS = ("libc", "processor", "cores", "device", "instructions")
"""Keys of a machine's description that programs depend on."""


@dataclass(frozen=True)
class CompileOptions:
    key: str | None = None
    """Key of programs that an earlier process may have written; None to read none."""
    evaluates_later: bool = False
    """Whether the evaluation may be compiled after training has begun."""


def compile_programs(
    recipe: Recipe,
    dataset: Dataset,
    built: Built,
    backend: Backend,
    reporter: Reporter,
    options: CompileOptions = CompileOptions(),
) -> Executable:
    """Compile the programs of a run.

    With `remat=auto` they are compiled again to recompute blocks, if a training step's temporaries
    take more than the allowed memory. Raises RunError if programs don't fit the device, or without
    `train.memory` the memory of the host.
    """
    inputs = make_compile_inputs(recipe, dataset, built, backend, reporter)
    # With a limit of memory, a call that exceeds it is repeated with the same state.
    keeps_arguments = recipe.train.memory is not None
    inputs = replace(inputs, key=options.key, state=built.state, keeps_arguments=keeps_arguments)
    # If no evaluation is due, only a callback may request one, which compiles its program.
    if options.evaluates_later or not inputs.evaluates:
        times_file = locate_times(recipe, backend.describe()["device"])

        def report_evaluation(program: ProgramReport) -> None:
            keep_compile_times(times_file, [program])
            reporter.print_detail("compile", _format_program(program))

        inputs = replace(inputs, when_evaluation_compiled=report_evaluation)
    executable = compile_to_executable(inputs, recipe, backend, reporter)
    if recipe.train.remat == "auto":
        executable = _recompute_to_fit(executable, inputs, recipe, built, backend, reporter)
    if recipe.train.memory is None:
        require_memory(recipe, built, backend, executable.report)
    return executable


def _recompute_to_fit(
    executable: Executable,
    inputs: CompileInputs,
    recipe: Recipe,
    built: Built,
    backend: Backend,
    reporter: Reporter,
) -> Executable:
    """Return programs that recompute blocks if a step's temporaries exceed the allowed memory, else
    `executable`."""
    before_bytes = get_training_temporaries(executable)
    allowed_bytes = _find_allowed_bytes(recipe, backend)
    line = f"temporaries of {before_bytes / 1e6:,.1f} MB, {allowed_bytes / 1e6:,.1f} MB allowed"
    if before_bytes <= allowed_bytes:
        reporter.print_stage("remat", f"none: {line}")
        return executable
    if not count_blocks(built.step_config.network):
        reporter.warn(f"train.remat = auto: {line}, and {recipe.model.name} has no blocks")
        return executable
    shards = make_shards(recipe.parallel, recipe.train.batch_size, backend.placement.parts)
    step = recompute_blocks(built).step_on(shards, inputs.sharing)
    inputs = replace(inputs, step=step, recomputes=True, key=None)
    executable = compile_to_executable(inputs, recipe, backend, reporter)
    after_bytes = get_training_temporaries(executable)
    reporter.print_stage(
        "remat",
        f"blocks: {line}; {before_bytes / 1e6:,.1f} -> {after_bytes / 1e6:,.1f} MB of temporaries",
    )
    return executable


def _find_allowed_bytes(recipe: Recipe, backend: Backend) -> int:
    """Return the most bytes of temporaries. Raises RecipeError if processes would measure them."""
    train = recipe.train
    if train.remat_bytes is not None:
        return train.remat_bytes
    if jax.process_count() > 1:
        problem = "must be set with several processes, so that all decide the same"
        raise RecipeError(f"train.remat_bytes = null: {problem}")
    free_bytes = backend.placement.free_bytes
    if free_bytes is None:
        free_bytes = read_available_bytes()
    return free_bytes if train.memory_bytes is None else min(free_bytes, train.memory_bytes)


def make_compile_inputs(
    recipe: Recipe, dataset: Dataset, built: Built, backend: Backend, reporter: Reporter
) -> CompileInputs:
    """Return the inputs of the compiler; report the loader, or warn if it is too slow."""
    train = recipe.train
    order = dataset.eval_order
    placement = backend.placement
    if train.remat == "blocks":
        with blaming_key("train.remat = blocks"):
            built = recompute_blocks(built)

    def report(starves: bool, text: str) -> None:
        reporter.print_stage("warning" if starves else "feed", text)

    total = built.run_schedule.total
    source = LoaderSource(dataset.train, dataset.train_order, placement, total, short_first=True)
    eval_source = LoaderSource(dataset.eval, order, placement, order.steps_per_epoch)
    # A dispatch has at most this many steps; None if the size of sinks is chosen later.
    dispatch_steps = built.run_schedule.sink_steps if train.sink_size != "auto" else None
    if not train.sink or train.mechanism == "soft":
        dispatch_steps = 1
    shards = make_shards(recipe.parallel, train.batch_size, placement.parts)
    sharing = make_state_sharing(
        recipe.parallel, built.state, built.step_config.features, placement.parts
    )
    return CompileInputs(
        step=built.step_on(shards, sharing),
        train=make_loader(source, train.feed, report),
        eval=make_loader(eval_source, train.feed),
        learning_rates=built.learning_rates,
        seed=built.seed,
        eager=train.mode == "eager",
        state=built.state if train.mode == "eager" else None,
        jit_layers=train.jit_layers,
        sharding_rules=make_sharding_rules(recipe.parallel),
        sharing=sharing,
        equal_on_devices=shards is not None and shards.add == "tree",
        single_steps=built.single_steps,
        recomputes=train.remat == "blocks",
        train_sample=_make_train_loader(recipe, dataset, backend) if recipe.eval.on_train else None,
        dispatch_steps=dispatch_steps,
        evaluates=_has_evaluations(recipe, built),
    )


def _has_evaluations(recipe: Recipe, built: Built) -> bool:
    """Return whether a stage evaluates, or training does by its periods.

    Returns True without a training stage, where all programs are compiled.
    """
    if "train" not in recipe.stages or "eval" in recipe.stages:
        return True
    schedule = built.run_schedule
    periods = list_event_periods(recipe, schedule.steps_per_epoch)[Event.EVALUATE]
    return any(period <= schedule.total for period in periods)


def _make_train_loader(recipe: Recipe, dataset: Dataset, backend: Backend) -> Loader:
    """Return a loader of the training samples for the evaluation's program."""
    sample = dataset.select_train_sample()
    order = dataset.eval_order
    if sample.specs() != dataset.eval.specs():
        problem = "training and evaluation samples differ in shape or type; must be false"
        raise RecipeError(f"eval.on_train = true: {problem}")
    source = LoaderSource(sample, order, backend.placement, order.steps_per_epoch)
    return make_loader(source, recipe.train.feed)


def compile_to_executable(
    inputs: CompileInputs, recipe: Recipe, backend: Backend, reporter: Reporter
) -> Executable:
    """Compile and report the programs. Raises RunError if they don't fit the device."""
    enable_compile_cache(find_program_folder(recipe.cache, reporter.warn), reporter.warn)
    train = inputs.train
    device = backend.describe()["device"]
    times_file = locate_times(recipe, device)
    kept = read_times(times_file)
    before_s = sum(kept.compile_s.values())
    before = f"; took {format_duration(before_s)} when it was new" if before_s > LONG_S else ""
    reporter.print_stage(
        "compile", f"{recipe.model.name} for {device}, batches of {recipe.train.batch_size}{before}"
    )

    def watch(name: str) -> AbstractContextManager[None]:
        expected_s = kept.compile_s.get(name)
        return reporter.clock(f"compiling {name} of {recipe.model.name}", expected_s)

    # A profile needs the names of layers in programs.
    with nullcontext() if recipe.profile.mode == "off" else with_names_in_cache_key():
        executable = backend.compile(inputs, watch)
    report = executable.report
    keep_compile_times(times_file, report.programs)
    if inputs.eager:
        line = "no program: in eager mode every operation runs by itself"
        if inputs.jit_layers:
            patterns = ", ".join(inputs.jit_layers)
            line += f" but for those in {patterns}, compiled when they first run"
        reporter.print_stage("compile", line)
    for program in report.programs:
        reporter.print_detail("compile", _format_program(program))
        for line in program.lines:
            reporter.print_stage("compile", line)
    if sum(program.compile_s for program in report.programs if program.calls_onednn) > LONG_S:
        reporter.print_stage("compile", ONEDNN_NOTE.format(reason=_explain_missing_library()))
    if len(backend.placement.devices) > 1:
        # Imported here, since few runs have several devices.
        from pipeline.backends.graph.hlo_program import read_collectives

        # The sizes are of whole arrays, not of one device's part.
        collectives = [
            f"{op.count} {op.kind.replace('_', '-')} of {op.nbytes / 1e6:,.3f} MB over "
            f"{op.group_size} devices"
            for op in read_collectives(executable.program_text)
        ]
        reporter.print_stage("compile", f"collectives: {'; '.join(collectives) or 'none'}")
    if inputs.sharing is not None:
        part_mb = inputs.sharing.part_bytes / 1e6
        reporter.print_stage(
            "compile", f"each device has {part_mb:,.3f} MB of the weights and the optimizer"
        )
    data = {"resident": "all training data", "stream": "the training data at hand"}[train.kind]
    reporter.print_stage(
        "compile",
        f"done after {report.compile_s:.1f} s; a step takes "
        f"{format_bytes(get_training_temporaries(executable))} of memory, "
        f"{data} {format_bytes(train.device_bytes)}",
    )
    return executable


def _explain_missing_library() -> str:
    """Return why programs call jaxlib's oneDNN, and not a library that is built here."""
    if not onednn.is_library_installed():
        return f"{onednn.EXTRA} isn't installed"
    from pipeline.models.lowerings.tune.onednn_library import explain_absence

    return explain_absence()


def keep_compile_times(file: Path | None, programs: Iterable[ProgramReport]) -> None:
    """Keep how long programs took that were compiled, and not read from a cache."""
    compile_s = {
        program.name: program.compile_s for program in programs if program.cache in ("miss", "off")
    }
    if compile_s:
        keep_times(file, KeptTimes(compile_s=compile_s))


def _format_program(program: ProgramReport) -> str:
    """Return the figures of a compiled program as a line for the log."""
    flops = f", {program.flops / 1e9:,.3f} GFLOP" if program.flops else ""
    return (
        f"{program.name}: {program.compile_s:.1f} s, cache {program.cache}, "
        f"{program.temporary_bytes / 1e6:,.1f} MB of temporaries{flops}"
    )


def write_figures(run_dir: Path, report: CompileReport) -> None:
    """Write compiled.json, the figures of programs for an absent chip; no file without figures."""
    figures = {
        program.name: {"compile_s": program.compile_s, **program.figures}
        for program in report.programs
        if program.figures is not None
    }
    if figures:
        write_whole(run_dir / COMPILED, format_json(figures, indent=1) + "\n")


def recompute_blocks(built: Built) -> Built:
    """Return the step with a backward pass that recomputes the activations inside blocks.

    Only the inputs of blocks are stored, for one more forward pass through them (Chen et al. 2016,
    "Training Deep Nets with Sublinear Memory Cost"). On the CPU losses are equal bit for bit if the
    compiler makes the same operations. Raises ValueError for a network without blocks.
    """
    network = built.step_config.network
    if not count_blocks(network):
        raise ValueError(
            "the network has no residual blocks and no branches to compute again; must be none"
        )
    return replace(
        built, step_config=replace(built.step_config, network=network.clone(recomputes=True))
    )


def count_blocks(network: nn.Module) -> int:
    """Return the number of outermost blocks of a network; 0 if it isn't a list of layers."""

    def count(value: Any) -> int:
        if isinstance(value, BLOCKS):
            return 1
        if isinstance(value, tuple):
            return sum(map(count, value))
        if isinstance(value, standard.Sequence | standard.Gate | standard.Views):
            return value.count_repetitions() * count(value.body)
        return 0

    return count(network.layers) if isinstance(network, Network) else 0


def get_training_temporaries(executable: Executable) -> int:
    """Return the bytes of a training step's temporaries, as planned by the compiler."""
    sizes = {program.name: program.temporary_bytes for program in executable.report.programs}
    return sizes.get("training step", 0)


def make_program_key(process: Mapping[str, Any], recipe: Recipe, built: Built) -> str | None:
    """Return a digest of everything that the programs of a run depend on.

    `process` is the provenance of this process: code, versions, machine, settings and data. Returns
    None if that doesn't cover everything: with custom code, if the recipe's model or training names
    files, or if only a part of the data was hashed.
    """
    splits = process["data"].values()
    columns = [column for split in splits for column in split.values()]
    if process["plugins"] or any(column.get("of") != "all" for column in columns):
        return None
    for section in _iterate_sections(recipe):
        if not type(section).__module__.startswith("pipeline."):
            return None
    for section in _iterate_sections((recipe.model, recipe.train)):
        if any(isinstance(value, Path) for value in vars(section).values()):
            return None
    network = built.step_config.network
    identity = {
        **{name: process[name] for name in ("versions", "settings", "data")},
        "code": process["code"]["sha256"],
        "machine": {name: process["machine"][name] for name in MACHINE_KEYS},
        "recipe": recipe.model_dump(mode="json", exclude=set(NOT_COMPILED)),
        "lowerings": [
            *(repr(getattr(network, name, None)) for name in ("layout", "policy")),
            repr(built.step_config.lowerings),
        ],
        "onednn": onednn.describe_calls(),
        "single steps": built.single_steps,
        "jax": sorted((name, repr(value)) for name, value in jax.config.values.items()),
    }
    return hashlib.sha256(format_json(identity).encode()).hexdigest()


def _iterate_sections(value: Any) -> Iterator[BaseModel]:
    """Yield the sections of a recipe, and the sections inside them."""
    if isinstance(value, BaseModel):
        yield value
        value = list(value.__dict__.values())
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _iterate_sections(item)


def require_memory(recipe: Recipe, built: Built, backend: Backend, report: CompileReport) -> None:
    """Raise RunError if the largest program's temporaries and the state exceed the memory that this
    process can use.

    Only programs that run on the host are checked; a GPU's allocator refuses others.
    """
    programs = [program for program in report.programs if program.figures is None]
    if not programs or not get_platform(backend.device.platform).is_host:
        return
    placement = backend.placement
    num_local = sum(device.process_index == jax.process_index() for device in placement.devices)
    largest = max(programs, key=lambda program: program.temporary_bytes)
    temporary_bytes = num_local * largest.temporary_bytes
    sharing = make_state_sharing(
        recipe.parallel, built.state, built.step_config.features, placement.parts
    )
    state_bytes = count_bytes(built.state) if sharing is None else sharing.part_bytes
    needed_bytes = temporary_bytes + num_local * state_bytes
    if needed_bytes <= find_usable_bytes():
        return
    # Compiling took memory, which the heap keeps free.
    return_free_pages()
    usable_bytes = find_usable_bytes()
    if needed_bytes > usable_bytes:
        raise RunError(
            f"{recipe.model.name}: the program of the {largest.name} needs "
            f"{temporary_bytes / 1e6:,.0f} MB of temporaries beside {state_bytes / 1e6:,.0f} MB of "
            f"weights and optimizer, and {usable_bytes / 1e6:,.0f} MB are available; "
            f"{_advise(recipe, needed_bytes / max(1, usable_bytes), largest.name)}"
        )


def _advise(recipe: Recipe, excess: float, program: str) -> str:
    """Return the changes that make a program smaller by the factor `excess`."""
    if program == "evaluation":
        return "evaluate fewer samples at once by dataset.eval.batch_size"
    train = recipe.train
    advice = ["train.memory=auto computes as many samples at once as fit"]
    number = find_smaller_microbatches(train.batch_size, train.accumulate_steps, excess)
    if number is not None:
        advice.append(f"train.accumulate_steps={number} divides the batch")
    return f"{', '.join(advice)}, or choose a smaller train.batch_size than {train.batch_size:,}"
