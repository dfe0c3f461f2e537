"""Options of a priced step: types, launch mode, sinks, devices, data, AutoTune."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, get_args

from pipeline.backends.ascend.chip.hardware import PricedChip
from pipeline.core.errors import PipelineError

Mode = Literal["op_by_op", "graph_sink", "loop_sink"]
MODES: tuple[Mode, ...] = get_args(Mode)
Precision = Literal["O0", "O2", "O3"]
TuneMode = Literal["exhaustive", "ga", "rl", "rl,ga"]
Software = Literal["mindspore_graph", "mindspore_eager", "pytorch_eager"]
"""Software stacks that launch a step: MindSpore's graph mode, PyNative, and torch_npu's eager."""
EAGER: tuple[Software, ...] = ("mindspore_eager", "pytorch_eager")
MAX_DEVICES = 1024


class OptionError(PipelineError):
    """An option of a priced step is out of range or does not fit the emulated device."""

    exit_status = 2


@dataclass(frozen=True)
class ExecutionConfig:
    """Options of a priced step, with the defaults of `pipeline.backends.ascend.price`.

    `precision` re-types a float32 graph as MindSpore's amp_level would, None prices the types as
    traced. `fusion` are the points at which gradients are split into all-reduces. `host_workers`
    processes prepare the data of one device; None: data is always ready. `auto_tune` searches the
    tiles of every product, `repeat_tune` those too that a bank has; `tune_bank` is the file that
    keeps the results, and gives them without a search. `strict` makes an
    unknown primitive an error. `without` names buffer fusions to skip. `software` is the stack
    whose launches and conversions are priced; None is MindSpore's, in the mode that is asked for.
    `keep_batchnorm_fp32` is MindSpore's option of amp levels, off in the model zoo's scripts.
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
    repeat_tune: bool = False
    strict: bool = False
    without: frozenset[str] = frozenset()
    software: Software | None = None
    keep_batchnorm_fp32: bool = False


@dataclass(frozen=True)
class EmulatedDevice:
    """A chip, and how it runs steps; a run sets sinks and devices.

    `mode` is None if it depends on the sink of a run, else the mode of `config`.
    """

    chip: PricedChip
    config: ExecutionConfig
    mode: Mode | None = None


@dataclass(frozen=True, slots=True)
class StepOptions:
    """A launch mode and its settings.

    `op_by_op` launches every kernel from the host, `graph_sink` the whole step, `loop_sink` a loop
    of `sink_size` steps. A loop sink takes its batches from the queue on the device and op-by-op
    launch never does (MindSpore's `dataset_sink_mode` turns on all three at once), so `data_sink`
    decides for `graph_sink` alone.

    `fusion` has MindSpore's `all_reduce_fusion_config`; None is one all-reduce. `overlap` lets an
    all-reduce start before the backward pass ends. `batch_size` and `batch_bytes` are of one
    device. `host_images_per_s` is what the host prepares for one device
    (`launch_modes.compute_images_per_s`); None means that data is always ready. `op_launch_us`
    replaces the chip's host time of one op. `ai_cpu_streams` are the streams of AI CPU tasks: in
    the msprof trace of AlexNet (2023) both dropout masks follow one another on one.

    Raises:
        OptionError: a value is out of its range; the message names it.
    """

    mode: Mode = "loop_sink"
    sink_size: int = 1
    devices: int = 1
    fusion: tuple[int, ...] | None = None
    overlap: bool = True
    batch_size: int = 1
    batch_bytes: int = 0
    host_images_per_s: float | None = None
    data_sink: bool = True
    op_launch_us: float | None = None
    ai_cpu_streams: int = 1

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise OptionError(f"mode: {self.mode!r} is none of {', '.join(MODES)}")
        for name in ("sink_size", "devices", "batch_size", "ai_cpu_streams"):
            check_count(name, getattr(self, name))
        _check_range("batch_bytes", self.batch_bytes, least=0)
        if self.op_launch_us is not None:
            _check_range("op_launch_us", self.op_launch_us, least=0)
        if self.host_images_per_s is not None:
            _check_range("host_images_per_s", self.host_images_per_s, least=1e-9)

    @property
    def uses_queue(self) -> bool:
        """Whether batches come from the queue on the device."""
        return self.mode == "loop_sink" or (self.mode == "graph_sink" and self.data_sink)

    @property
    def steps_per_launch(self) -> int:
        """Steps that one launch from the host runs."""
        return self.sink_size if self.mode == "loop_sink" else 1


def choose_mode(software: Any, mode: Mode | None) -> Mode:
    """Return the launch mode of a software stack: the one that is asked for, if it has it.

    Raises OptionError for an unknown stack, and a mode that the stack doesn't have.
    """
    if software is None:
        mode = "loop_sink" if mode is None else mode
        if mode not in MODES:
            raise OptionError(f"mode: {mode!r} is none of {', '.join(MODES)}")
        return mode
    if software not in get_args(Software):
        names = ", ".join(get_args(Software))
        raise OptionError(f"software: {software!r} is none of {names}; None is MindSpore's")
    eager = software in EAGER
    if mode is None:
        return "op_by_op" if eager else "loop_sink"
    if eager != (mode == "op_by_op"):
        right = "op_by_op" if eager else "graph_sink or loop_sink"
        raise OptionError(f"mode: {mode} is no mode of {software}, which runs {right}")
    return mode


def check_count(name: str, value: Any, most: int | None = None) -> int:
    """Return a count as an int. Raises OptionError unless it is a whole number from 1 to `most`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise OptionError(f"{name}: {value!r} should be a whole number")
    if value < 1:
        raise OptionError(f"{name}: {value} should be at least 1")
    if most is not None and value > most:
        raise OptionError(f"{name}: {value} should be at most {most}")
    return index(value)


def check_switch(name: str, value: Any) -> bool:
    """Return True or False. Raises OptionError for anything else."""
    if not isinstance(value, bool):
        raise OptionError(f"{name}: {value!r} should be True or False")
    return value


def _check_range(name: str, value: float, *, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        limit = "zero or more" if least == 0 else "more than zero"
        raise OptionError(f"{name}: {value} should be {limit}, and finite")
