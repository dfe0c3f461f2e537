"""Compile: put the data where the device can reach it and compile the step into programs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from flax import linen as nn
from pydantic import BaseModel

from pipeline.backends.base import Backend, CompileInputs, CompileReport, Executable, ProgramReport
from pipeline.backends.feed.feed import Feed, make_feed
from pipeline.backends.feed.window_buffer import FeedSource
from pipeline.backends.graph.hlo_collectives import read_collectives
from pipeline.config.cache import program_folder
from pipeline.config.recipe import Recipe, TrainSpec
from pipeline.core.errors import RecipeError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.compile_cache import enable_compile_cache, programs_by_names
from pipeline.core.files.strict_json import json_text
from pipeline.core.host.memory import available_bytes
from pipeline.core.host.platforms import platform_of
from pipeline.core.reporter import Reporter
from pipeline.data.dataset import Dataset
from pipeline.models.layers import standard
from pipeline.models.modules.standard import Network
from pipeline.stages.build import Built
from pipeline.stages.build_checks import blaming_key
from pipeline.stages.record.run_directory import COMPILED
from pipeline.training.parallel.cuts import cuts_of
from pipeline.training.parallel.shards import shards_of

LONG_S = 2.0
"""Seconds of compiling from which on a line says how to do without."""
CALLS_ONEDNN = (
    "programs that call oneDNN are compiled anew by every process, since XLA can't write them; "
    "autotune=off leaves oneDNN out, for runs of few steps"
)


@dataclass(frozen=True)
class CompileOptions:
    """How programs are compiled: found again, and in which order."""

    key: str | None = None
    """Digest of all that the programs are made from, by which those of an earlier process are
    found; None finds none."""
    evaluates_later: bool = False
    """Whether the evaluation may be compiled once training has begun."""


def compile_programs(
    recipe: Recipe,
    dataset: Dataset,
    built: Built,
    backend: Backend,
    reporter: Reporter,
    options: CompileOptions = CompileOptions(),
) -> Executable:
    """Compile everything a run needs. Raises RunError when the device can't take it."""
    inputs = compile_inputs(recipe, dataset, built, backend, reporter)
    inputs = replace(inputs, key=options.key, state=built.state)
    if options.evaluates_later:

        def report_evaluation(program: ProgramReport) -> None:
            reporter.stage("compile", _line(program))

        inputs = replace(inputs, when_evaluation_compiled=report_evaluation)
    executable = compile_given(inputs, recipe, backend, reporter)
    if recipe.train.remat == "auto":
        return _in_less_memory(executable, inputs, recipe, built, backend, reporter)
    return executable


def _in_less_memory(
    executable: Executable,
    inputs: CompileInputs,
    recipe: Recipe,
    built: Built,
    backend: Backend,
    reporter: Reporter,
) -> Executable:
    """Return the programs, or those that compute activations again where these need too much."""
    before, allowed = training_temporaries(executable), recipe.train.remat_bytes
    if allowed is None:
        if jax.process_count() > 1:
            problem = "must be given with several processes, which have to decide alike"
            raise RecipeError(f"train.remat_bytes = null: {problem}")
        allowed = device_memory(backend.device)
    line = f"temporaries of {before / 1e6:,.1f} MB, {allowed / 1e6:,.1f} MB allowed"
    if before <= allowed:
        reporter.stage("remat", f"none: {line}")
        return executable
    if not blocks_of(built.parts.network):
        reporter.warn(f"train.remat = auto: {line}, and {recipe.model.name} has no blocks")
        return executable
    shards = shards_of(recipe.parallel, recipe.train.batch_size, backend.placement.parts)
    step = recomputing(built).step_on(shards)
    inputs = replace(inputs, step=step, recomputes=True, key=None)
    again = compile_given(inputs, recipe, backend, reporter)
    after = training_temporaries(again)
    reporter.stage(
        "remat", f"blocks: {line}; {before / 1e6:,.1f} -> {after / 1e6:,.1f} MB of temporaries"
    )
    return again


