"""Figures of a chip, its host and its links, read from YAML, each with unit and source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, ValidationInfo, create_model, model_validator

from pipeline.core.files.value_text import show
from pipeline.core.registry import Spec

Confidence = Literal["measured", "stated", "derived", "assumed"]
Core = Literal["joined", "split"]
"""Whether the cube and the vector unit are one core with common buffers, or cores of their own.

In a split core (Da Vinci of 2023) the cube reads plain matrices as fractals, writes its results as
plain matrices, and adds a bias or applies ReLU on the way (CATLASS 2.1.0, gemm/tile/atlasa2:
Nd2Nz in copy_gm_to_l1, Fixpipe in copy_l0c_to_gm, copy_l1_to_bt). Other results reach the vector
unit through the L2.
"""


@dataclass(frozen=True)
class Hardware:
    """Figures of one kind of device, and of the server around it.

    Every name ends in its unit (see `UNITS`). Rates in `_bytes_per_cycle` are for one core.
    """

    ai_cores_count: float
    """Cores with a cube."""
    vector_cores_count: float
    """Cores with a vector unit."""
    ai_core_clock_mhz: float
    cube_fp16_macs_per_cycle: float
    cube_fp32_macs_per_cycle: float
    """Rate of one cube in float32; 0 for a cube without float32."""
    vector_bytes_per_cycle: float
    core_bytes_per_cycle: float
    """Traffic of one vector core with the L2 and device memory, each way."""
    fp32_matmul_gmacs_per_s: float
    """Rate of float32 products on the vector unit of one core, if the cube has no float32."""
    l0a_kib: float
    l0b_kib: float
    l0c_kib: float
    l1_kib: float
    """Buffers of one cube: for left and right operands (L0A, L0B), results (L0C), and all (L1)."""
    ub_kib: float
    """Buffer of one vector core."""
    l1_to_l0a_bytes_per_cycle: float
    l1_to_l0b_bytes_per_cycle: float
    l0c_to_ub_bytes_per_cycle: float
    ub_to_l2_bytes_per_cycle: float
    l2_mib: float
    l2_read_bytes_per_cycle: float
    l2_write_bytes_per_cycle: float

    hbm_gib: float
    hbm_nominal_gb_per_s: float
    hbm_sustained_gb_per_s: float
    parameter_memory_gib: float
    feature_map_memory_gib: float
    communication_memory_gib: float
    memory_alignment_bytes: float

    task_gap_us: float
    """Time between two tasks of a stream."""
    task_floor_one_core_us: float
    """Least time of a task on one core."""
    task_floor_all_cores_us: float
    """Least time of a task on all cores."""
    ai_cpu_task_us: float
    event_handover_us: float
    """Time until a stream that waits for another stream's event goes on."""
    sink_interval_us: float
    """GetNext, loop control and stream switches between two steps of a sink, on one device."""
    sink_interval_distributed_us: float

    op_launch_us: float
    """Host time of one op that MindSpore's PyNative mode launches."""
    pytorch_op_launch_us: float
    """Host time of one op that PyTorch's eager mode (torch_npu) launches."""
    graph_launch_us: float
    host_step_us: float
    """Host time of a step that the host drives: callbacks, feeding, fetching the loss."""
    pcie_gb_per_s: float
    data_queue_gib: float
    host_worker_images_per_s: float
    """224 x 224 JPEG images that one worker of the host decodes and augments."""
    host_images_per_s: float
    """224 x 224 JPEG images that a host decodes and augments for all its devices."""

    devices_per_server_count: float
    hccs_bus_gb_per_s: float
    hccs_hop_us: float
    """The ring of a server's devices: the rate of a link, and the time of a step around it."""
    hccs_pair_gb_per_s: float
    """The link between two devices that communicate alone."""
    hccs_pair_hop_us: float
    roce_gb_per_s: float
    roce_hop_us: float
    collective_launch_us: float
    overlapped_collective_slowdown_ratio: float
    """Factor by which an all-reduce slows down while the device computes."""

    other_chip_spread_ratio: float
    """Log standard deviation of a step because the kernels and steps of the fit ran on another
    chip; 0 for the chip of the fit."""

    @property
    def peak_fp16_macs_per_us(self) -> float:
        """Multiply-adds of all cubes per microsecond."""
        return self.ai_cores_count * self.cube_fp16_macs_per_cycle * self.ai_core_clock_mhz

    @property
    def vector_bytes_per_us(self) -> float:
        """Bytes that all vector units process per microsecond."""
        return self.vector_cores_count * self.vector_bytes_per_cycle * self.ai_core_clock_mhz

    @property
    def hbm_bytes_per_us(self) -> float:
        """Bytes of sustained traffic of device memory per microsecond."""
        return self.hbm_sustained_gb_per_s * 1e3


class Figure(Spec):
    """One number with its source and its confidence."""

    value: Annotated[float, Field(gt=0)]
    source: Annotated[str, Field(min_length=1)]
    confidence: Confidence

    @model_validator(mode="before")
    @classmethod
    def _refuse_bare_number(cls, figure: Any) -> Any:
        if isinstance(figure, (Mapping, Figure)):
            return figure
        choices = " | ".join(get_args(Confidence))
        right = f"{{value: NUMBER, source: where it is from, confidence: {choices}}}"
        raise ValueError(f"must be {right}, not {show(figure)}")


