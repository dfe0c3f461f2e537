"""Kernels that were timed on a real Ascend 910, as tasks that the model can price.

`kernels.csv` has a kernel a row: its trace, its time, what it reads and writes. Operands are
`name:dtype:shape:layout`; a name that an earlier kernel writes makes the two kernels producer and
consumer. The 2020 traces have shapes; the shapes of the 2023 trace are inferred from the network,
AlexNet for CIFAR-10 at 227 x 227, batch 32, whose gradients match to the byte.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from pipeline.backends.ascend.chip.tasks import (
    Buffer,
    CostClass,
    CubeWork,
    Engine,
    Task,
    TaskGraph,
    VectorWork,
)
from pipeline.core.errors import RunError
from pipeline.core.host.array_values import get_item_bytes

KERNELS_FILE = Path(__file__).with_name("kernels.csv")


@dataclass(frozen=True, slots=True)
class MeasuredKernel:
    """A kernel of a trace; `cores` is 0 if the trace doesn't have it."""

    name: str
    us: float
    cores: int


@dataclass(frozen=True)
class Trace:
    """The kernels of a traced step, and the same as tasks in their order."""

    name: str
    kernels: tuple[MeasuredKernel, ...]
    graph: TaskGraph


def read_traces(path: Path = KERNELS_FILE) -> tuple[Trace, ...]:
    """Return every trace of the file, in its order. Raises RunError for an unknown cost class."""
    rows: dict[str, list[dict[str, str]]] = {}
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            if row.get("cost_class") not in get_args(CostClass):
                raise RunError(f"{path}:{number}: no cost class {row.get('cost_class')!r}")
            rows.setdefault(row["trace"], []).append(row)
    return tuple(_make_trace(name, kernels) for name, kernels in rows.items())


def _make_trace(name: str, rows: list[dict[str, str]]) -> Trace:
    buffers: dict[str, Buffer] = {}
    tasks = []
    kernels = []
    for row in rows:
        reads, writes = (
            tuple(dict.fromkeys(_find_buffer(text, buffers) for text in row[key].split()))
            for key in ("reads", "writes")
        )
        tasks.append(_make_task(row, reads, writes))
        kernels.append(MeasuredKernel(row["kernel"], float(row["us"]), int(row["cores"] or 0)))
    return Trace(name, tuple(kernels), TaskGraph(tuple(buffers.values()), tuple(tasks)))


def _find_buffer(text: str, buffers: dict[str, Buffer]) -> int:
    """Return the index of the named buffer. A name with another shape is another buffer."""
    if text not in buffers:
        name, dtype, shape_text, layout = text.split(":")
        shape = tuple(int(length) for length in shape_text.split("x"))
        nbytes = math.prod(shape) * get_item_bytes(dtype)
        buffer = Buffer(len(buffers), shape, dtype, layout, nbytes, "activation", name)  # type: ignore[arg-type]
        buffers[text] = buffer
    return buffers[text].index


def _make_task(row: dict[str, str], reads: tuple[int, ...], writes: tuple[int, ...]) -> Task:
    cube = _parse_cube(row["cube"]) if row["cube"] else None
    engine: Engine = "cube" if cube and cube.dtype == "float16" else "vector"
    return Task(
        row["type"],
        row["kernel"],
        engine,
        "forward",
        row["cost_class"],  # type: ignore[arg-type]
        reads,
        writes,
        cube,
        _parse_vector(row["vector"]) if row["vector"] else None,
    )


def _parse_cube(text: str) -> CubeWork:
    """Parse "batch m k n taps stride dtype"."""
    *numbers, dtype = text.split()
    batch, m, k, n, taps, stride = (int(number) for number in numbers)
    return CubeWork(batch, m, k, n, batch * m * k * n, taps, stride, dtype)


def _parse_vector(text: str) -> VectorWork:
    """Parse "elements dtype simple heavy", and "along_rows" if it is more than 1."""
    elements, dtype, simple, heavy, *along_rows = text.split()
    return VectorWork(int(elements), dtype, float(simple), float(heavy), *map(int, along_rows))
