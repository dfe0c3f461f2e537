"""What a training step would cost on an Ascend: for recipes and for any JAX function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, cast, get_args

from pipeline.backends.ascend.chip.chip_files import load_chip
from pipeline.backends.ascend.chip.hardware import Hardware, hardware_of
from pipeline.backends.ascend.chip.options import (
    MAX_DEVICES,
    Mode,
    OptionError,
    StepOptions,
    switch,
    whole,
)
from pipeline.backends.ascend.chip.tasks import TaskGraph, TaskTime
from pipeline.backends.ascend.compiler.phases import Precision
from pipeline.backends.ascend.cost.calibration import Calibration, load_calibration
from pipeline.backends.ascend.cost.task_time import price_tasks
from pipeline.backends.ascend.memory.memory_plan import MemoryPlan, plan_memory
from pipeline.backends.ascend.pricing.traced_step import Step, TracedStep, trace_step
from pipeline.backends.ascend.report.report import Report
from pipeline.backends.ascend.simulate.feeding import device_images_per_s
from pipeline.backends.ascend.simulate.launch_modes import schedule
from pipeline.backends.ascend.simulate.timeline import Timeline
from pipeline.backends.ascend.tune.autotune import TuneMode, TuneResult, tune

TYPES_OF_PRECISION = ("O0", "O2", "O3")


@dataclass(frozen=True)
class ExecutionConfig:
    """What is asked about a step, apart from the step and the chip.

    `precision` re-types a float32 graph as MindSpore's amp_level would, None prices the types as
    traced. `fusion` are the points at which gradients are split into all-reduces. `host_workers`
    prepare the data of one device; None: data is always ready. `auto_tune` searches the tiles of
    every product, `tune_bank` is the file that keeps what was found. `without` names buffer
    fusions to leave out.
    """

    precision: Precision | None = "O2"
    mode: Mode = "loop_sink"
    sink_size: int = 1000
    devices: int = 1
    fusion: tuple[int, ...] | None = None
    host_workers: int | None = None
    data_sink: bool = True
    auto_tune: TuneMode | None = None
    tune_bank: str | None = None
    strict: bool = False
    without: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Chipset:
    """A chip, ready to be priced for."""

    name: str
    dtypes: tuple[str, ...]
    hardware: Hardware


def price(
    step: Step,
    state: Any,
    batch: Any,
    *,
    hardware: str | Path | Chipset = "ascend910",
    parameters: Callable[[Any], Any] | None = None,
    precision: Precision | None = "O2",
    mode: Mode = "loop_sink",
    sink_size: int = 1000,
    devices: int = 1,
    all_reduce_fusion: Iterable[int] | None = None,
    host_workers: int | None = None,
    data_sink: bool = True,
    auto_tune: TuneMode | None = None,
    tune_bank: str | Path | None = None,
    strict: bool = False,
) -> Report:
    """Price one step of training on an emulated device.

    `step(state, batch) -> (state, anything)` is any JAX function; `state` and `batch` may hold
    `jax.ShapeDtypeStruct`s, nothing is computed. `parameters` picks the trained leaves of a state
    (default: the float leaves that the loss reads and the step changes). `hardware` names a chip
    in conf/device, or is a chip's YAML file. `batch` is what one of the `devices` gets.

    Raises RunError for a step that can't be priced, ChipError for a bad chip, OptionError for
    other arguments out of range. What `step` itself raises when it is traced comes through.
    """
    question = ExecutionConfig(
        precision,
        mode,
        whole("sink_size", sink_size),
        whole("devices", devices, most=MAX_DEVICES),
        _points(all_reduce_fusion),
        whole("host_workers", host_workers) if host_workers is not None else None,
        switch("data_sink", data_sink),
        _mode_of_tuning(auto_tune),
        str(tune_bank) if tune_bank is not None else None,
        switch("strict", strict),
    )
    for name, function in (("step", step), ("parameters", parameters)):
        if not callable(function) and (name == "step" or function is not None):
            raise OptionError(f"{name}: {function!r} should be a function")
    chip = hardware if isinstance(hardware, Chipset) else chipset(str(hardware))
    return Pricing(trace_step(step, state, batch, parameters), chip).report(question)


def _mode_of_tuning(mode: Any) -> TuneMode | None:
    if mode is not None and mode not in get_args(TuneMode):
        raise OptionError(
            f"auto_tune: {mode!r} should be None or one of {', '.join(get_args(TuneMode))}"
        )
    return cast(TuneMode | None, mode)


def _points(fusion: Iterable[int] | None) -> tuple[int, ...] | None:
    """The points of `all_reduce_fusion`; whether they grow, the gradients' number decides."""
    if fusion is None:
        return None
    if isinstance(fusion, str) or not isinstance(fusion, Iterable):
        raise OptionError(f"all_reduce_fusion: {fusion!r} should be a list, as [85, 160]")
    return tuple(whole("all_reduce_fusion", point) for point in fusion)


def chipset(name_or_path: str) -> Chipset:
    """A chip by its name in conf/device, or from its YAML file. Raises ChipError."""
    file = Path(name_or_path)
    return _chipset(name_or_path, file.stat().st_mtime_ns if file.is_file() else None)


@cache
def _chipset(name_or_path: str, written_ns: int | None) -> Chipset:
    """A chip as its file was when it was written last."""
    return chipset_of(load_chip(name_or_path))


