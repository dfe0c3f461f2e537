"""The price of a recipe's step on an emulated chip, as text and as files, and recommendations:
changes of the step's options that make it faster, each with its price.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.backends.ascend.chip.options import (
    EmulatedDevice,
    ExecutionConfig,
    Mode,
    OptionError,
    choose_mode,
)
from pipeline.backends.ascend.memory.memory_plan import explain_out_of_memory
from pipeline.backends.ascend.pricing.pricing import Pricing
from pipeline.backends.ascend.pricing.traced_step import (
    get_params,
    pause_garbage_collection,
    trace_step,
)
from pipeline.backends.ascend.report.explanation import describe_range, describe_track_record
from pipeline.backends.ascend.report.priced_step import PricedStep
from pipeline.backends.ascend.report.report import Recommendation, format_report, name_devices
from pipeline.backends.ascend.tune.autotune import (
    find_custom_bank,
    find_result_folder,
    should_repeat,
)
from pipeline.backends.base import StepToPrice
from pipeline.backends.sink_choice import SinkChoice
from pipeline.core.errors import RecipeError, RunError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.knowledge_bank import write_result

LONG_SINK = 1000
"""Steps of a recommended sink."""
BUCKETS = (2, 3, 4)
"""Numbers of all-reduces to try."""
FIRST_SHARES = (0.02, 0.05, 0.1, 0.25)
"""Shares of the gradients in a separate all-reduce for the network's first layers. These gradients
are ready last, so the backward pass doesn't overlap their all-reduce."""

Retrace = Callable[[int], Pricing]
"""A function that traces the same step with another batch size."""
Candidate = tuple[str, str, str, Pricing, ExecutionConfig]
"""Kind, description and override of a change, and the pricing and options that it leads to."""
Variant = tuple[str, str, str, dict[str, Any]]
"""Kind, description and override of a change, and the changed options."""


def advise(
    pricing: Pricing, config: ExecutionConfig, retrace: Retrace | None = None
) -> tuple[Recommendation, ...]:
    """Return the best change of each kind, by predicted gain, largest first.

    `retrace(batch_size)` traces the step with another batch size; None: no other size is tried.
    Changes that the device doesn't support, or doesn't have enough memory for, are skipped.
    """
    before = _compute_samples_per_s(pricing, config, pricing.make_timeline(config).step_us)
    candidates: list[Candidate] = [
        (kind, what, override, pricing, replace(config, **changes))
        for kind, what, override, changes in _list_variants(pricing, config)
    ]
    if retrace is not None:
        size = 2 * pricing.traced.batch_size
        unit = "batch" if config.devices == 1 else "device"
        what = f"{size} samples a {unit} instead of {size // 2}"
        override = f"train.batch_size={size * config.devices}"
        candidates.append(("batch", what, override, retrace(size), config))
    best: dict[str, Recommendation] = {}
    for kind, what, override, changed, options in candidates:
        step_us = _price_change(kind, changed, options)
        if step_us is None:
            continue
        after = _compute_samples_per_s(changed, options, step_us)
        gain = after / before - 1
        if kind not in best or gain > best[kind].gain:
            best[kind] = Recommendation(kind, what, override, step_us / 1e3, after, gain)
    return tuple(sorted(best.values(), key=lambda change: (-change.gain, change.kind)))


def _price_change(kind: str, pricing: Pricing, config: ExecutionConfig) -> float | None:
    """Return the microseconds of a changed step; None if the device can't run it."""
    try:
        changes_memory = kind in ("batch", "precision")
        if changes_memory and pricing.plan_memory(config).verdict == "out of memory":
            return None
        return pricing.make_timeline(config).step_us
    except OptionError:
        return None


def _compute_samples_per_s(pricing: Pricing, config: ExecutionConfig, step_us: float) -> float:
    return pricing.traced.batch_size * config.devices / step_us * 1e6


def _list_variants(pricing: Pricing, config: ExecutionConfig) -> Iterator[Variant]:
    """Yield the changes that keep the batch size."""
    if config.precision in ("O0", "O1", None):
        what = "float16 but for batch normalisation and the loss"
        yield "precision", what, "device.precision=O2", {"precision": "O2"}
    if config.precision in ("O0", "O1", "O2"):
        what = "float16 throughout, batch normalisation included"
        yield "precision", what, "device.precision=O3", {"precision": "O3"}
    if config.mode == "op_by_op":
        changes: dict[str, Any] = {"mode": "graph_sink", "data_sink": False}
        yield "sink", "one launch a step", "device.mode=graph_sink", changes
    if config.mode != "loop_sink" or config.sink_size < LONG_SINK:
        override = f"train.sink=true train.sink_size={LONG_SINK}"
        override += "" if config.mode == "loop_sink" else " device.mode=loop_sink"
        changes = {"mode": "loop_sink", "sink_size": LONG_SINK, "data_sink": True}
        yield "sink", f"a loop of {LONG_SINK:,} steps a launch", override, changes
    if config.devices > 1:
        yield from _list_bucket_variants(pricing, config)
    if config.host_workers is not None:
        for workers in (2 * config.host_workers, 4 * config.host_workers):
            what = f"{workers} processes preparing data instead of {config.host_workers}"
            yield "workers", what, f"device.host_workers={workers}", {"host_workers": workers}
    if not config.auto_tune:
        what = "tiles searched by AutoTune"
        # The best of all tilings is as good as the bank's, and advice must not write to a bank.
        changes = {"auto_tune": "exhaustive", "tune_bank": None}
        yield "auto_tune", what, "device.auto_tune=exhaustive", changes


