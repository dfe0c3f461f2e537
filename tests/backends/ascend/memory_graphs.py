"""Task graphs for the memory plan: a network by hand, and any graph that hypothesis finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from pipeline.backends.ascend.chip.tasks import Buffer, Phase, Role, Task, TaskGraph


def buffer(index: int, nbytes: int, role: Role = "activation", **fields: Any) -> Buffer:
    """A buffer of `nbytes` bytes; its shape is that of uint8 unless given."""
    values = {"shape": (nbytes,), "dtype": "uint8", "layout": "ND", "name": f"b{index}", **fields}
    return Buffer(index=index, nbytes=nbytes, role=role, **values)


def task(
    reads: Sequence[int], writes: Sequence[int], phase: Phase = "forward", **fields: Any
) -> Task:
    """A vector task between buffers."""
    values = {"type": "Add", "scope": "net", "engine": "vector", "cost_class": "elementwise"}
    return Task(phase=phase, reads=tuple(reads), writes=tuple(writes), **{**values, **fields})


def chain(batch: int, layers: int = 6, width: int = 100_000) -> TaskGraph:
    """A network of equal layers: input, a weight each, a saved activation each, and gradients.

    Buffers: the input, then for every layer weight, momentum, activation, gradient of the
    activation, gradient of the weight. All are float16.
    """
    buffers = [_tensor(0, (batch, width), "input", "images")]
    forward, backward, update = [], [], []
    for layer in range(layers):
        at = 1 + 5 * layer
        buffers += [
            _tensor(at, (width,), "parameter", f"weight{layer}"),
            _tensor(at + 1, (width,), "state", f"momentum{layer}"),
            _tensor(at + 2, (batch, width), "activation", f"relu{layer}"),
            _tensor(at + 3, (batch, width), "activation", f"relu_grad{layer}"),
            _tensor(at + 4, (width,), "gradient", f"weight_grad{layer}"),
        ]
        before = at - 3 if layer else 0
        above = at + 8 if layer + 1 < layers else at + 2
        forward.append(task([before, at], [at + 2], scope=f"layer{layer}", type="MatMul"))
        backward.append(task([above, before, at], [at + 3, at + 4], "backward", type="MatMulGrad"))
        update.append(task([at + 4, at, at + 1], [at, at + 1], "optimizer", type="ApplyMomentum"))
    backward.reverse()
    made = enumerate(reversed(range(layers)), start=layers)
    return TaskGraph(
        buffers=tuple(buffers),
        tasks=(*forward, *backward, *update),
        inputs=(0,),
        parameters=tuple(range(1, len(buffers), 5)),
        state=tuple(range(2, len(buffers), 5)),
        gradients=tuple((f"weight{layer}", 2 * width, position) for position, layer in made),
    )


def _tensor(index: int, shape: tuple[int, ...], role: Role, name: str) -> Buffer:
    elements = 1
    for size in shape:
        elements *= size
    return buffer(index, 2 * elements, role, shape=shape, dtype="float16", name=name)


@st.composite
def graphs(draw: st.DrawFn, max_tasks: int = 14, max_buffers: int = 16) -> TaskGraph:
    """Any graph whose tasks read and write any buffers, with loops, aliases and gradients."""
    count = draw(st.integers(1, max_buffers))
    roles = st.sampled_from(
        ["activation", "activation", "gradient", "parameter", "state", "input", "constant"]
    )
    sizes = st.integers(0, 5000)
    buffers = tuple(buffer(i, draw(sizes), draw(roles)) for i in range(count))
    some = st.lists(st.integers(0, count - 1), max_size=3, unique=True)
    phases = st.sampled_from(["forward", "backward", "optimizer"])
    repeats = st.sampled_from([1, 1, 1, 4])
    tasks = tuple(
        task(draw(some), draw(some), draw(phases), repeat=draw(repeats))
        for _ in range(draw(st.integers(0, max_tasks)))
    )
    makers = [i for i, writer in enumerate(tasks) if writer.writes]
    return TaskGraph(
        buffers=buffers,
        tasks=tasks,
        inputs=tuple(b.index for b in buffers if b.role == "input"),
        outputs=tuple(draw(some)),
        gradients=tuple((f"g{i}", 4, i) for i in makers if draw(st.booleans())),
        aliases={i: draw(st.integers(0, i - 1)) for i in range(1, count) if draw(st.booleans())}
        if draw(st.booleans())
        else {},
    )
