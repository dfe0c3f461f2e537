"""What one execution of a task takes: stages from the hardware's figures, one fitted rate a class.

    us = floor + work / rate        never below the roofline

The work is what the class is bound by: the stages of a product, a streaming kernel's traffic and
lanes, the segments that a pooling or a bias gradient walks, the rows that a gather picks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.backends.ascend.efficiency import Constants, Efficiency, load_efficiency
from pipeline.backends.ascend.hardware import Hardware
from pipeline.backends.ascend.residency import Traffic, measure_traffic
from pipeline.backends.ascend.tasks import (
    CHANNEL_BLOCK,
    Buffer,
    CubeWork,
    Task,
    TaskGraph,
    TaskTime,
)
from pipeline.backends.ascend.tiling import TilePlan, Tiling, default_tiling, plan_of, product_of

CUBE_CLASSES = ("conv", "conv_input_grad", "conv_kernel_grad", "matmul")
DEPTHWISE_CLASSES = ("depthwise", "depthwise_input_grad", "depthwise_kernel_grad")
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "bool": 1, "int16": 2}
Bound = Literal["cube", "vector", "memory", "l2", "floor", "ai_cpu", "link"]


@dataclass(frozen=True, slots=True)
class Work:
    """Time of a task beyond its floor at the rates of the physics, and what bounds it."""

    us: float
    bound: Bound
    cores: float


@dataclass(frozen=True, slots=True)
class Setting:
    """What the price of one task depends on besides itself."""

    hw: Hardware
    constants: Constants
    buffers: tuple[Buffer, ...]
    tiles: Mapping[int, Tiling]


def price_tasks(
    graph: TaskGraph,
    hw: Hardware,
    efficiency: Efficiency | None = None,
    tiles: Mapping[int, Tiling] | None = None,
) -> tuple[TaskTime, ...]:
    """Time of one execution of every task, in their order.

    `tiles` are tilings by index of the task, as AutoTune finds them; the others get the vendor's
    rule of thumb. An `all_reduce` takes no time here: links are priced by their own model.
    """
    efficiency = efficiency or load_efficiency()
    constants = efficiency.constants
    traffic = measure_traffic(graph, hw.l2_mib * 2**20, constants.l2_full, constants.l2_none)
    setting = Setting(hw, constants, graph.buffers, tiles or {})
    return tuple(
        _price(index, task, moved, setting, efficiency)
        for index, (task, moved) in enumerate(zip(graph.tasks, traffic, strict=True))
    )


def price_task(
    graph: TaskGraph, index: int, hw: Hardware, efficiency: Efficiency | None = None
) -> TaskTime:
    """Time of one task where it stands in its graph."""
    return price_tasks(graph, hw, efficiency)[index]


def _price(
    index: int, task: Task, traffic: Traffic, setting: Setting, efficiency: Efficiency
) -> TaskTime:
    hw, entry = setting.hw, efficiency.classes[task.cost_class]
    if task.cost_class == "all_reduce" or task.engine == "hccl":
        return TaskTime(0.0, 0.0, "link", entry.provenance)
    if task.cost_class == "ai_cpu" or task.engine == "ai_cpu":
        return TaskTime(hw.ai_cpu_task_us, 0.0, "ai_cpu", entry.provenance)
    work = _work_of(index, task, traffic, setting)
    floor_us, work_us = _floor_us(work.cores, hw), work.us / entry.rate
    roofline_us = bound_below_us(task, traffic, hw)
    us = max(floor_us + work_us, roofline_us)
    return TaskTime(
        us, roofline_us, "floor" if floor_us > work_us else work.bound, entry.provenance
    )


def bound_below_us(task: Task, traffic: Traffic, hw: Hardware) -> float:
    """The time that peak rates allow: useful products, traffic of device memory, of the L2.

    What a task writes may stay in the L2, one L2 of it at most.
    """
    macs = task.cube.macs if task.cube else 0
    spilt_bytes = traffic.hbm_bytes + max(traffic.write_bytes - hw.l2_mib * 2**20, 0)
    l2_bytes_per_us = (
        hw.ai_cores_count
        * hw.ai_core_clock_mhz
        * (hw.l2_read_bytes_per_cycle + hw.l2_write_bytes_per_cycle)
    )
    return max(
        macs / hw.peak_fp16_macs_per_us,
        spilt_bytes / (max(hw.hbm_nominal_gb_per_s, hw.hbm_sustained_gb_per_s) * 1e3),
        (traffic.read_bytes + traffic.write_bytes) / l2_bytes_per_us,
    )


def _floor_us(cores: float, hw: Hardware) -> float:
    """A straight line from the shortest kernel on one core to the shortest on all of them."""
    span_us = max(hw.task_floor_all_cores_us - hw.task_floor_one_core_us, 0.0)
    return hw.task_floor_one_core_us + span_us * min(cores / hw.ai_cores_count, 1.0)


def _work_of(index: int, task: Task, traffic: Traffic, setting: Setting) -> Work:
    if task.cube and task.cost_class in CUBE_CLASSES:
        if task.cost_class == "matmul" and task.cube.dtype in ("float32", "float64"):
            return _vector_product(task.cube, setting.hw)
        return _cube_work(index, task, task.cube, traffic, setting)
    if task.cube and task.cost_class in DEPTHWISE_CLASSES:
        return _depthwise_work(task, task.cube, traffic, setting)
    return SPECIAL.get(task.cost_class, _streaming_work)(task, traffic, setting)


def _memory_us(traffic: Traffic, setting: Setting) -> tuple[float, float]:
    """Time of reads and writes, (device memory, L2): they take turns at the cores' ports."""
    hw, constants = setting.hw, setting.constants
    hbm_us = traffic.hbm_bytes / (hw.hbm_bytes_per_us * constants.hbm_read)
    hbm_us += traffic.write_bytes / (hw.hbm_bytes_per_us * constants.hbm_write)
    per_us = hw.ai_cores_count * hw.ai_core_clock_mhz * hw.l2_read_bytes_per_cycle
    return hbm_us, traffic.l2_bytes / per_us