def compile_inputs(
    recipe: Recipe, dataset: Dataset, built: Built, backend: Backend, reporter: Reporter
) -> CompileInputs:
    """Return what is compiled, and the feeds, which put the data where the device reaches it."""
    train = recipe.train
    if train.remat == "blocks":
        with blaming_key("train.remat = blocks"):
            built = recomputing(built)
    shards = shards_of(recipe.parallel, train.batch_size, backend.placement.parts)
    feed, eval_feed = _feeds(train, dataset, built, backend, reporter)
    sample = _train_sample(train, dataset, backend) if recipe.eval.on_train else None
    return CompileInputs(
        step=built.step_on(shards),
        train=feed,
        eval=eval_feed,
        learning_rates=built.learning_rates,
        seed=built.seed,
        eager=train.mode == "eager",
        jit_layers=train.jit_layers,
        cuts=cuts_of(recipe.parallel),
        single_steps=built.single_steps,
        recomputes=train.remat == "blocks",
        train_sample=sample,
        dispatch_steps=_dispatch_steps(train, built),
    )


def compile_given(
    inputs: CompileInputs, recipe: Recipe, backend: Backend, reporter: Reporter
) -> Executable:
    """Compile what a recipe gives. Raises RunError when the device can't take it."""
    enable_compile_cache(program_folder(recipe.cache, reporter.warn), reporter.warn)
    train = inputs.train
    device = backend.describe()["device"]
    reporter.stage("compile", f"{recipe.model.name} for {device}, batch {recipe.train.batch_size}")

    @contextmanager
    def watch(name: str) -> Iterator[None]:
        with reporter.clock(f"compiling {name} of {recipe.model.name}"):
            yield

    # A profile tells operators by the names of their layers.
    with nullcontext() if recipe.profile.mode == "off" else programs_by_names():
        executable = backend.compile(inputs, watch)
    if inputs.eager:
        compiled = ", ".join(inputs.jit_layers)
        but = f" but for those in {compiled}, compiled when they first run" if compiled else ""
        reporter.stage("compile", f"no program: in eager mode every operation runs by itself{but}")
    for program in executable.report.programs:
        reporter.stage("compile", _line(program))
        for line in program.lines:
            reporter.stage("compile", line)
    anew = [program for program in executable.report.programs if program.calls_onednn]
    if sum(program.compile_s for program in anew) > LONG_S:
        reporter.stage("compile", CALLS_ONEDNN)
    if len(backend.placement.devices) > 1:
        reporter.stage("compile", _collectives(executable.program_text))
    reporter.stage(
        "compile",
        f"{executable.report.compile_s:.1f} s in all; training data {train.kind}, "
        f"{train.device_bytes / 1e6:,.1f} MB on the device",
    )
    return executable


def _dispatch_steps(train: TrainSpec, built: Built) -> int | None:
    """Return the most steps of a dispatch; None where the size of sinks is measured later."""
    if not train.sink or train.mechanism == "soft":
        return 1
    return built.run_schedule.sink_steps if train.sink_size != "auto" else None


def _collectives(program_text: str) -> str:
    """Return what devices send each other in a step, with the size of the whole arrays."""
    found = [
        f"{one.count} {one.kind.replace('_', '-')} of {one.nbytes / 1e6:,.3f} MB over "
        f"{one.group_size} devices"
        for one in read_collectives(program_text)
    ]
    return f"collectives: {'; '.join(found) or 'none'}"


def _feeds(
    train: TrainSpec, dataset: Dataset, built: Built, backend: Backend, reporter: Reporter
) -> tuple[Feed, Feed]:
    """Return the feeds of training and evaluation; warn when training has to wait for data."""

    def report(starves: bool, text: str) -> None:
        reporter.stage("warning" if starves else "feed", text)

    placement = backend.placement
    stop, eval_stop = built.run_schedule.total, dataset.eval_order.steps_per_pass
    trained = FeedSource(dataset.train, dataset.train_order, placement, stop, short_first=True)
    evaluated = FeedSource(dataset.eval, dataset.eval_order, placement, eval_stop)
    return make_feed(trained, train.feed, report), make_feed(evaluated, train.feed)


def _train_sample(train: TrainSpec, dataset: Dataset, backend: Backend) -> Feed:
    """Return the feed of the training samples to evaluate: of the sizes of evaluation, whose
    program it shares."""
    sample, order = dataset.train_sample(), dataset.eval_order
    if sample.specs() != dataset.eval.specs():
        problem = "training and evaluation samples differ in shape or type; must be false"
        raise RecipeError(f"eval.on_train = true: {problem}")
    source = FeedSource(sample, order, backend.placement, order.steps_per_pass)
    return make_feed(source, train.feed)


