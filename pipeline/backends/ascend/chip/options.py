"""Options of a priced step: types, launch mode, sinks, devices, data, AutoTune, software stack.

A stack of software that launches a step is named by framework and version: `mindspore_graph@1.8`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from operator import index
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PositiveInt, field_validator

from pipeline.backends.ascend.chip.hardware import PricedChip
from pipeline.core.errors import PipelineError
from pipeline.core.files.name_text import find_nearest
from pipeline.core.files.safe_yaml import parse_written_yaml
from pipeline.core.registry import FilePath, Seq, Spec

EAGER = ("mindspore_eager", "pytorch_eager")
"""Stacks that launch op by op: MindSpore's PyNative mode and torch_npu's eager mode."""
ONE_POOL_SINCE = "1.5"
"""MindSpore's first version whose parameters and feature maps share one pool: 30 of 32 GB, with
parameters from its end and feature maps from its start (notes on the code of r1.5)."""
_VERSION = re.compile(r"(\d{1,4}\.\d{1,4})(\.\d{1,4})?")
Mode = Literal["op_by_op", "graph_sink", "loop_sink"]
MODES: tuple[Mode, ...] = get_args(Mode)
Precision = Literal["O0", "O1", "O2", "O3"]
TuneMode = Literal["exhaustive", "ga", "rl", "rl,ga"]
MAX_DEVICES = 1024


@dataclass(frozen=True)
class Stack:
    """A software stack. `missing_fusions` are the fusions that its version lacks.

    `version` is None if none was named.
    """

    name: str
    missing_fusions: frozenset[str] = frozenset()
    version: str | None = None

    @property
    def is_eager(self) -> bool:
        """Whether the host launches every op."""
        return self.name in EAGER

    @property
    def has_one_pool(self) -> bool:
        """Whether parameters and feature maps share one pool of memory.

        Eager frameworks allocate all from one, and MindSpore since `ONE_POOL_SINCE`. A MindSpore
        whose version isn't named has the pools of CANN's documents.
        """
        if self.name == "mindspore_graph":
            return self.version is not None and _rank(self.version) >= _rank(ONE_POOL_SINCE)
        return True


@cache
def load_stacks() -> Mapping[str, Mapping[str, list[str]]]:
    """Return the fusions that each version of each stack lacks, by stack and version."""
    file = Path(__file__).with_name("software.yaml")
    stacks: Any = parse_written_yaml(file.read_text(encoding="utf-8"))
    return stacks  # type: ignore[no-any-return]


@cache
def find_stack(software: str) -> Stack:
    """Return a stack by its name, or by its name and version, such as `pytorch_eager@1.8`.

    Without a version it is the newest. A version may have a third number, which changes nothing.
    Raises ValueError, with the problem and the nearest name or version, for an unknown one.
    """
    stacks = load_stacks()
    name, at, version = software.partition("@")
    if name not in stacks:
        guess = find_nearest(name, stacks)
        question = f"; did you mean {guess}?" if guess else ""
        names = ", ".join(stacks)
        raise ValueError(
            f"must be None (MindSpore) or one of {names}, or one with @VERSION{question}"
        )
    known = stacks[name]
    if not at:
        return Stack(name, frozenset(known[list(known)[-1]]))
    match = _VERSION.fullmatch(version)
    if match is None:
        raise ValueError(f"must be {name}@VERSION, such as {name}@{list(known)[-1]}")
    if match[1] not in known:
        closest = min(known, key=lambda other: abs(_rank(other) - _rank(match[1])))
        raise ValueError(
            f"this version isn't known; the nearest is {name}@{closest}, of {', '.join(known)}"
        )
    return Stack(name, frozenset(known[match[1]]), match[1])


def _rank(version: str) -> int:
    major, minor = version.split(".")
    return 100 * int(major) + int(minor)


class OptionError(PipelineError):
    """An option of a priced step is out of range, or doesn't fit the emulated device."""

    exit_status = 2