def _cube_work(index: int, task: Task, work: CubeWork, traffic: Traffic, setting: Setting) -> Work:
    """Stages of the tiling, those that move data as slow as device memory makes them."""
    plan = _plan(index, task, work, setting)
    hw, constants = setting.hw, setting.constants
    cube_us, load_us, l2_us, out_us = (
        cycles / hw.ai_core_clock_mhz
        for cycles in (plan.cycles_cube, plan.cycles_load, plan.cycles_l2, plan.cycles_out)
    )
    read_us = traffic.hbm_bytes / (hw.hbm_bytes_per_us * constants.hbm_read)
    write_us = traffic.write_bytes / (hw.hbm_bytes_per_us * constants.hbm_write)
    parts_us = max(cube_us, load_us), max(l2_us, read_us), max(out_us, write_us)
    stages: tuple[tuple[float, Bound], ...] = (
        (cube_us, "cube"),
        (max(load_us, l2_us, out_us), "l2"),
        (max(read_us, write_us), "memory"),
    )
    us = _join(*parts_us, power=constants.cube_overlap)
    return Work(us, max(stages)[1], plan.tiling.cores_count)


def _plan(index: int, task: Task, work: CubeWork, setting: Setting) -> TilePlan:
    out_bytes = _item_bytes(setting.buffers[task.writes[0]].dtype) if task.writes else 2
    shapes = [setting.buffers[index].shape for index in task.reads]
    images = max((shape[0] for shape in shapes if len(shape) >= 3), default=1)
    product = product_of(work, task.cost_class, out_bytes, images)
    overlap = setting.constants.cube_overlap
    if index in setting.tiles:
        return plan_of(setting.tiles[index], product, setting.hw, overlap)
    return default_tiling(product, setting.hw, overlap)


def _vector_product(work: CubeWork, hw: Hardware) -> Work:
    """float32 products: 16 rows a core at the rate of one core's vector unit."""
    cores = min(hw.ai_cores_count, work.batch * math.ceil(work.m / CHANNEL_BLOCK))
    return Work(work.macs / (hw.fp32_matmul_gmacs_per_s * 1e3 * cores), "vector", cores)


def _depthwise_work(task: Task, work: CubeWork, traffic: Traffic, setting: Setting) -> Work:
    """One lane of the vector unit a product."""
    hw = setting.hw
    lanes_us = work.macs * _item_bytes(work.dtype) / hw.vector_bytes_per_us
    return _joined(lanes_us, traffic, setting, hw.ai_cores_count)


def _streaming_work(task: Task, traffic: Traffic, setting: Setting) -> Work:
    """Lanes of the vector unit beside the traffic."""
    return _joined(_lanes_us(task, setting), traffic, setting, _cores(traffic, setting))


def _lanes_us(task: Task, setting: Setting) -> float:
    work, constants = task.vector, setting.constants
    if work is None:
        return 0.0
    passes = work.simple + constants.heavy_operations * work.heavy
    lane_bytes = work.elements * max(_item_bytes(work.dtype), 2)
    return lane_bytes * passes / (setting.hw.vector_bytes_per_us * constants.vector_rate)


def _joined(lanes_us: float, traffic: Traffic, setting: Setting, cores: float) -> Work:
    hbm_us, l2_us = _memory_us(traffic, setting)
    us = _join(lanes_us, hbm_us + l2_us, power=setting.constants.vector_overlap)
    stages: tuple[tuple[float, Bound], ...] = (
        (lanes_us, "vector"),
        (hbm_us, "memory"),
        (l2_us, "l2"),
    )
    return Work(us, max(stages)[1], cores)


def _join(*parts_us: float, power: float) -> float:
    """Between the sum (power 1) and the largest (power infinity) of what runs side by side."""
    largest = max(parts_us)
    if largest <= 0:
        return 0.0
    return float(largest * sum((part / largest) ** power for part in parts_us) ** (1 / power))