def _line(program: ProgramReport) -> str:
    flops = f", {program.flops / 1e9:,.3f} GFLOP" if program.flops else ""
    return (
        f"{program.name}: {program.compile_s:.1f} s, cache {program.cache}, "
        f"{program.temporary_bytes / 1e6:,.1f} MB of temporaries{flops}"
    )


def write_figures(run_dir: Path, report: CompileReport) -> None:
    """Write the figures of each program that has some; no file where none has."""
    figures = {
        program.name: {"compile_s": program.compile_s, **program.figures}
        for program in report.programs
        if program.figures is not None
    }
    if figures:
        write_whole(run_dir / COMPILED, json_text(figures, indent=1) + "\n")


BLOCKS = (standard.Residual, standard.Branches, standard.DualPath)
"""Layers whose insides are computed again, the outermost where one is inside of another."""


def recomputing(built: Built) -> Built:
    """Return the step whose backward pass computes the insides of blocks again.

    Losses are the same bits on the CPU where the compiler forms the same operations of both.
    Raises ValueError for a network without blocks.
    """
    network = built.parts.network
    if not blocks_of(network):
        raise ValueError(
            "the network has no residual blocks and no branches, whose insides could be computed "
            "again; must be none"
        )
    return replace(built, parts=replace(built.parts, network=network.clone(recomputes=True)))


def blocks_of(network: nn.Module) -> int:
    """The number of blocks of a network, those inside of others left out; 0 for one that is no
    list of layers."""
    return _count(network.layers) if isinstance(network, Network) else 0


def _count(value: Any) -> int:
    if isinstance(value, BLOCKS):
        return 1
    if isinstance(value, tuple):
        return sum(map(_count, value))
    if isinstance(value, standard.Sequence | standard.Gate):
        return getattr(value, "repeat", 1) * _count(value.body)
    return 0


def training_temporaries(executable: Executable) -> int:
    """Bytes of the temporaries of a training step, as the compiler plans them."""
    sizes = {program.name: program.temporary_bytes for program in executable.report.programs}
    return sizes.get("training step", 0)


def device_memory(device: jax.Device) -> int:
    """Bytes of memory that a step may take: of the device, or what is available on the host."""
    statistics = None if platform_of(device.platform).is_host else device.memory_stats()
    if not statistics or "bytes_limit" not in statistics:
        return available_bytes()
    return int(statistics["bytes_limit"]) - int(statistics.get("bytes_in_use", 0))


NOT_COMPILED = frozenset({"name", "cache", "checkpoint", "monitor", "launch", "debug", "stages"})
"""Sections of a recipe that no program depends on."""
OF_MACHINE = ("libc", "processor", "cores", "device", "instructions")


def program_key(process: Mapping[str, Any], recipe: Recipe, built: Built) -> str | None:
    """Return the key of the programs of a run that a process of its own does.

    `process` is its provenance: code, versions, machine, settings and data. Returns None where not
    all that the programs are made from is known by it: code of the user's own, a file that the
    network or training is read from, or data of which only samples were hashed.
    """
    splits = process["data"].values()
    columns = [column for split in splits for column in split.values()]
    if process["plugins"] or any(column.get("of") != "all" for column in columns):
        return None
    if not all(type(one).__module__.startswith("pipeline.") for one in _sections(recipe)):
        return None
    if any(_names_file(one) for one in _sections((recipe.model, recipe.train))):
        return None
    network = built.parts.network
    machine = {name: process["machine"][name] for name in OF_MACHINE}
    parts = {
        **{name: process[name] for name in ("versions", "settings", "data")},
        "code": process["code"]["sha256"],
        "machine": machine,
        "recipe": recipe.model_dump(mode="json", exclude=set(NOT_COMPILED)),
        "lowerings": [repr(getattr(network, name, None)) for name in ("layout", "policy")],
        "single steps": built.single_steps,
        "jax": sorted((name, repr(value)) for name, value in jax.config.values.items()),
    }
    return hashlib.sha256(json_text(parts).encode()).hexdigest()


def _names_file(section: BaseModel) -> bool:
    return any(isinstance(value, Path) for value in section.__dict__.values())


def _sections(value: Any) -> Iterator[BaseModel]:
    """Yield the sections of a recipe, and those inside of them."""
    if isinstance(value, BaseModel):
        yield value
        value = list(value.__dict__.values())
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _sections(item)
