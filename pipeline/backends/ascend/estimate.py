"""The price of a recipe's step on an emulated chip, as text and as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.backends.ascend.chip.options import (
    EmulatedDevice,
    ExecutionConfig,
    Mode,
    OptionError,
    choose_mode,
)
from pipeline.backends.ascend.memory.memory_plan import explain_out_of_memory
from pipeline.backends.ascend.pricing.advice import advise
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
