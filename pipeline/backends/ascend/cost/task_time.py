"""Time of one execution of a task: us = floor + work, but at least the roofline.

The floor is the time of an empty kernel. The work depends on the cost class: the stages of a
product, a stream's traffic and lanes, the segments of a pooling or a bias gradient, the rows of a
gather. Each class has one fitted rate. Forms and constants are fitted to kernels of public traces
(benchmarks/ascend_fit/fit_kernels.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.tasks import (
    CHANNEL_BLOCK,
    Buffer,
    CubeWork,
    Task,
    TaskBound,
    TaskGraph,
    TaskTime,
)
from pipeline.backends.ascend.cost.efficiency import GROUPS, Efficiency, load_efficiency
from pipeline.backends.ascend.cost.l2_cache import Traffic, measure_traffic
from pipeline.backends.ascend.cost.tiling import (
    Product,
    TileChoice,
    Tiling,
    list_default_tilings,
    make_choice,
    pad_product,
    split_images,
    sum_cycles,
    to_row,
)
from pipeline.backends.ascend.cost.vector_work import (
    CostContext,
    Work,
    price_depthwise,
    price_transfer,
    price_vector_product,
    price_vector_work,
)
from pipeline.core.host.array_values import get_item_bytes

CUBE_CLASSES = GROUPS["products"]


def price_tasks(
    graph: TaskGraph,
    hw: Hardware,
    efficiency: Efficiency | None = None,
    tiles: Mapping[int, Tiling] | None = None,
) -> tuple[TaskTime, ...]:
    """Return the time of one execution of every task, in their order.

    `tiles` are tilings from AutoTune by index of the task. Other products have the tiling of the
    vendor's rule of thumb. An `all_reduce` has no time: `collectives.py` prices links.
    """
    efficiency = efficiency or load_efficiency()
    constants = efficiency.constants
    traffic = measure_traffic(graph, hw.l2_mib * 2**20, constants.l2_full, constants.l2_none)
    context = CostContext(hw, constants, efficiency.classes, graph.buffers, tiles or {})
    return tuple(
        _price_task(index, task, transferred, context)
        for index, (task, transferred) in enumerate(zip(graph.tasks, traffic, strict=True))
    )


def _price_task(index: int, task: Task, traffic: Traffic, context: CostContext) -> TaskTime:
    hw = context.hw
    entry = context.classes[task.cost_class]
    if task.cost_class == "all_reduce" or task.engine == "hccl":
        return TaskTime(0.0, 0.0, "link", entry.provenance)
    if task.cost_class == "ai_cpu" or task.engine == "ai_cpu":
        return TaskTime(hw.ai_cpu_task_us, 0.0, "ai_cpu", entry.provenance)
    if task.parts:
        return _price_steps(task, traffic, context)
    # The rate applies to the compute of a product on the cube, and to all work of other classes.
    # Products on the vector unit have no fitted rate.
    all_cores = hw.vector_cores_count
    if task.cube and runs_on_vector(task, hw):
        work = price_vector_product(task.cube, hw)
    elif task.cube and task.cost_class in CUBE_CLASSES:
        work = _price_cube(index, task, task.cube, traffic, context)
        all_cores = hw.ai_cores_count
    else:
        if task.cube and task.cost_class in GROUPS["depthwise"]:
            work = price_depthwise(task.cube, traffic, context)
        else:
            work = price_vector_work(task, traffic, context)
        work = Work(work.us / entry.rate, work.bound, work.cores)
    floor_us = compute_floor_us(work.cores / all_cores, hw)
    roofline_us = compute_roofline_us(task, traffic, hw)
    bound: TaskBound = "floor" if floor_us > work.us else work.bound
    return TaskTime(max(floor_us + work.us, roofline_us), roofline_us, bound, entry.provenance)


def _price_steps(task: Task, traffic: Traffic, context: CostContext) -> TaskTime:
    """Return the time of all steps of a recurrent op.

    A step of the forward pass computes the products and gates of all cores, and waits for all
    cores, as the next step reads the whole state. Its values stay on the cores. A step of a
    gradient is a kernel of the cell and a kernel of its product.
    """
    hw = context.hw
    cube_us = 0.0
    lanes_us = 0.0
    no_traffic = Traffic(0.0, 0.0, 0.0)
    for part in task.parts:
        if part.cube and runs_on_vector(part, hw):
            lanes_us += price_vector_product(part.cube, hw).us
        elif part.cube:
            cube_us += _price_cube(-1, part, part.cube, no_traffic, context).us
        else:
            work_us = price_vector_work(part, no_traffic, context).us
            lanes_us += work_us / context.classes[part.cost_class].rate
    moved = price_transfer(lanes_us, traffic, context, hw.ai_cores_count)
    all_cores_us = compute_floor_us(1.0, hw)
    wait_us = all_cores_us - compute_floor_us(0.0, hw)
    between_us = wait_us if task.phase == "forward" else 2 * all_cores_us
    step_us = cube_us + moved.us
    us = all_cores_us + step_us + (task.steps - 1) * (step_us + between_us)
    roofline_us = task.steps * compute_roofline_us(replace(task, cube=None), traffic, hw)
    bound = "cube" if cube_us > max(moved.us, between_us) else moved.bound
    return TaskTime(max(us, roofline_us), roofline_us, bound, "derived")


def compute_roofline_us(task: Task, traffic: Traffic, hw: Hardware) -> float:
    """Return the time at peak rates: the longest of products, device memory and L2 traffic.

    A task's output may stay in the L2, up to the L2's size.
    """
    macs = task.cube.macs if task.cube else 0
    spilt_bytes = traffic.hbm_bytes + max(traffic.write_bytes - hw.l2_mib * 2**20, 0)
    l2_bytes_per_cycle = hw.l2_read_bytes_per_cycle + hw.l2_write_bytes_per_cycle
    l2_bytes_per_us = hw.ai_cores_count * hw.ai_core_clock_mhz * l2_bytes_per_cycle
    peak_macs_per_us = hw.peak_fp16_macs_per_us
    if task.cube and task.cube.dtype == "float32" and hw.cube_fp32_macs_per_cycle:
        peak_macs_per_us *= hw.cube_fp32_macs_per_cycle / hw.cube_fp16_macs_per_cycle
    return max(
        macs / peak_macs_per_us,
        spilt_bytes / (max(hw.hbm_nominal_gb_per_s, hw.hbm_sustained_gb_per_s) * 1e3),
        (traffic.read_bytes + traffic.write_bytes) / l2_bytes_per_us,
    )


def compute_floor_us(share: float, hw: Hardware) -> float:
    """Return the time of an empty kernel on a share of all cores; a share of 0 is one core."""
    span_us = max(hw.task_floor_all_cores_us - hw.task_floor_one_core_us, 0.0)
    return hw.task_floor_one_core_us + span_us * min(share, 1.0)


def runs_on_vector(task: Task, hw: Hardware) -> bool:
    """Return whether the cube lacks a product's type. Convolutions are cast for such a cube."""
    if task.cube is None or task.cost_class != "matmul":
        return False
    if task.cube.dtype == "float32" and hw.cube_fp32_macs_per_cycle:
        return False
    return task.cube.dtype in ("float32", "float64", "int32", "int64")