def _list_bucket_variants(pricing: Pricing, config: ExecutionConfig) -> Iterator[Variant]:
    graph, _ = pricing.tasks(config)
    # The backward pass computes the gradients of the last parameters first.
    by_parameter = sorted(graph.gradients, key=itemgetter(2))[::-1]
    for points in list_split_points([nbytes for _, nbytes, _ in by_parameter]):
        if points != config.fusion:
            what = f"gradients in {len(points) + 1} all-reduces"
            override = f"device.all_reduce_fusion={list(points)}".replace(" ", "")
            yield "buckets", what, override, {"fusion": points}


def list_split_points(sizes: list[int]) -> tuple[tuple[int, ...], ...]:
    """Return variants of the points at which gradients are split into all-reduces.

    `sizes` are the bytes of the gradients, in the order of the parameters. Variants are two to four
    all-reduces of about equal bytes, and two all-reduces of which one is small, for the network's
    first layers. A point is the last parameter of a segment, as in `all_reduce_fusion_config`.
    """
    shares = [tuple(part / count for part in range(1, count)) for count in BUCKETS]
    shares += [(share,) for share in FIRST_SHARES]
    if not sizes:
        return ()
    running = np.cumsum(sizes)
    variants = []
    for variant in shares:
        ends = {int(np.abs(running - share * running[-1]).argmin()) for share in variant}
        points = tuple(sorted(end for end in ends if end < len(sizes) - 1))
        if points and points not in variants:
            variants.append(points)
    return tuple(variants)


MAX_CHANGES = 3
"""The text of a price has at most this many recommendations."""
PRICE = "price.json"
TRACE = "trace.json"
PICTURE = "timeline.html"
KEYS = {
    "batch_size": "train.batch_size",
    "sink_size": "train.sink_size",
    "devices": "parallel.devices",
    "all_reduce_fusion": "device.all_reduce_fusion",
    "host_workers": "device.host_workers",
    "precision": "device.precision",
    "mode": "device.mode",
    "software": "device.software",
}
"""Keys of the recipe by the names of options."""


