"""Price a training step on an emulated Ascend: a recipe's step or any JAX function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast, get_args

from pipeline.backends.ascend.chip.chip_files import load_chip
from pipeline.backends.ascend.chip.hardware import PricedChip, to_priced_chip
from pipeline.backends.ascend.chip.options import (
    MAX_DEVICES,
    MODES,
    ExecutionConfig,
    Mode,
    OptionError,
    Precision,
    StepOptions,
    TuneMode,
    check_count,
    check_switch,
    choose_mode,
)
from pipeline.backends.ascend.chip.tasks import TaskGraph, TaskTime
from pipeline.backends.ascend.compiler.tasks_from_kernels import LoweringOptions
from pipeline.backends.ascend.cost.efficiency import Calibration, load_calibration
from pipeline.backends.ascend.cost.task_time import price_tasks
from pipeline.backends.ascend.memory.memory_plan import MemoryPlan, plan_memory
from pipeline.backends.ascend.pricing.traced_step import (
    Step,
    TracedStep,
    pause_garbage_collection,
    trace_step,
)
from pipeline.backends.ascend.report.priced_step import PricedStep
from pipeline.backends.ascend.report.report import Report
from pipeline.backends.ascend.simulate.launch_modes import compute_images_per_s, schedule
from pipeline.backends.ascend.simulate.timeline import Timeline
from pipeline.backends.ascend.tune.autotune import (
    TuneResult,
    find_custom_bank,
    should_repeat,
    tune,
)

DEFAULTS = ExecutionConfig()
SWITCHES = ("keep_batchnorm_fp32", "data_sink", "repeat_tune", "strict")


class PriceOptions(TypedDict, total=False):
    """Options of `price`, with meanings and defaults as in `ExecutionConfig`."""

    precision: Precision | None
    keep_batchnorm_fp32: bool
    mode: Mode | None
    software: str | None
    sink_size: int
    devices: int
    all_reduce_fusion: Iterable[int] | None
    host_workers: int | None
    data_sink: bool
    auto_tune: TuneMode | None
    tune_bank: str | Path | None
    repeat_tune: bool
    strict: bool


def price(
    step: Step,
    state: Any,
    batch: Any,
    *,
    hardware: str | Path | PricedChip = "ascend910",
    parameters: Callable[[Any], Any] | None = None,
    **options: Unpack[PriceOptions],
) -> Report:
    """Price one step of training on an emulated device.

    `step(state, batch) -> (state, result)` is any JAX function that returns a new state with the
    structure, shapes and types of the old state. `state` and `batch` may hold
    `jax.ShapeDtypeStruct`s: nothing is computed. `batch` is the batch of one device. `parameters`
    returns the trained leaves of a state (default: the float leaves that the loss reads and the
    step changes). `hardware` names a chip in conf/device, or is the path of a chip's YAML file.
    `software` is MindSpore's graph mode by default, and may have a version (`pytorch_eager@1.8`).
    Eager stacks run `op_by_op`. `keep_batchnorm_fp32` keeps batch normalisation in float32 under
    O2, as MindSpore does by default.

    Raises RunError for a step that can't be priced, ChipError for a bad chip, OptionError for other
    arguments out of range, and the errors that `step` raises when it is traced.
    """
    config = _check_options(options)
    for name, function in (("step", step), ("parameters", parameters)):
        if not callable(function) and (name == "step" or function is not None):
            raise OptionError(f"{name} = {function!r}: must be a function")
    chip = hardware if isinstance(hardware, PricedChip) else chipset(str(hardware))
    return Pricing(trace_step(step, state, batch, parameters), chip).price_modes(config)


def _check_options(options: PriceOptions) -> ExecutionConfig:
    """Check options. Raises OptionError, and TypeError for an unknown option."""
    for name in options:
        if name not in PriceOptions.__annotations__:
            raise TypeError(f"price() got an unexpected keyword argument {name!r}")
    software = options.get("software")
    workers = options.get("host_workers")
    switches = {
        name: check_switch(name, value) for name, value in options.items() if name in SWITCHES
    }
    switches["repeat_tune"] = should_repeat(switches.get("repeat_tune", DEFAULTS.repeat_tune))
    return replace(
        DEFAULTS,
        precision=options.get("precision", DEFAULTS.precision),
        mode=choose_mode(software, options.get("mode")),
        software=software,
        sink_size=check_count("sink_size", options.get("sink_size", DEFAULTS.sink_size)),
        devices=check_count("devices", options.get("devices", DEFAULTS.devices), most=MAX_DEVICES),
        fusion=_parse_fusion(options.get("all_reduce_fusion")),
        host_workers=None if workers is None else check_count("host_workers", workers),
        auto_tune=_parse_tune_mode(options.get("auto_tune")),
        tune_bank=find_custom_bank(options.get("tune_bank")),
        **switches,  # type: ignore[arg-type]
    )


def _parse_tune_mode(mode: Any) -> TuneMode | None:
    """Return the mode in lower case: CANN writes `auto_tune_mode="RL,GA"`."""
    if isinstance(mode, str):
        mode = mode.lower().replace(" ", "").replace("ga,rl", "rl,ga")
    if mode is not None and mode not in get_args(TuneMode):
        names = ", ".join(get_args(TuneMode))
        raise OptionError(f"auto_tune = {mode!r}: must be None or one of {names}")
    return cast(TuneMode | None, mode)


def _parse_fusion(fusion: Iterable[int] | None) -> tuple[int, ...] | None:
    """Return the points of `all_reduce_fusion`. `form_buckets` checks their order."""
    if fusion is None:
        return None
    if isinstance(fusion, str) or not isinstance(fusion, Iterable):
        raise OptionError(f"all_reduce_fusion = {fusion!r}: must be a list, such as [85, 160]")
    return tuple(check_count("all_reduce_fusion", point) for point in fusion)


def chipset(name_or_path: str) -> PricedChip:
    """Return a chip by its name in conf/device, or from its YAML file. Raises ChipError."""
    file = Path(name_or_path)
    return _load_chipset(name_or_path, file.stat().st_mtime_ns if file.is_file() else None)


@cache
def _load_chipset(name_or_path: str, written_ns: int | None) -> PricedChip:
    """Return a chip by its file, cached until the modification time `written_ns` changes."""
    return to_priced_chip(load_chip(name_or_path))


class Pricing:
    """A traced step on a chip, priced under any options.

    `exchange_bytes` are the sizes of the all-reduces besides the gradients'. Results are cached
    with the traced step for its next price on the same chip.
    """

    def __init__(
        self,
        traced: TracedStep,
        chip: PricedChip,
        calibration: Calibration | None = None,
        exchange_bytes: tuple[int, ...] = (),
    ) -> None:
        self.traced = traced
        self.exchange_bytes = exchange_bytes
        self.chip = chip
        self.calibration = calibration or load_calibration()
        self._shared = traced.get_results(chip, self.calibration)
        self._tuned_tasks: dict[Any, tuple[TaskGraph, tuple[TaskTime, ...]]] = {}
        self._tuned: dict[Any, TuneResult] = {}

    def price_modes(self, config: ExecutionConfig) -> Report:
        """Price a step under all launch modes, with its memory. Raises OptionError, RunError."""
        step = self.price_step(config)
        modes = {}
        for mode in MODES:
            # A mode that the device can't run the step in is left out.
            with suppress(OptionError):
                # Both modes of graphs have the same stack.
                is_graph = mode != "op_by_op" and not config.stack.is_eager
                software = config.software if is_graph else None
                changed = replace(config, mode=mode, software=software)
                modes[mode] = step if mode == config.mode else self.price_step(changed)
        return Report(
            **{field.name: getattr(step, field.name) for field in fields(PricedStep)},
            memory=self.plan_memory(config),
            tuning=self.get_tuning(config),
            modes=modes,
        )

    def price_step(self, config: ExecutionConfig) -> PricedStep:
        """Price a step under its launch mode alone. Raises OptionError, RunError."""
        graph, times = self.tasks(config)
        return PricedStep(
            chip=self.chip.name,
            config=config,
            batch_size=self.traced.batch_size,
            batch_pixels=self.traced.batch_pixels,
            graph=graph,
            times=times,
            timeline=self.make_timeline(config),
            exchange_bytes=self.exchange_bytes,
            calibration=self.calibration,
            hardware=self.chip.hardware,
            sources=self.chip.sources,
            measured_steps=self.chip.measured_steps,
        )

    def tasks(self, config: ExecutionConfig) -> tuple[TaskGraph, tuple[TaskTime, ...]]:
        """Return the tasks of a step and the time of each. Raises OptionError, RunError."""
        key = self._make_key(config)
        uses_tuning = _uses_tuning(config)
        # A bank's file may change from one price to another, so these tasks are not shared.
        priced = self._tuned_tasks if uses_tuning else self._shared.tasks
        if key not in priced:
            with pause_garbage_collection():
                graph = self.traced.lower(self._make_lowering_options(config))
            for buffer in graph.buffers:
                if buffer.dtype not in self.chip.dtypes and not buffer.dtype.startswith("key"):
                    raise OptionError(
                        f"{buffer.name}: {buffer.dtype} is not a type of {self.chip.name}, which "
                        f"has {', '.join(self.chip.dtypes)}; trace the step in float32 and choose "
                        "a precision, or use float16"
                    )
            hardware = self.chip.hardware
            efficiency = self.calibration.efficiency
            tiles = None
            if uses_tuning:
                self._tuned[key] = tune(graph, hardware, config, efficiency)
                tiles = self._tuned[key].tiles
            times = price_tasks(graph, hardware, efficiency, tiles)
            # The chip's figure for the interval between two steps includes GetNext.
            priced[key] = (
                graph,
                tuple(
                    replace(time, us=0.0, roofline_us=0.0) if task.phase == "data" else time
                    for task, time in zip(graph.tasks, times, strict=True)
                ),
            )
        return priced[key]

    def get_tuning(self, config: ExecutionConfig) -> TuneResult | None:
        """Return AutoTune's result; None if the options have neither a search nor a bank."""
        self.tasks(config)
        return self._tuned.get(self._make_key(config))

    def _make_key(self, config: ExecutionConfig) -> tuple[Any, ...]:
        """Return the options that tasks and their times depend on, as a key of the caches."""
        lowering = self._make_lowering_options(config)
        return (lowering, config.auto_tune, config.tune_bank, config.repeat_tune)

    def _make_lowering_options(self, config: ExecutionConfig) -> LoweringOptions:
        if config.precision not in (*get_args(Precision), None):
            names = ", ".join(get_args(Precision))
            raise OptionError(
                f"precision = {config.precision!r}: must be one of {names}, or None for the traced "
                "types"
            )
        return LoweringOptions(
            config.precision,
            by_op=config.mode == "op_by_op",
            strict=config.strict,
            keep_batchnorm_fp32=config.keep_batchnorm_fp32,
            without=config.without | config.stack.missing_fusions,
            core=self.chip.core,
            cube_float32=self.chip.hardware.cube_fp32_macs_per_cycle > 0,
        )

    def make_step_options(self, config: ExecutionConfig) -> StepOptions:
        """Return the options of `schedule`, from a price's options and the traced step."""
        hardware = self.chip.hardware
        pixels = self.traced.batch_pixels
        rate = None
        if config.host_workers is not None and pixels is not None:
            rate = compute_images_per_s(config.host_workers, pixels, config.devices, hardware)
        is_torch = config.stack.name == "pytorch_eager"
        return StepOptions(
            mode=config.mode,
            sink_size=config.sink_size,
            devices=config.devices,
            fusion=config.fusion,
            exchange_bytes=self.exchange_bytes,
            batch_size=self.traced.batch_size,
            batch_bytes=self.traced.batch_bytes,
            host_images_per_s=rate,
            data_sink=config.data_sink,
            prefetches=is_torch,
            op_launch_us=hardware.pytorch_op_launch_us if is_torch else hardware.op_launch_us,
        )

    def make_timeline(self, config: ExecutionConfig) -> Timeline:
        """Return one steady step under the launch mode of the options."""
        graph, times = self.tasks(config)
        options = self.make_step_options(config)
        key = (self._make_key(config), options)
        if _uses_tuning(config) or key not in self._shared.timelines:
            hardware = self.chip.hardware
            gap_us = hardware.task_gap_us + self.calibration.task_us
            hardware = replace(hardware, task_gap_us=gap_us)
            self._shared.timelines[key] = schedule(graph, times, hardware, options)
        return self._shared.timelines[key]

    def plan_memory(self, config: ExecutionConfig) -> MemoryPlan:
        """Return the memory plan, which is the same for `graph_sink` and `loop_sink`."""
        num_shards = config.devices if config.shares_state else 1
        one_pool = config.stack.has_one_pool
        key = (self._make_lowering_options(config), config.devices > 1, num_shards, one_pool)
        if key not in self._shared.memory:
            graph, _ = self.tasks(config)
            plan = plan_memory(graph, self.chip.hardware, config.devices, num_shards)
            self._shared.memory[key] = plan.join_pools() if one_pool else plan
        return self._shared.memory[key]

    def with_figures(self, **figures: float) -> Pricing:
        """Return the same step on a chip with other figures."""
        chip = replace(self.chip, hardware=replace(self.chip.hardware, **figures))
        return Pricing(self.traced, chip, self.calibration, self.exchange_bytes)


def _uses_tuning(config: ExecutionConfig) -> bool:
    """Return whether tiles come from AutoTune or from its bank."""
    return bool(config.auto_tune or config.tune_bank or config.repeat_tune)
