"""Tasks over buffers, as an Ascend executes them, without any figure of the hardware."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Layout = Literal["ND", "NC1HWC0", "FRACTAL_Z", "FRACTAL_NZ"]
Engine = Literal["cube", "vector", "ai_cpu", "hccl"]
Phase = Literal["forward", "backward", "communication", "optimizer", "data"]
Role = Literal["parameter", "state", "gradient", "activation", "input", "output", "constant"]

CostClass = Literal[
    "conv",
    "conv_input_grad",
    "conv_kernel_grad",
    "matmul",
    "depthwise",
    "depthwise_input_grad",
    "depthwise_kernel_grad",
    "elementwise",
    "cast",
    "optimizer",
    "bn_reduce",
    "bn_update",
    "bias_grad",
    "reduce",
    "rows",
    "max_pool",
    "max_pool_grad",
    "avg_pool",
    "trans_data",
    "transpose",
    "copy",
    "fill",
    "gather",
    "scatter",
    "sort",
    "ai_cpu",
    "all_reduce",
]
"""Classes of kernels that share one efficiency.

`rows` works along the minor axis (softmax, layer norm), `reduce` across rows, `bn_reduce` and
`bn_update` are batch normalisation's passes over feature maps, `bias_grad` sums a gradient over
everything but its channels, `copy` is concat, slice and pad, `fill` is MemSet.
"""

CHANNEL_BLOCK = 16
"""C0: channels of a block of NC1HWC0, and the edge of a fractal, in float16 as well as float32."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A value in device memory. `nbytes` includes its layout's padding; masks are 1 bit an element.

    `within` is the buffer that this one is a part of: a slice that a scan reads or writes.
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
    """A product of matrices, `batch` times (batch, m, k) x (batch, k, n) -> (batch, m, n).

    A convolution is its im2col view. `m`, `k`, `n` are not padded. `taps` is the kernel's area:
    in a forward convolution k = taps * input channels, and each tap's channels are padded apart;
    in a kernel gradient m = taps * input channels. `batch` counts groups and attention heads.
    `macs` are the useful multiply-adds of the whole task. `stride` is the product of the strides
    (of the forward convolution).
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

    `simple` are adds, products, comparisons, selections, conversions; `heavy` are divisions,
    exponentials, logarithms, roots and the like. `along_rows` are the operations that run once
    for every row of the minor axis: reductions of it, and values of a row that are spread over it.
    """

    elements: int
    dtype: str
    simple: float = 1.0
    heavy: float = 0.0
    along_rows: int = 1


@dataclass(frozen=True, slots=True)
class Permutation:
    """Order in which a transpose writes the axes of its source, in its shortest form.

    `lengths` are of the source's axes without axes of length 1; axes that stay neighbours are
    one. Axis i of the result is axis `order[i]` of the source, as in `numpy.transpose`.
    """

    lengths: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def keeps_bytes(self) -> bool:
        """Whether every element stays where it is."""
        return len(self.order) <= 1

    @property
    def keeps_rows(self) -> bool:
        """Whether the minor axis stays the minor one, so that whole rows move."""
        return self.keeps_bytes or self.order[-1] == len(self.order) - 1


def simplify_permutation(shape: Sequence[int], order: Sequence[int]) -> Permutation:
    """Return a transpose's permutation, the same however its axes are split by reshapes."""
    runs: list[list[int]] = []
    for axis in order:
        if shape[axis] == 1:
            continue
        last = runs[-1][-1] if runs else axis
        if last < axis and all(shape[a] == 1 for a in range(last + 1, axis)):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    ranked = sorted(range(len(runs)), key=lambda place: runs[place][0])
    lengths = tuple(math.prod(shape[axis] for axis in runs[place]) for place in ranked)
    rank = {place: number for number, place in enumerate(ranked)}
    return Permutation(lengths, tuple(rank[place] for place in range(len(runs))))


@dataclass(frozen=True, slots=True)
class Task:
    """One kernel. A scan's body appears once, with its length as `repeat`.

    `type` is the vendor's op type (`Conv2D`, `BNTrainingReduce`), `scope` the module path that JAX
    kept, `fused` the other primitives or ops that the kernel does. `reads` and `writes` are indices
    of buffers; `reads` has every buffer once. `permutation` is of a transpose. A conversion
    that runs within another op isn't `launched` apart if the host launches every op.
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


@dataclass(frozen=True)
class TaskGraph:
    """Tasks in the order of execution over their buffers.

    `primitives` counts every equation of the traced function by its outcome: "task", "fused",
    "free" or "unsupported". `gradients` are (parameter name, bytes all-reduced, index of the task
    that writes it), in the order in which they are written; `inputs` are the buffers that a batch
    fills, `parameters`, `state` those that live from step to step.
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

    `us` is never below `roofline_us`, the time that the peak rates of engine and memory allow.
    `bound` names the limit; `provenance` says how sure its class is: "measured" if kernels of
    that class were timed, "derived" by analogy, "assumed" otherwise.
    """

    us: float
    roofline_us: float
    bound: Literal["cube", "vector", "memory", "l2", "floor", "ai_cpu", "link"]
    provenance: Literal["measured", "derived", "assumed"]