class EmulationOptions(Spec):
    """Keys of a device file that set how a run uses the chip."""

    mode: Literal["auto", Mode]
    """Launch mode of steps; auto: by `train.sink` and `train.sink_size`."""
    software: str | None
    """Stack whose launches and conversions are priced: mindspore_graph, mindcv_graph,
    mindspore_eager or pytorch_eager, or one with its version (mindspore_graph@1.8); null:
    MindSpore's, in the launch mode."""
    precision: Precision | None
    """Level of mixed precision of the priced step, O1 as in apex, others as in MindSpore; null: the
    step's own types."""
    all_reduce_fusion: Annotated[Seq[PositiveInt], Field(min_length=1)] | None
    """Indices of parameters at which gradients are split into all-reduces; null: one for all."""
    host_workers: PositiveInt
    """Processes of the emulated host that prepare data."""
    auto_tune: TuneMode | None
    """Search for the tiles of every product. exhaustive: of all tiles; ga: genetic; rl: in a tree;
    rl,ga: the last two."""
    tune_bank: FilePath | None
    """The knowledge bank of tiles, read before the search and written after it; null: the bank in
    the folder TUNE_BANK_PATH, if any."""
    repeat_tune: bool
    """Whether to search again for tiles that a bank has, and use the faster tiles (REPEAT_TUNE)."""
    strict: bool
    """Whether to refuse an unsupported operation instead of estimating it by its bytes."""

    @field_validator("auto_tune", mode="before")
    @classmethod
    def _read_cann_words(cls, modes: Any) -> Any:
        """Accept CANN's spelling, "RL,GA", in any order, and a list of modes."""
        words = modes.split(",") if isinstance(modes, str) else modes
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
            return modes
        names = sorted({word.strip().lower() for word in words}, reverse=True)
        return ",".join(names) if ",".join(names) in get_args(TuneMode) else modes

    @field_validator("software")
    @classmethod
    def _refuse_unknown_software(cls, software: str | None) -> str | None:
        if software is not None:
            find_stack(software)
        return software

    @field_validator("all_reduce_fusion")
    @classmethod
    def _refuse_unsorted(cls, points: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if points is not None and any(low >= high for low, high in pairwise(points)):
            raise ValueError(f"{list(points)} must ascend, as in [85, 160]")
        return points


@dataclass(frozen=True)
class ExecutionConfig:
    """Options of a priced step, with the defaults of `pipeline.backends.ascend.price`.

    Modes and sinks are as in `StepOptions`, other options as in `EmulationOptions`, where `fusion`
    is `all_reduce_fusion`.
    """

    precision: Precision | None = "O2"
    mode: Mode = "loop_sink"
    sink_size: int = 1000
    devices: int = 1
    fusion: tuple[int, ...] | None = None
    host_workers: int | None = None
    """Processes that prepare the data of one device; None: data is always ready."""
    data_sink: bool = True
    auto_tune: TuneMode | None = None
    tune_bank: str | None = None
    repeat_tune: bool = False
    strict: bool = False
    without: frozenset[str] = frozenset()
    """Names of buffer fusions to skip."""
    software: str | None = None
    keep_batchnorm_fp32: bool = False
    """MindSpore's option of amp levels, off in the scripts of its model zoo."""
    shares_state: bool = False
    """Whether each device stores a part of the state. It changes the memory of a step alone."""

    @property
    def stack(self) -> Stack:
        """The software stack."""
        return find_stack(self.software or "mindspore_graph")


@dataclass(frozen=True)
class EmulatedDevice:
    """A chip and its options. A run sets `sink_size`, `data_sink` and `devices`.

    `mode` is the requested launch mode; None if it depends on the sink of a run.
    """

    chip: PricedChip
    config: ExecutionConfig
    mode: Mode | None = None


@dataclass(frozen=True, slots=True)
class StepOptions:
    """A launch mode and its settings.

    `op_by_op` launches every kernel from the host, `graph_sink` the whole step, `loop_sink` a loop
    of `sink_size` steps. Raises OptionError for a value that is out of its range.
    """

    mode: Mode = "loop_sink"
    sink_size: int = 1
    devices: int = 1
    fusion: tuple[int, ...] | None = None
    """MindSpore's `all_reduce_fusion_config`; None: one all-reduce."""
    exchange_bytes: tuple[int, ...] = ()
    """Bytes of each all-reduce between the gradients and the update, such as of curvature."""
    batch_size: int = 1
    """Samples of one device."""
    batch_bytes: int = 0
    """Bytes of one device's batch."""
    host_images_per_s: float | None = None
    """Images that the host prepares for one device; None: data is always ready."""
    data_sink: bool = True
    """Whether `graph_sink` reads batches from the queue on the device. `loop_sink` always does,
    `op_by_op` never (MindSpore's `dataset_sink_mode` sets all three)."""
    prefetches: bool = False
    """Whether a batch is copied on a stream of its own while the step before runs, as by
    `data_prefetcher` of apex's scripts (examples/imagenet/main_amp.py)."""
    op_launch_us: float | None = None
    """Host time of one op, instead of the chip's."""

    def __post_init__(self) -> None:
        _require_mode(self.mode)
        for name in ("sink_size", "devices", "batch_size"):
            check_count(name, getattr(self, name))
        if self.op_launch_us is not None:
            _check_range("op_launch_us", self.op_launch_us, least=0)
        if self.host_images_per_s is not None:
            _check_range("host_images_per_s", self.host_images_per_s, least=1e-9)

    @property
    def uses_queue(self) -> bool:
        """Whether batches come from the queue on the device."""
        return self.mode == "loop_sink" or (self.mode == "graph_sink" and self.data_sink)

    @property
    def copies_ahead(self) -> bool:
        """Whether a batch is copied before its step."""
        return self.uses_queue or self.prefetches

    @property
    def steps_per_launch(self) -> int:
        """Steps that one launch from the host runs."""
        return self.sink_size if self.mode == "loop_sink" else 1


def choose_mode(software: Any, mode: Mode | None) -> Mode:
    """Return the requested launch mode, or the default mode of a software stack.

    Raises OptionError for an unknown stack, version or mode, and for a mode that the stack doesn't
    support.
    """
    if mode is not None:
        _require_mode(mode)
    if software is None:
        return mode or "loop_sink"
    try:
        eager = find_stack(str(software)).is_eager
    except ValueError as error:
        raise OptionError(f"software = {software!r:.80}: {error}") from error
    if mode is None:
        return "op_by_op" if eager else "loop_sink"
    if eager != (mode == "op_by_op"):
        right = "op_by_op" if eager else "graph_sink or loop_sink"
        raise OptionError(f"mode = {mode}: must be {right} for software = {software}")
    return mode


def check_count(name: str, value: Any, most: int | None = None) -> int:
    """Return a count as an int. Raises OptionError unless it is a whole number from 1 to `most`."""
    try:
        count = None if isinstance(value, bool) else index(value)
    except TypeError:
        count = None
    if count is None:
        raise OptionError(f"{name} = {value!r}: must be a whole number")
    if count < 1:
        raise OptionError(f"{name} = {count}: must be at least 1")
    if most is not None and count > most:
        raise OptionError(f"{name} = {count}: must be at most {most}")
    return count


def check_switch(name: str, value: Any) -> bool:
    """Return True or False. Raises OptionError for anything else."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} = {value!r}: must be True or False")
    return value


def _require_mode(mode: Any) -> None:
    if mode not in MODES:
        raise OptionError(f"mode = {mode!r}: must be one of {', '.join(MODES)}")


def _check_range(name: str, value: float, *, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        limit = "at least 0" if least == 0 else "above 0"
        raise OptionError(f"{name} = {value}: must be {limit}, and finite")