def _price_cube(
    index: int, task: Task, work: CubeWork, traffic: Traffic, context: CostContext
) -> Work:
    """Return the work of AutoTune's tiling, else of the vendor's fastest default tiling.

    A weight gradient may be faster in equal parts of the images, one after the other.
    """
    hw = context.hw
    rate = context.classes[task.cost_class].rate
    product = to_product(task, work, context.buffers, hw)
    is_dense_gradient = task.cost_class == "conv_kernel_grad" and work.batch == 1
    if is_dense_gradient and work.m // work.taps < CHANNEL_BLOCK:
        # The first layer's weight gradient is slower than its padding explains.
        rate *= context.constants.few_channels
    if index in context.tiles:
        choice = make_choice(to_row(context.tiles[index]), product, hw)
        return _price_choice(choice, traffic, context, rate)
    best = _price_choice(list_default_tilings(product, hw), traffic, context, rate)
    for count, choice in split_images(product, hw):
        # Each part reads its images, and writes the whole gradient.
        share = Traffic(traffic.l2_bytes / count, traffic.hbm_bytes / count, traffic.write_bytes)
        part = _price_choice(choice, share, context, rate)
        if part.us * count < best.us:
            best = Work(part.us * count, part.bound, part.cores)
    return best


def _price_choice(choice: TileChoice, traffic: Traffic, context: CostContext, rate: float) -> Work:
    """Return the work of the fastest tiling, whose traffic device memory may slow down."""
    hw = context.hw
    constants = context.constants
    clock = hw.ai_core_clock_mhz
    read_us = traffic.hbm_bytes / (hw.hbm_bytes_per_us * constants.hbm_read)
    write_us = traffic.write_bytes / (hw.hbm_bytes_per_us * constants.hbm_write)
    overlap = constants.cube_overlap
    cycles = sum_cycles(choice.stages, overlap, read_us * clock, write_us * clock, rate)
    row = int(cycles.argmin())
    cube, load, l2, out = (float(stage[row]) / clock for stage in choice.stages)
    stages: tuple[tuple[float, TaskBound], ...] = (
        (max(cube, load) / rate, "cube"),
        (max(l2, out), "l2"),
        (max(read_us, write_us), "memory"),
    )
    return Work(float(cycles[row]) / clock, max(stages)[1], float(choice.rows[row, :4].prod()))


def to_product(task: Task, work: CubeWork, buffers: tuple[Buffer, ...], hw: Hardware) -> Product:
    """Return a cube task in fractals, with its output's element size and number of images.

    A cube without float32 multiplies float16.
    """
    out_bytes = get_item_bytes(buffers[task.writes[0]].dtype) if task.writes else 2
    shapes = [buffers[index].shape for index in task.reads]
    images = max((shape[0] for shape in shapes if len(shape) >= 3), default=1)
    if not hw.cube_fp32_macs_per_cycle:
        work = replace(work, dtype="float16")
    return pad_product(work, task.cost_class, out_bytes, images)