def _cores(traffic: Traffic, setting: Setting) -> float:
    wanted = math.ceil(max(traffic.read_bytes, traffic.write_bytes) / setting.constants.core_bytes)
    return min(setting.hw.ai_cores_count, max(wanted, 1))


def _item_bytes(dtype: str) -> int:
    return ITEM_BYTES.get(dtype, 8 if dtype.endswith("64") else 4)


def _walk(
    task: Task,
    traffic: Traffic,
    setting: Setting,
    segments: float,
    cores: float,
    cycles_each: float,
    bytes_per_cycle: float,
) -> Work:
    """A kernel that walks segments one by one: a fixed cost each besides its bytes."""
    hw = setting.hw
    moved_bytes = traffic.read_bytes + traffic.write_bytes
    per_core = math.ceil(segments / cores)
    cycles = per_core * (cycles_each + moved_bytes / segments / bytes_per_cycle)
    return _joined(cycles / hw.ai_core_clock_mhz, traffic, setting, cores)


def _bias_grad_work(task: Task, traffic: Traffic, setting: Setting) -> Work:
    """A matrix is streamed; a feature map is walked by image and channel, 8 channels a core."""
    source = setting.buffers[task.reads[0]]
    if len(source.shape) <= 2:
        return _streaming_work(task, traffic, setting)
    channels = max(math.prod(setting.buffers[task.writes[0]].shape), 1)
    cores = min(setting.hw.ai_cores_count, math.ceil(channels / 8))
    constants = setting.constants
    return _walk(
        task,
        traffic,
        setting,
        source.shape[0] * channels,
        cores,
        constants.bias_segment_cycles,
        constants.bias_bytes_per_cycle,
    )


def _pool_work(task: Task, traffic: Traffic, setting: Setting) -> Work:
    """Pooling walks blocks of one image and 16 channels."""
    constants = setting.constants
    grad = task.cost_class == "max_pool_grad"
    each = constants.pool_grad_block_cycles if grad else constants.pool_block_cycles
    rate = constants.pool_grad_bytes_per_cycle if grad else constants.pool_bytes_per_cycle
    shapes = [setting.buffers[index].shape for index in (*task.reads, *task.writes)]
    shape = max((shape for shape in shapes if len(shape) >= 3), key=math.prod, default=(1, 1))
    blocks = max(shape[0] * math.ceil(shape[-1] / CHANNEL_BLOCK), 1)
    cores = min(setting.hw.ai_cores_count, blocks)
    return _walk(task, traffic, setting, blocks, cores, each, rate)


def _picked_rows(task: Task, buffers: tuple[Buffer, ...]) -> int:
    """Rows of a gather or scatter: its indices, or rows of what it makes where it has none."""
    indices = [buffers[i] for i in task.reads if "int" in buffers[i].dtype]
    if indices:
        return max(math.prod(min(indices, key=lambda buffer: buffer.nbytes).shape), 1)
    made = buffers[task.writes[0]].shape
    return max(math.prod(made[:-1]), 1)


def _row_work(task: Task, traffic: Traffic, setting: Setting) -> Work:
    """Gather and scatter: a latency a row besides the bytes."""
    hw, constants = setting.hw, setting.constants
    rows = _picked_rows(task, setting.buffers)
    gather = task.cost_class == "gather"
    each = constants.gather_row_cycles if gather else constants.scatter_row_cycles
    cores = min(hw.ai_cores_count, rows)
    latency_us = math.ceil(rows / cores) * each / hw.ai_core_clock_mhz
    return _joined(latency_us, traffic, setting, cores)


def _minor_work(task: Task, traffic: Traffic, setting: Setting) -> Work:
    """Softmax, layer norm: rows of the minor axis, a fixed cost each besides lanes and traffic."""
    hw = setting.hw
    shape = max((setting.buffers[index].shape for index in task.reads), key=math.prod)
    rows = max(math.prod(shape[:-1]), 1)
    cores = _cores(traffic, setting)
    fixed_us = math.ceil(rows / cores) * setting.constants.minor_row_cycles / hw.ai_core_clock_mhz
    return _joined(fixed_us + _lanes_us(task, setting), traffic, setting, cores)


def _sort_work(task: Task, traffic: Traffic, setting: Setting) -> Work:
    """A merge sort: every element as many times as the length has bits."""
    elements = max(task.vector.elements if task.vector else 1, 2)
    lanes_us = _lanes_us(task, setting) * math.log2(elements)
    return _joined(lanes_us, traffic, setting, _cores(traffic, setting))


SPECIAL: Mapping[str, Callable[[Task, Traffic, Setting], Work]] = {
    "bias_grad": _bias_grad_work,
    "max_pool": _pool_work,
    "max_pool_grad": _pool_work,
    "avg_pool": _pool_work,
    "gather": _row_work,
    "scatter": _row_work,
    "rows": _minor_work,
    "sort": _sort_work,
}
