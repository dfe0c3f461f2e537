"""Why a layer costs what it costs: formulas, figures with their sources, and its interval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.tasks import CostClass, Task, TaskTime
from pipeline.backends.ascend.cost.efficiency import GROUPS, Calibration
from pipeline.backends.ascend.cost.task_time import runs_on_vector

WIDTH = 100


@dataclass(frozen=True)
class KernelFormula:
    """Formula of a class of kernels, and the chip's figures and fitted constants in it."""

    text: str
    figures: tuple[str, ...]
    constants: tuple[str, ...] = ()


_FLOOR = ("task_floor_one_core_us", "task_floor_all_cores_us")
_STREAM = (*_FLOOR, "hbm_sustained_gb_per_s", "l2_read_bytes_per_cycle", "vector_bytes_per_cycle")
_OVERLAP = ("hbm_read", "hbm_write", "vector_overlap")

PRODUCT = KernelFormula(
    "floor + the p-norm of cube (16 x 16 x 16 a cycle and core, padded) / rate, reads, writes",
    (*_FLOOR, "ai_cores_count", "ai_core_clock_mhz", "cube_fp16_macs_per_cycle",
     "hbm_sustained_gb_per_s", "l2_read_bytes_per_cycle", "ub_to_l2_bytes_per_cycle"),
    ("cube_overlap", "hbm_read", "hbm_write"),
)  # fmt: skip
STREAM = KernelFormula(
    "floor + the p-norm of lanes (operations of each element) and traffic, / rate",
    _STREAM,
    (*_OVERLAP, "vector_rate", "heavy_operations"),
)
FLOAT32 = KernelFormula(
    "floor + multiply-adds of 16 rows a core at the rate of its vector unit",
    (*_FLOOR, "fp32_matmul_gmacs_per_s"),
)
FORMULAS: Mapping[CostClass, KernelFormula] = {
    "depthwise": KernelFormula(
        "floor + the p-norm of lanes (one for each multiply-add) and traffic, / rate",
        _STREAM,
        (*_OVERLAP, "vector_rate"),
    ),
    "transpose": KernelFormula(
        "floor + the p-norm of traffic and of turned squares, or of rows that are no whole blocks, "
        "/ rate; by the permutation of bytes alone",
        _STREAM,
        (*_OVERLAP, "transpose_square_cycles", "transpose_element_cycles", "minor_row_cycles"),
    ),
    "trans_data": KernelFormula(
        "floor + the p-norm of traffic and of rows that are no whole blocks, / rate",
        _STREAM,
        (*_OVERLAP, "minor_row_cycles", "pad_row_cycles"),
    ),
    "bias_grad": KernelFormula(
        "floor + the p-norm of traffic and of a walk of each image and channel, / rate",
        _STREAM,
        (*_OVERLAP, "bias_segment_cycles", "bias_bytes_per_cycle"),
    ),
    "rows": KernelFormula(
        "floor + the p-norm of traffic and of lanes with a start of each operation along each row, "
        "/ rate",
        _STREAM,
        (*_OVERLAP, "minor_row_cycles", "vector_rate", "heavy_operations"),
    ),
    "copy": KernelFormula(
        "floor + the p-norm of lanes, or rows whose columns are sliced, and traffic, / rate",
        _STREAM,
        (*_OVERLAP, "vector_rate", "slice_row_cycles"),
    ),
    "gather": KernelFormula(
        "floor + the p-norm of traffic and of a latency of each row, / rate",
        _STREAM, (*_OVERLAP, "gather_row_cycles"),
    ),
    "scatter": KernelFormula(
        "floor + the p-norm of traffic and of a latency of each row, / rate",
        _STREAM, (*_OVERLAP, "scatter_row_cycles"),
    ),
    "max_pool": KernelFormula(
        "floor + the p-norm of traffic and of a walk of 16 channels of an image by taps, / rate",
        _STREAM, (*_OVERLAP, "pool_block_cycles", "pool_tap_cycles"),
    ),
    "max_pool_grad": KernelFormula(
        "floor + the p-norm of traffic and of a walk of 16 channels of an image by taps, / rate",
        _STREAM, (*_OVERLAP, "pool_grad_block_cycles", "pool_grad_tap_cycles"),
    ),
    "ai_cpu": KernelFormula("one time for every operator on the AI CPU", ("ai_cpu_task_us",)),
    "all_reduce": KernelFormula(
        "priced with the links, not with its layer", ("hccs_bus_gb_per_s",)
    ),
}  # fmt: skip
_PRODUCTS: tuple[CostClass, ...] = ("conv", "conv_input_grad", "conv_kernel_grad", "matmul")