def chipset_of(chip: Any) -> Chipset:
    """A checked chip, ready to be priced for."""
    return Chipset(chip.chip, tuple(chip.dtypes), hardware_of(chip))


class Pricing:
    """A traced step on a chip: answers questions about it, remembering what they share."""

    def __init__(
        self, traced: TracedStep, chip: Chipset, calibration: Calibration | None = None
    ) -> None:
        self.traced, self.chip = traced, chip
        self.calibration = calibration or load_calibration()
        self._priced: dict[Any, tuple[TaskGraph, tuple[TaskTime, ...]]] = {}
        self._tuned: dict[Any, TuneResult] = {}
        self._memory: dict[Any, MemoryPlan] = {}

    def report(self, question: ExecutionConfig) -> Report:
        """Everything about one way to run the step. Raises OptionError, RunError."""
        graph, times = self.tasks(question)
        return Report(self, question, graph, times, self.timeline(question))

    def tasks(self, question: ExecutionConfig) -> tuple[TaskGraph, tuple[TaskTime, ...]]:
        """The tasks of a step and the time of each."""
        key = self._key(question)
        if key not in self._priced:
            graph = self.traced.tasks(
                question.precision,
                by_op=question.mode == "op_by_op",
                strict=question.strict,
                without=question.without,
            )
            self._refuse_foreign_types(graph)
            hardware, efficiency = self.chip.hardware, self.calibration.efficiency
            if question.auto_tune:
                bank = Path(question.tune_bank) if question.tune_bank else None
                self._tuned[key] = tune(
                    graph, hardware, mode=question.auto_tune, bank_path=bank, efficiency=efficiency
                )
            tiles = self._tuned[key].tiles if question.auto_tune else None
            times = price_tasks(graph, hardware, efficiency, tiles)
            self._priced[key] = graph, _without_data(graph, times)
        return self._priced[key]

    def tuning(self, question: ExecutionConfig) -> TuneResult | None:
        """What AutoTune found for a question that asks for it."""
        self.tasks(question)
        return self._tuned.get(self._key(question))

    def _key(self, question: ExecutionConfig) -> tuple[Any, ...]:
        """What tasks and their times depend on."""
        by_op, precision = question.mode == "op_by_op", self._precision(question)
        tuning = (question.auto_tune, question.tune_bank)
        return (precision, by_op, question.strict, question.without, tuning)

    def _precision(self, question: ExecutionConfig) -> Precision | None:
        if question.precision not in (*TYPES_OF_PRECISION, None):
            raise OptionError(
                f"precision: {question.precision!r} is none of O0, O2, O3; None prices the traced "
                "types"
            )
        return question.precision

    def _refuse_foreign_types(self, graph: TaskGraph) -> None:
        known = set(self.chip.dtypes)
        for buffer in graph.buffers:
            if buffer.dtype not in known and not buffer.dtype.startswith("key"):
                raise OptionError(
                    f"{buffer.name}: {buffer.dtype} is not a type of {self.chip.name}, which has "
                    f"{', '.join(self.chip.dtypes)}; trace the step in float32 and choose a "
                    "precision, or use float16"
                )

    def options(self, question: ExecutionConfig) -> StepOptions:
        """The question in the scheduler's terms."""
        pixels, workers = self.traced.batch_pixels, question.host_workers
        rate = None
        if workers is not None and pixels is not None:
            rate = device_images_per_s(workers, pixels, question.devices, self.chip.hardware)
        return StepOptions(
            mode=question.mode,
            sink_size=question.sink_size,
            devices=question.devices,
            fusion=question.fusion,
            batch_size=self.traced.batch_size,
            batch_bytes=self.traced.batch_bytes,
            host_images_per_s=rate,
            data_sink=question.data_sink,
        )

    def timeline(self, question: ExecutionConfig) -> Timeline:
        """One steady step under the question's launch mode."""
        graph, times = self.tasks(question)
        hardware = self.calibration.adjusted(self.chip.hardware)
        return schedule(graph, times, hardware, self.options(question))

    def memory(self, question: ExecutionConfig) -> MemoryPlan:
        """Where everything lies; the launch mode makes no difference to the sunk graph's plan."""
        by_op = question.mode == "op_by_op"
        key = (question.precision, by_op, question.without, question.devices > 1)
        if key not in self._memory:
            graph, _ = self.tasks(question)
            self._memory[key] = plan_memory(graph, self.chip.hardware, question.devices)
        return self._memory[key]

    def on(self, **figures: float) -> Pricing:
        """The same step on a chip with other figures. Raises OptionError for unknown ones."""
        known = {field.name for field in fields(Hardware)}
        unknown = sorted(set(figures) - known)
        if unknown:
            raise OptionError(f"hardware has no figure {unknown[0]!r}; it has {sorted(known)}")
        hardware = replace(self.chip.hardware, **figures)
        return Pricing(self.traced, replace(self.chip, hardware=hardware), self.calibration)


def _without_data(graph: TaskGraph, times: tuple[TaskTime, ...]) -> tuple[TaskTime, ...]:
    """GetNext is a part of the interval between two steps, which the chip's figures have whole."""
    return tuple(
        replace(time, us=0.0, roofline_us=0.0) if task.phase == "data" else time
        for task, time in zip(graph.tasks, times, strict=True)
    )
