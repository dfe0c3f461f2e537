"""The price of a recipe's step on an emulated chip, in print and as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.backends.ascend.chip.options import (
    EAGER,
    EmulatedDevice,
    ExecutionConfig,
    Mode,
    OptionError,
    mode_of,
)
from pipeline.backends.ascend.memory.out_of_memory import out_of_memory_message
from pipeline.backends.ascend.pricing.advice import advise
from pipeline.backends.ascend.pricing.pricing import Pricing
from pipeline.backends.ascend.pricing.traced_step import (
    TracedStep,
    no_garbage_collection,
    trace_step,
)
from pipeline.backends.ascend.report.recommendation import Recommendation
from pipeline.backends.ascend.report.report import Report
from pipeline.backends.ascend.report.text import printout, several
from pipeline.backends.ascend.tune.bank_path import custom_bank
from pipeline.backends.base import StepToPrice
from pipeline.backends.rates import Communication
from pipeline.backends.sink_choice import SinkChoice
from pipeline.core.errors import RecipeError, RunError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.knowledge_bank import write_result
from pipeline.training.state import TrainState

SHOWN_CHANGES = 3
PRICE, TRACE, PICTURE = "price.json", "trace.json", "timeline.html"
KEYS = {
    "batch_size": "train.batch_size",
    "sink_size": "train.sink_size",
    "devices": "parallel.devices",
    "all_reduce_fusion": "device.all_reduce_fusion",
    "host_workers": "device.host_workers",
    "precision": "device.precision",
    "mode": "device.mode",
}
"""The recipe's keys for options with another name."""