def formula_of(task: Task) -> KernelFormula:
    """Return the formula that a task is priced by."""
    if task.cost_class in _PRODUCTS:
        return FLOAT32 if runs_on_vector(task) else PRODUCT
    if task.cost_class.startswith("depthwise"):
        return FORMULAS["depthwise"]
    return FORMULAS.get(task.cost_class, STREAM)


@dataclass(frozen=True)
class Named:
    """A number of a formula, with its source."""

    name: str
    value: float
    source: str


@dataclass(frozen=True)
class ExplainedTask:
    """One kernel of a layer: its time in us, all repetitions together, and the terms of it.

    `log_sd` is the spread of log(measured / modelled) of its class, `provenance` says how sure the
    class's rate is, and `source` where it is from.
    """

    type: str
    phase: str
    us: float
    roofline_us: float
    bound: str
    formula: str
    figures: tuple[Named, ...]
    constants: tuple[Named, ...]
    rate: float
    log_sd: float
    provenance: str
    source: str


@dataclass(frozen=True)
class LayerExplanation:
    """Why a layer takes its time; `print` shows it.

    `interval_sources` are the spreads that make the interval of the step: name and log standard
    deviation.
    """

    layer: str
    us: float
    share: float
    tasks: tuple[ExplainedTask, ...]
    interval_sources: tuple[Named, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"MODELLED: {self.layer} takes {self.us / 1e3:.3f} ms, {self.share:.1%} of all layers, "
            f"in {len(self.tasks)} tasks"
        )
        shown: set[str] = set()
        for task in sorted(self.tasks, key=lambda task: -task.us):
            yield ""
            yield f"{task.type} ({task.phase}): {task.us:.1f} us, bound by {task.bound}"
            yield f"  at peak rates {task.roofline_us:.1f} us"
            yield from _wrapped(f"formula: {task.formula}")
            yield from _wrapped(
                f"rate of its class {task.rate:.3g}, {task.provenance}: {task.source}; spread "
                f"{task.log_sd:.2f}"
            )
            for named in (*task.figures, *task.constants):
                if named.name not in shown:
                    shown.add(named.name)
                    yield from _wrapped(f"{named.name} = {named.value:g}: {named.source}")
        yield ""
        yield "the interval of the step comes from"
        for named in self.interval_sources:
            yield from _wrapped(f"{named.name} {named.value:.3g}: {named.source}")


def _wrapped(text: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def explain_tasks(
    tasks: Sequence[tuple[Task, TaskTime]],
    hardware: Hardware,
    sources: Mapping[str, str],
    calibration: Calibration,
) -> tuple[ExplainedTask, ...]:
    """Return the terms of each task. `sources` are those of the chip's figures, by name."""
    return tuple(_explained(task, time, hardware, sources, calibration) for task, time in tasks)


def _explained(
    task: Task,
    time: TaskTime,
    hardware: Hardware,
    sources: Mapping[str, str],
    calibration: Calibration,
) -> ExplainedTask:
    formula = formula_of(task)
    entry = calibration.efficiency.classes[task.cost_class]
    constants = calibration.efficiency.constants
    group = next((name for name, classes in GROUPS.items() if task.cost_class in classes), None)
    source = entry.source
    if group is not None:
        multiplier = calibration.multipliers[group]
        source += f"; times {multiplier:.3g}, fitted to published steps ({group})"
    fitted = "fitted to kernels of public traces (efficiency.yaml)"
    return ExplainedTask(
        type=task.type,
        phase=task.phase,
        us=time.us * task.repeat,
        roofline_us=time.roofline_us * task.repeat,
        bound=time.bound,
        formula=formula.text,
        figures=tuple(
            Named(name, getattr(hardware, name), sources.get(name, "given without a source"))
            for name in formula.figures
        ),
        constants=tuple(
            Named(name, getattr(constants, name), fitted) for name in formula.constants
        ),
        rate=entry.rate,
        log_sd=entry.log_sd,
        provenance=entry.provenance,
        source=source,
    )


def interval_sources(class_spread: float, calibration: Calibration) -> tuple[Named, ...]:
    """Return the spreads that make the interval of a step."""
    return (
        Named(
            "spread of the classes",
            class_spread,
            "residuals of the traces' kernels, each class by its share of the step",
        ),
        Named(
            "spread of whole steps",
            calibration.log_sd,
            "published steps of families that the fit left out",
        ),
        Named(
            "scale",
            calibration.interval_scale,
            "makes an 80 % interval cover 80 % of those steps",
        ),
    )