class Overhead(Figure):
    """A figure that may be zero, such as a time in microseconds, or a rate of a missing unit."""

    value: Annotated[float, Field(ge=0)]


Dtype = Literal[
    "bool", "int4", "int8", "int16", "int32", "int64", "uint4", "uint8", "uint16", "uint32",
    "uint64", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64",
    "complex64", "complex128",
]  # fmt: skip
"""Names of the element types that a chip may support, as in JAX."""


UNREAD = frozenset({"ai_cpu_workers_count", "core_pipelines_count", "data_queue_batches_count"})
"""Figures of earlier chip files that no formula reads."""


class MeasuredSteps(Spec):
    """Steps of a user by which `validate --calibrate` made a chip file.

    `log_sd` is the standard deviation of the log of (measured / modelled) of another step.
    """

    rows: Annotated[int, Field(ge=1)]
    networks: Annotated[int, Field(ge=1)]
    log_sd: Annotated[float, Field(gt=0, le=3)]


class ChipSpec(Spec):
    """Keys of every chip file besides its figures."""

    chip: Annotated[str, Field(min_length=1)]
    core: Core
    dtypes: Annotated[tuple[Dtype, ...], Field(strict=False, min_length=1)]
    """Types that the chip computes in. Steps with other types are refused."""
    measured_steps: MeasuredSteps | None = None
    """The steps that the file's figures were fitted to; None if it wasn't fitted to any."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_unread(cls, chip: Any) -> Any:
        if not isinstance(chip, Mapping):
            return chip
        return {key: figure for key, figure in chip.items() if key not in UNREAD}


def _refuse_implausible(figure: Figure, info: ValidationInfo) -> Figure:
    """Refuse fractional counts, and figures that formulas overflow by or that have another unit."""
    value = figure.value
    name = str(info.field_name)
    if name.endswith(("_count", "_bytes")) and value != int(value):
        raise ValueError(f"{value:g} must be a whole number")
    bounds = (limits for ending, limits in BOUNDS.items() if name.endswith(ending))
    low, high = next(bounds, (MIN_FIGURE, MAX_FIGURE))
    if value and not low <= value <= high:
        unit = "" if name.endswith(("_count", "_ratio")) else f" {find_unit(name)}"
        raise ValueError(f"{value:g} must be from {low:g} to {high:g}{unit}")
    return figure


UNITS = {
    "_bytes_per_cycle": "bytes a cycle",
    "_macs_per_cycle": "multiply-adds a cycle",
    "_gmacs_per_s": "10^9 multiply-adds a second",
    "_gb_per_s": "10^9 bytes a second",
    "_images_per_s": "images a second",
    "_mhz": "MHz",
    "_kib": "KiB",
    "_mib": "MiB",
    "_gib": "GiB",
    "_bytes": "bytes",
    "_us": "microseconds",
    "_count": "a count",
    "_ratio": "a ratio",
}


def find_unit(name: str) -> str:
    """Return the unit of a figure, from the end of its name."""
    return next(unit for ending, unit in UNITS.items() if name.endswith(ending))


MIN_FIGURE = 1e-6
MAX_FIGURE = 1e9
"""Bounds of plausible figures; real chips are far from them."""
BOUNDS: Mapping[str, tuple[float, float]] = {
    "_count": (MIN_FIGURE, 4096),
    "_mhz": (10, 1e5),
    "_kib": (MIN_FIGURE, 32768),
    "_mib": (MIN_FIGURE, 4096),
    "_gib": (MIN_FIGURE, 4096),
    "_gb_per_s": (MIN_FIGURE, 1e5),
}
"""Bounds by the end of a name, which GHz, Hz, and thousands of times smaller units are beyond."""
FIGURES = tuple(figure.name for figure in fields(Hardware))
MAY_BE_ZERO = ("_us", "cube_fp32_macs_per_cycle", "other_chip_spread_ratio")
"""Ends of the names of figures that may be zero."""
_FIELDS: dict[str, Any] = {
    name: (
        Annotated[
            Overhead if name.endswith(MAY_BE_ZERO) else Figure, AfterValidator(_refuse_implausible)
        ],
        Field(json_schema_extra={"unit": find_unit(name)}),
    )
    for name in FIGURES
}
Chip: Any = create_model(
    "Chip",
    __base__=ChipSpec,
    __module__=__name__,
    __doc__="A chip as read from its YAML file: every figure with its source.",
    **_FIELDS,
)


def extract_hardware(chip: Any) -> Hardware:
    """Return the plain numbers of a checked chip."""
    return Hardware(**{name: getattr(chip, name).value for name in FIGURES})


@dataclass(frozen=True)
class PricedChip:
    """A checked chip for pricing: its name, types and figures, and the source of each figure."""

    name: str
    dtypes: tuple[str, ...]
    hardware: Hardware
    core: Core = "joined"
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    measured_steps: MeasuredSteps | None = None


def to_priced_chip(chip: Any) -> PricedChip:
    """Return a checked chip for pricing."""
    sources = {name: getattr(chip, name).source for name in FIGURES}
    return PricedChip(
        chip.chip,
        tuple(chip.dtypes),
        extract_hardware(chip),
        chip.core,
        sources,
        chip.measured_steps,
    )