class AscendEstimate:
    """A price and recommendations. Raises RunError where the device's memory is too small."""

    def __init__(self, proposal: StepToPrice, emulated: EmulatedDevice) -> None:
        self._proposal, self._emulated = proposal, emulated
        self.choice: SinkChoice | None = None
        with no_garbage_collection():
            pricing, self.report = self._priced()
            found = advise(pricing, self.report.config, self._pricing)
            self.changes: tuple[Recommendation, ...] = tuple(map(self._in_recipe, found))

    def _priced(self) -> tuple[Pricing, Report]:
        proposal = self._proposal
        try:
            pricing = self._pricing(proposal.device_batch)
            report = pricing.report(self._config(pricing))
        except OptionError as error:
            raise RecipeError([self._with_key(str(error))]) from error
        if report.memory.verdict == "out of memory":
            message = out_of_memory_message(
                report.memory, report.graph, batch=proposal.device_batch, devices=proposal.devices
            )
            raise RunError(message)
        return pricing, report

    def _config(self, pricing: Pricing) -> ExecutionConfig:
        """Return how the recipe runs its steps; under `sink: auto`, the sink is chosen by price."""
        proposal, emulated = self._proposal, self._emulated
        if proposal.choose_sink is None:
            return config_of(proposal, emulated)

        def price(sink_steps: int | None) -> float:
            return pricing.step(config_of(_in_sinks(proposal, sink_steps), emulated)).step_ms

        self.choice = proposal.choose_sink(price)
        return config_of(_in_sinks(proposal, self.choice.size), emulated)

    def _pricing(self, batch_size: int) -> Pricing:
        return Pricing(trace_proposal(self._proposal, batch_size), self._emulated.chip)

    def _in_recipe(self, change: Recommendation) -> Recommendation:
        """Return a change with the keys that the recipe uses."""
        if change.kind != "batch" or not self._proposal.sizes_each:
            return change
        size = int(change.override.partition("=")[2]) // self._proposal.devices
        return replace(change, override=f"parallel.batch_per_device={size}")

    def _with_key(self, problem: str) -> str:
        """Return an option's error under the recipe's key: it opens with the option's name."""
        name, colon, rest = problem.partition(":")
        if name == "batch_size" and self._proposal.devices > 1:
            size, devices = self._proposal.batch_size, self._proposal.devices
            return f"train.batch_size = {size}, shared by {devices} devices:{rest}"
        return f"{KEYS[name]}{colon}{rest}" if name in KEYS else f"device: {problem}"

    @property
    def device(self) -> str:
        """The chip, and the number of devices."""
        return several(self.report.config.devices, self._emulated.chip.name)

    @property
    def step_ms(self) -> float:
        """Milliseconds of one steady step."""
        return self.report.step_ms

    @property
    def interval_ms(self) -> tuple[float, float]:
        """The 80 % interval of `step_ms`."""
        return self.report.interval_ms

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all devices together."""
        return self.report.samples_per_s

    @property
    def communication(self) -> Communication | None:
        """The all-reduces of several devices; None for one."""
        return self.report.communication

    @property
    def _run_s(self) -> float:
        return self.report.step_ms * self._proposal.total_steps / 1e3

    def __str__(self) -> str:
        useful = [change for change in self.changes if change.gain > 0][:SHOWN_CHANGES]
        return printout(self.report, useful, self._proposal.total_steps)

    def summary(self) -> Mapping[str, Any]:
        """Return the entry of summary.json."""
        report, config, proposal = self.report, self.report.config, self._proposal
        return {
            "device": self.device,
            "step_ms": report.step_ms,
            "interval_ms": list(report.interval_ms),
            "samples_per_s": report.samples_per_s,
            "run_s": self._run_s,
            "steps": proposal.total_steps,
            "steps_per_pass": proposal.steps_per_pass,
            "batch_size": proposal.batch_size,
            "batch_per_device": proposal.device_batch,
            "mode": config.mode,
            "sink_size": config.sink_size,
            "devices": config.devices,
            "precision": config.precision,
            "bound": report.bound,
            "shares": dict(report.shares),
            "modes": {
                mode: {
                    "step_ms": other.step_ms,
                    "interval_ms": list(other.interval_ms),
                    "samples_per_s": other.samples_per_s,
                }
                for mode, other in report.modes.items()
            },
            "memory": {"verdict": report.memory.verdict, "used_bytes": report.memory.used_bytes},
        }

    def save(self, folder: Path) -> tuple[str, ...]:
        """Write price, trace and picture into a run directory. Return the names of the files."""
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
        run = {
            "recipe": proposal.name,
            "batch_size": proposal.batch_size,
            "batch_per_device": proposal.device_batch,
            "steps": proposal.total_steps,
            "steps_per_pass": proposal.steps_per_pass,
            "modelled_run_s": self._run_s,
        }
        price = {**run, **self.report.to_dict(), "changes": changes}
        write_whole(folder / PRICE, json.dumps(price, indent=2, allow_nan=False) + "\n")
        self.report.save_trace(folder / TRACE)
        title = f"{self._proposal.name} on {self.device}, modelled"
        self.report.save_picture(folder / PICTURE, title)
        tuning = self.report.tuning
        tuned = (write_result(tuning.to_dict(), folder, datetime.now()).name,) if tuning else ()
        return PRICE, TRACE, PICTURE, *tuned


def _in_sinks(proposal: StepToPrice, sink_steps: int | None) -> StepToPrice:
    size = proposal.sink_steps if sink_steps is None else sink_steps
    return replace(proposal, sink=sink_steps is not None, sink_steps=size)


def config_of(proposal: StepToPrice, emulated: EmulatedDevice) -> ExecutionConfig:
    """Return how a recipe would run its steps on the chip.

    `mode: auto` is MindSpore's `dataset_sink_mode`: with sinks the chip loops over the steps of
    one, without them every step is one launch of the graph with a batch from the host. In eager
    mode the host launches every operation.
    """
    config = emulated.config
    auto: Mode = "loop_sink" if proposal.sink else "graph_sink"
    if proposal.eager or config.software in EAGER:
        auto = "op_by_op"
    return replace(
        config,
        mode=mode_of(config.software, emulated.mode or auto),
        sink_size=proposal.sink_steps,
        devices=proposal.devices,
        data_sink=proposal.sink,
        tune_bank=custom_bank(config.tune_bank),
    )


def trace_proposal(proposal: StepToPrice, batch_size: int) -> TracedStep:
    """Trace a recipe's step, with a batch of any size."""
    return trace_step(proposal.step, proposal.state, proposal.batch(batch_size), _parameters)


def _parameters(state: TrainState) -> Any:
    return state.params