class AscendEstimate:
    """A price and recommendations: figures of one steady step, of all devices together.

    `device` names the chip and the number of devices. `interval_ms` is the 80 % interval of
    `step_ms`. Raises RecipeError for options that the device refuses, and RunError if its memory
    is too small.
    """

    def __init__(self, proposal: StepToPrice, emulated: EmulatedDevice) -> None:
        self._proposal = proposal
        self._emulated = emulated
        self.choice: SinkChoice | None = None
        with pause_garbage_collection():
            try:
                pricing = self._trace(proposal.device_batch)
                self.report = pricing.price_modes(self._choose_config(pricing))
            except OptionError as error:
                raise RecipeError([self._name_key(str(error))]) from error
            memory = self.report.memory
            if memory.verdict == "out of memory":
                batch = proposal.device_batch
                raise RunError(
                    explain_out_of_memory(memory, self.report.graph, batch, proposal.devices)
                )
            self.device = name_devices(proposal.devices, emulated.chip.name)
            self.step_ms = self.report.step_ms
            self.interval_ms = self.report.interval_ms
            self.samples_per_s = self.report.samples_per_s
            self.communication = self.report.communication
            changes = advise(pricing, self.report.config, self._trace)
            self.changes = tuple(map(self._name_batch_key, changes))

    @property
    def time_range(self) -> str:
        return describe_range(self.report)

    @property
    def track_record(self) -> str:
        return " ".join(describe_track_record(self.report))

    def _choose_config(self, pricing: Pricing) -> ExecutionConfig:
        """Return the options of the recipe's steps. With `sink: auto`, choose the sink by price."""
        proposal = self._proposal

        def make_config(sink_steps: int | None) -> ExecutionConfig:
            """Return the options with sinks of `sink_steps` steps; None: without sinks."""
            size = proposal.sink_steps if sink_steps is None else sink_steps
            changed = replace(proposal, sink=sink_steps is not None, sink_steps=size)
            return configure_step(changed, self._emulated)

        if proposal.choose_sink is None:
            return configure_step(proposal, self._emulated)
        self.choice = proposal.choose_sink(
            lambda steps: pricing.price_step(make_config(steps)).step_ms
        )
        return make_config(self.choice.size)

    def _trace(self, batch_size: int) -> Pricing:
        """Trace the recipe's step with a batch size, and return its pricing."""
        proposal = self._proposal
        batch = proposal.batch(batch_size)
        traced = trace_step(proposal.step, proposal.state, batch, get_params)
        return Pricing(traced, self._emulated.chip, exchange_bytes=proposal.exchange_bytes)

    def _name_batch_key(self, change: Recommendation) -> Recommendation:
        """Return a change, with the key of the batch of each device if the recipe has that key."""
        if change.kind != "batch" or not self._proposal.is_batch_per_device:
            return change
        size = int(change.override.partition("=")[2]) // self._proposal.devices
        return replace(change, override=f"parallel.batch_per_device={size}")

    def _name_key(self, problem: str) -> str:
        """Return the problem of an option, "NAME = VALUE: ...", with the recipe's key as name."""
        name, _, details = problem.partition(" = ")
        devices = self._proposal.devices
        if name == "batch_size" and devices > 1:
            size = self._proposal.batch_size
            reason = details.partition(": ")[2]
            share = f"{self._proposal.device_batch} on each of {devices} devices"
            return f"train.batch_size = {size}, {share}: {reason}"
        return f"{KEYS[name]} = {details}" if name in KEYS else f"device: {problem}"

    def __str__(self) -> str:
        useful = [change for change in self.changes if change.gain > 0][:MAX_CHANGES]
        return format_report(self.report, useful, self._proposal.total_steps)

    def summary(self) -> Mapping[str, Any]:
        """Return the entry of summary.json."""
        report = self.report
        config = report.config
        proposal = self._proposal
        return {
            "device": self.device,
            **_summarize(report),
            "run_s": report.step_ms * proposal.total_steps / 1e3,
            "steps": proposal.total_steps,
            "steps_per_pass": proposal.steps_per_epoch,
            "batch_size": proposal.batch_size,
            "batch_per_device": proposal.device_batch,
            "mode": config.mode,
            "sink_size": config.sink_size,
            "devices": config.devices,
            "precision": config.precision,
            "bound": report.bound,
            "shares": dict(report.shares),
            "modes": {mode: _summarize(step) for mode, step in report.modes.items()},
            "memory": {"verdict": report.memory.verdict, "used_bytes": report.memory.used_bytes},
        }

    def save(self, folder: Path) -> tuple[str, ...]:
        """Write price, trace and timeline into a run directory. Return the names of the files."""
        changes = [
            {
                "kind": change.kind,
                "override": change.override,
                "what": change.what,
                "modelled_step_ms": change.step_ms,
                "modelled_samples_per_s": change.samples_per_s,
                "modelled_gain": change.gain,
                "distinguishable": change.distinguishable,
            }
            for change in self.changes
        ]
        proposal = self._proposal
        price = {
            "recipe": proposal.name,
            "batch_size": proposal.batch_size,
            "batch_per_device": proposal.device_batch,
            "steps": proposal.total_steps,
            "steps_per_pass": proposal.steps_per_epoch,
            "modelled_run_s": self.step_ms * proposal.total_steps / 1e3,
            **self.report.to_dict(),
            "changes": changes,
        }
        write_whole(folder / PRICE, json.dumps(price, indent=2, allow_nan=False) + "\n")
        self.report.save_trace(folder / TRACE)
        self.report.save_picture(folder / PICTURE, f"{proposal.name} on {self.device}, modelled")
        names = [PRICE, TRACE, PICTURE]
        if self.report.tuning:
            result = self.report.tuning.to_dict()
            now = datetime.now()
            names.append(write_result(result, folder, now).name)
            bank_folder = find_result_folder(self.report.config.tune_bank)
            if bank_folder is not None:
                write_result(result, bank_folder, now)
        return tuple(names)


def configure_step(proposal: StepToPrice, emulated: EmulatedDevice) -> ExecutionConfig:
    """Return the options with which a recipe would run its steps on the chip.

    `mode: auto` is MindSpore's `dataset_sink_mode`: with sinks the chip loops over the steps of a
    sink, without sinks every step is one launch of the graph with a batch from the host. In eager
    mode the host launches every operation.
    """
    config = emulated.config
    auto: Mode = "loop_sink" if proposal.sink else "graph_sink"
    if proposal.eager or config.stack.is_eager:
        auto = "op_by_op"
    return replace(
        config,
        mode=choose_mode(config.software, emulated.mode or auto),
        sink_size=proposal.sink_steps,
        devices=proposal.devices,
        shares_state=proposal.shares_state,
        data_sink=proposal.sink,
        keep_batchnorm_fp32=proposal.keep_batchnorm_fp32,
        tune_bank=find_custom_bank(config.tune_bank),
        repeat_tune=should_repeat(config.repeat_tune),
    )


def _summarize(step: PricedStep) -> dict[str, Any]:
    return {
        "step_ms": step.step_ms,
        "interval_ms": list(step.interval_ms),
        "samples_per_s": step.samples_per_s,
    }
