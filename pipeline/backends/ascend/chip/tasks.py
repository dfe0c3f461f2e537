"""Tasks over buffers, as an Ascend executes them, without any figure of the hardware."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Layout = Literal["ND", "NC1HWC0", "FRACTAL_Z", "FRACTAL_NZ"]
Engine = Literal["cube", "vector", "ai_cpu", "hccl"]
Phase = Literal["forward", "backward", "communication", "optimizer", "data"]
TaskBound = Literal["cube", "vector", "memory", "l2", "floor", "ai_cpu", "link"]
Provenance = Literal["measured", "derived", "assumed"]
Role = Literal["parameter", "state", "gradient", "activation", "input", "output", "constant"]

CostClass = Literal[
    "conv", "conv_input_grad", "conv_kernel_grad", "matmul", "depthwise", "depthwise_input_grad",
    "depthwise_kernel_grad", "elementwise", "cast", "optimizer", "bn_reduce", "bn_update",
    "bias_grad", "reduce", "rows", "max_pool", "max_pool_grad", "avg_pool", "trans_data",
    "transpose", "copy", "fill", "gather", "scatter", "sort", "ai_cpu", "all_reduce",
    "recurrent", "resize",
]  # fmt: skip
"""Classes of kernels that share one efficiency.

`rows` works along the minor axis (softmax, layer norm), `reduce` across rows. `bn_reduce` and
`bn_update` are batch normalisation's passes over feature maps. `bias_grad` sums a gradient over
all axes except its channels. `copy` is concat, slice and pad, `fill` is MemSet. `recurrent` is
all steps of a GRU or LSTM. `resize` computes maps of another size.
"""

CHANNEL_BLOCK = 16
"""Channels of a block of NC1HWC0 (C0), and edge of a fractal, both in float16 and in float32."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A value in device memory. `nbytes` includes the padding of its layout.

    Masks take one bit per element. `within` is the index of the buffer that this buffer is a slice
    of, if a scan reads or writes it.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    nbytes: int
    role: Role
    name: str
    within: int | None = None


@dataclass(frozen=True, slots=True)
class CubeWork:
    """A product of matrices: (batch, m, k) x (batch, k, n) -> (batch, m, n), sizes not padded.

    A convolution is its im2col view. `taps` is the area of the convolution's kernel. A forward
    convolution has k = taps * input channels, where the channels of each tap are padded separately.
    A kernel gradient has m = taps * input channels. `batch` counts groups and attention heads.
    `macs` are the multiply-adds without padding. `stride` is the product of the forward
    convolution's strides.
    """

    batch: int
    m: int
    k: int
    n: int
    macs: int
    taps: int = 1
    stride: int = 1
    dtype: str = "float16"


@dataclass(frozen=True, slots=True)
class VectorWork:
    """Element-wise work: operations of the vector unit for each of `elements`.

    `simple` counts adds, products, comparisons, selections and conversions, `heavy` divisions,
    exponentials, logarithms and roots. `along_rows` counts operations that run once for every row
    of the minor axis: reductions of a row, and broadcasts of a number over a row. `rows` counts
    these rows; None: the rows of the largest buffer that the task reads.
    """

    elements: int
    dtype: str
    simple: float = 1.0
    heavy: float = 0.0
    along_rows: int = 1
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Permutation:
    """Order in which a transpose writes the axes of its source, in the shortest form.

    `lengths` are the lengths of the source's axes. Axes of length 1 are left out, and axes that
    stay neighbours are joined. Axis i of the result is axis `order[i]` of the source, as in
    `numpy.transpose`.
    """

    lengths: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def keeps_bytes(self) -> bool:
        """Whether every element keeps its place in memory."""
        return len(self.order) <= 1

    @property
    def keeps_rows(self) -> bool:
        """Whether the minor axis stays last, so that rows move in one piece."""
        return self.keeps_bytes or self.order[-1] == len(self.order) - 1


def simplify_permutation(shape: Sequence[int], order: Sequence[int]) -> Permutation:
    """Return the shortest form of a transpose. Reshapes that split axes don't change this form."""
    runs: list[list[int]] = []
    for axis in order:
        if shape[axis] == 1:
            continue
        last = runs[-1][-1] if runs else axis
        if last < axis and all(size == 1 for size in shape[last + 1 : axis]):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    ranked = sorted(range(len(runs)), key=lambda place: runs[place][0])
    lengths = tuple(math.prod(shape[axis] for axis in runs[place]) for place in ranked)
    rank = {place: number for number, place in enumerate(ranked)}
    return Permutation(lengths, tuple(rank[place] for place in range(len(runs))))


@dataclass(frozen=True, slots=True)
class Task:
    """One kernel. A kernel of a scan's body appears once, with the scan's length as `repeat`.

    `type` is the vendor's op type (`Conv2D`, `BNTrainingReduce`), `scope` the module path from JAX,
    `fused` the other primitives or ops that the kernel computes. `reads` and `writes` are distinct
    indices of buffers. `permutation` is set for a transpose. `launched` is False for a conversion
    inside another op, which `op_by_op` doesn't launch separately. `loop` is the number of the scan
    around it, 0 for none. A recurrent op has `steps`, each of which computes its `parts`.
    """

    type: str
    scope: str
    engine: Engine
    phase: Phase
    cost_class: CostClass
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    cube: CubeWork | None = None
    vector: VectorWork | None = None
    repeat: int = 1
    fused: tuple[str, ...] = ()
    permutation: Permutation | None = None
    launched: bool = True
    loop: int = 0
    parts: tuple[Task, ...] = ()
    steps: int = 1

    @property
    def is_inserted(self) -> bool:
        """Whether the compiler inserted the task for a type, layout or order, or for a MemSet.

        Such a task computes no primitive of the traced step.
        """
        return self.cost_class in ("cast", "trans_data", "transpose", "fill") and not self.fused


@dataclass(frozen=True)
class TaskGraph:
    """Tasks in the order of execution over their buffers.

    `inputs` are the buffers that a batch fills. `parameters` and `state` are buffers that live from
    step to step. `gradients` are (parameter name, bytes all-reduced, index of the task that writes
    the gradient), in the order of the tasks. `primitives` counts the equations of the traced
    function by outcome: "task", "fused", "free" or "unsupported"; `unsupported` counts the last by
    primitive.
    """

    buffers: tuple[Buffer, ...]
    tasks: tuple[Task, ...]
    inputs: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    state: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    gradients: tuple[tuple[str, int, int], ...] = ()
    primitives: Mapping[str, int] = field(default_factory=dict)
    unsupported: Mapping[str, int] = field(default_factory=dict)
    aliases: Mapping[int, int] = field(default_factory=dict)
    """Output buffer -> the state or parameter buffer that it updates in place."""

    def with_tasks(
        self, tasks: Sequence[Task], places: Mapping[int, int], buffers: Sequence[Buffer]
    ) -> TaskGraph:
        """Return the graph with other tasks; `places` maps tasks to their new places."""
        gradients = tuple((name, size, places[writer]) for name, size, writer in self.gradients)
        return replace(self, buffers=tuple(buffers), tasks=tuple(tasks), gradients=gradients)


@dataclass(frozen=True, slots=True)
class TaskTime:
    """Cost of one execution of a task.

    `us` is never below `roofline_us`, the time at the peak rates of engine and memory. `bound`
    names the limit; "floor" is the least time of any task. `provenance` is the source of the rate
    of the task's class: "measured" if kernels of the class were timed, "derived" by analogy,
    "assumed" otherwise.
    """

    us: float
    roofline_us: float
    bound: TaskBound
    provenance: Provenance
