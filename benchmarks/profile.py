"""The parts of our training step's time: milliseconds a step by kind of operation.

    python -m benchmarks.profile --task resnet50 --precision bf16 --root DIR

The step is the step of `benchmarks.train`, traced by JAX's profiler after steps that warm up.
Every operation that XLA runs has one kind. Some run at the same time, so the kinds add up to more
than the step. Bytes are the bytes of operands and results, each read or written once. What a cache
holds between operations makes a rate exceed the rate of the memory, which is measured beside it by
copying an array, on the GPU if it computes.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import RESULTS, add_save, heading, publish, table, usable_cores
from benchmarks.ours import OursTraining
from benchmarks.tasks import PRECISIONS, TASKS, Task, make_task
from pipeline.backends.graph.hlo_program import HloProgram, parse_program
from pipeline.core.host.process_start import reexec_with_malloc_tunables

PACKAGES = ("jax", "jaxlib", "numpy")
WARM_UPS = 4
"""Dispatches until the process has the memory that it needs: the first two take twice as long."""
COPIED_BYTES = 1 << 28
COPIES = 5


@dataclass(frozen=True)
class Profile:
    """Seconds of all steps, and by operation how long it ran and how often."""

    steps: int
    seconds: float
    busy_us: Mapping[str, float]
    calls: Mapping[str, int]


def main() -> None:
    """Profile and print a Markdown table."""
    reexec_with_malloc_tunables()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--root", type=Path, help="dataset.root; default: download the data")
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for the recipe, as device=gpu, which is traced without CUDA graphs",
    )
    add_save(parser, "")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(
            args.task,
            Path(folder),
            root=args.root,
            batch_size=None,
            precision=args.precision,
            sink_size=args.steps,
            threads=usable_cores(),
            overrides=drop_graphs(args.override),
        )
        training = OursTraining(task)
        program = parse_program(training.program_text)
        profile = take_profile(training, args.steps, Path(folder) / "trace")
    file_name = f"profile_{args.task}_{args.precision}.md"
    save = RESULTS / file_name if args.save == RESULTS else args.save
    copy_gb_s = measure_gpu_copy_gb_s() if task.on_gpu else measure_copy_gb_s()
    publish(_report(task, profile, program, copy_gb_s, args.override), save)


def drop_graphs(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides; on a GPU without CUDA graphs, which have no names of operations."""
    has_graphs = any(key.startswith("device.graphs=") for key in overrides)
    off = ["device.graphs=off"] if "device=gpu" in overrides and not has_graphs else []
    return (*overrides, *off)


def take_profile(training: OursTraining, steps: int, folder: Path) -> Profile:
    """Trace a sink after steps that warm up."""
    for _ in range(WARM_UPS):
        training.run(1)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(folder), profiler_options=options):
        seconds = training.run(steps).part_s or 0.0
    (file,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
    with gzip.open(file) as stream:
        events = json.load(stream)["traceEvents"]
    busy_us = Counter[str]()
    calls = Counter[str]()
    for event in events:
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
            busy_us[event["name"]] += event["dur"]
            calls[event["name"]] += 1
    return Profile(steps, seconds, busy_us, calls)


def measure_copy_gb_s() -> float:
    """Measure the rate of copying an array by one core: GB read and written a second, at best."""
    source = np.ones(COPIED_BYTES, np.uint8)
    target = np.empty(COPIED_BYTES, np.uint8)
    times_s = []
    for _ in range(COPIES):
        started_at = time.perf_counter()
        np.copyto(target, source)
        times_s.append(time.perf_counter() - started_at)
    return 2 * COPIED_BYTES / min(times_s) / 1e9


def measure_gpu_copy_gb_s() -> float:
    """Measure the rate of copying an array on the GPU: GB read and written a second, at best."""
    source = jax.device_put(np.ones(COPIED_BYTES, np.uint8), jax.devices("gpu")[0])
    copy = jax.jit(jnp.copy)
    times_s = []
    for _ in range(COPIES + 1):
        started_at = time.perf_counter()
        jax.block_until_ready(copy(source))
        times_s.append(time.perf_counter() - started_at)
    return 2 * COPIED_BYTES / min(times_s) / 1e9


def _report(
    task: Task,
    profile: Profile,
    program: HloProgram,
    memory_gb_s: float,
    overrides: Sequence[str] = (),
) -> str:
    busy_ms: defaultdict[str, float] = defaultdict(float)
    moved_gb: defaultdict[str, float] = defaultdict(float)
    operations: defaultdict[str, float] = defaultdict(float)
    for name, us in profile.busy_us.items():
        kind = program.find_kind(name)
        if kind is None:
            continue
        busy_ms[kind] += us / 1000 / profile.steps
        if (operation := program.find(name)) is not None:
            moved_gb[kind] += operation.moved_bytes * profile.calls[name] / 1e9 / profile.steps
        operations[kind] += profile.calls[name] / profile.steps
    rows = [
        [
            kind,
            f"{ms:,.2f}",
            f"{ms / sum(busy_ms.values()):.0%}",
            f"{operations[kind]:,.0f}",
            f"{moved_gb[kind]:.3f}",
            f"{moved_gb[kind] / ms * 1000:,.0f}",
        ]
        for kind, ms in sorted(busy_ms.items(), key=lambda item: -item[1])
    ]
    header = ["operations", "ms a step", "share", "how many", "GB", "GB/s"]
    options = f"--task {task.name}"
    options += f" --precision {task.precision}" if task.precision != "float32" else ""
    options += "".join(f" --override {key}" for key in overrides)
    copier = "The GPU" if task.on_gpu else "One core"
    title = f"{task.name}, batch {task.batch_size}, {task.precision}: where a step goes"
    return (
        heading(title, f"python -m benchmarks.profile {options} --steps {profile.steps}", PACKAGES)
        + f"\nA step took {1000 * profile.seconds / profile.steps:,.2f} ms while it was traced. "
        f"{copier} copies {memory_gb_s:.0f} GB/s.\n\n" + table(header, rows)
    )


if __name__ == "__main__":
    main()
