"""Costs that `benchmarks.scale` measures of data, models and whole runs, each at a size."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

TINY = (
    "dataset=synthetic",
    "model=mlp",
    "model.hidden=[16]",
    "train.steps=200",
    "monitor.tensorboard=false",
    "monitor.sample_images=0",
)
IMAGE = (28, 28, 1)


def in_a_process(measure: Callable[[int], float], size: int) -> float:
    """Measure in a process of its own, whose memory and caches no other row has used."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, size).result()


def peak_mb() -> float:
    """The most memory that this program has had, in MB.

    `ru_maxrss` begins with that of the process which started it.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1e3
    raise OSError("/proc/self/status: has no VmHWM")


def _run(overrides: Sequence[str]) -> Any:
    from pipeline import load_recipe, run

    with redirect_stdout(StringIO()):
        return run(load_recipe("lenet5_digits", list(overrides)), Path(tempfile.mkdtemp()))


def sweep_memory(jobs: int) -> float:
    """MB by which jobs after the second one raise the peak of a process; .npz data of 100 MB."""
    return in_a_process(_sweep_memory, jobs)


def _sweep_memory(jobs: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        data = _npz(Path(folder), 120_000)
        peaks = []
        for seed in range(jobs + 2):
            _run([*TINY[1:], "dataset=numpy", f"dataset.root={data}", f"seed={seed}"])
            peaks.append(peak_mb())
    return peaks[-1] - peaks[1]


def _npz(folder: Path, samples: int) -> Path:
    images = np.random.default_rng(0).integers(0, 255, (samples, *IMAGE), np.uint8)
    labels = np.arange(samples) % 10
    held = {"x_test": images[:100], "y_test": labels[:100]}
    np.savez(folder / "data.npz", x_train=images, y_train=labels, **held)
    return folder / "data.npz"


def npz_memory(samples: int) -> float:
    """Peak memory of reading an .npz, as a multiple of its size, that of imports left out."""
    return in_a_process(_npz_memory, samples)


def _npz_memory(samples: int) -> float:
    from pipeline import load_recipe
    from pipeline.core.reporter import Reporter
    from pipeline.stages.data import load_data

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        load_data(load_recipe("lenet5_digits", ["model=mlp"]), Reporter())
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            data = process.submit(_npz, Path(folder), samples).result()
        before = peak_mb()
        recipe = load_recipe(
            "lenet5_digits", ["dataset=numpy", f"dataset.root={data}", "model=mlp"]
        )
        load_data(recipe, Reporter())
        return (peak_mb() - before) * 1e6 / data.stat().st_size


def second_job(blocks: int) -> float:
    """Seconds of processor time to compile a program that calls oneDNN for the second time."""
    return in_a_process(_second_job, blocks)


def _second_job(blocks: int) -> float:
    network = [f"model.blocks=[{blocks},{blocks},{blocks},{blocks}]", "train.batch_size=32"]
    sizes = ["dataset.train_size=64", "dataset.eval_size=32"]
    job = [*TINY[:1], *TINY[4:], "model=resnet18", *network, *sizes, "train.steps=1"]
    for _ in range(2):
        summary = _run(job)
    return float(summary.time["compile_s"])


def initialisation(features: int) -> float:
    """Seconds of processor time to draw a ViT of 24 blocks of a width."""
    return in_a_process(_initialisation, features)


def _initialisation(features: int) -> float:
    init, seed = _vit(24, features)
    program = _compiled(init, seed)
    began = time.process_time()
    program(seed)
    return time.process_time() - began


def compiling_initialisation(blocks: int) -> float:
    """Seconds of processor time to compile the initialisation of a ViT."""
    return in_a_process(_compiling_initialisation, blocks)


def _compiling_initialisation(blocks: int) -> float:
    init, seed = _vit(blocks, 192)
    began = time.process_time()
    _compiled(init, seed)
    return time.process_time() - began


def _vit(blocks: int, features: int) -> tuple[Any, Any]:
    from pipeline import load_recipe
    from pipeline.core.reporter import Reporter
    from pipeline.stages.build import build
    from pipeline.stages.data import load_data

    shape = [f"model.features={features}", f"model.hidden={4 * features}", "model.heads=4"]
    overrides = ["model=vit_tiny", f"model.blocks={blocks}", "model.patch=7", *shape]
    recipe = load_recipe("lenet5_digits", ["dataset=synthetic", *overrides])
    with redirect_stdout(StringIO()):
        built = build(recipe, load_data(recipe, Reporter()), Reporter())
    return built.step.init, built.seed


def _compiled(init: Any, seed: Any) -> Any:
    import jax

    from pipeline.backends.initialisation import UNOPTIMIZED, compile_initialisation
    from pipeline.training.parallel.placement import DevicePlacement

    def compile_(function: Any, args: Any, options: Any) -> Any:
        return jax.jit(function).lower(*args).compile(compiler_options=options)

    def on_devices(function: Any) -> Any:
        return compile_(function, (seed,), UNOPTIMIZED)

    placement = DevicePlacement((jax.devices()[0],))
    return compile_initialisation(init, seed, placement, compile_, on_devices)


def first_window(samples: int) -> float:
    """Seconds until the first window of a stream is there."""
    summary = _run([*TINY, "train.feed=stream", f"dataset.train_size={samples}"])
    return float(summary.time["first_window_s"])


def speed_told(steps: int) -> float:
    """Speed that a run which waits for data tells, as a multiple of that of its training stage."""
    overrides = [*TINY[:3], *TINY[4:], "train.feed=stream", f"train.steps={steps}"]
    summary = _run(overrides)
    true = steps * 32 / float(summary.time["train_s"])
    return float(summary.time["images_per_s"]) / true


def saving(parameters: int) -> float:
    """GB of float32 numbers that are saved in a second, by the clock, until all is on disk."""
    return _checkpoint_gb_per_s(parameters)[0]


def restoring(parameters: int) -> float:
    """GB of float32 numbers that are read back in a second, by the clock, and compared."""
    return _checkpoint_gb_per_s(parameters)[1]


def _checkpoint_gb_per_s(parameters: int) -> tuple[float, float]:
    from pipeline.checkpoint.checkpointer import Checkpoints
    from pipeline.checkpoint.retention import Retention
    from pipeline.training.state import TrainState

    rows = max(1, parameters // (1 << 20))
    numbers = np.random.default_rng(0).standard_normal((rows, 1 << 20), np.float32)
    params = {str(row): values for row, values in enumerate(numbers)}
    scale = np.float32(1)
    state: Any = TrainState(np.int32(2), params, {}, {}, scale)  # type: ignore[arg-type]
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(Path(folder), Retention(keep=5)) as checkpoints,
    ):
        # What the first save imports does not count.
        checkpoints.save(1, TrainState(np.int32(1), {}, {}, {}, scale), {}, None)  # type: ignore[arg-type]
        checkpoints.finish()
        began = time.perf_counter()
        checkpoints.save(2, state, {}, None)
        checkpoints.finish()
        saved = time.perf_counter()
        checkpoints.read(2, state)
        read = time.perf_counter()
    return numbers.nbytes / 1e9 / (saved - began), numbers.nbytes / 1e9 / (read - saved)


def order(samples: int) -> float:
    """Milliseconds of processor time for the order of a window of 65,536 samples."""
    from pipeline.data.order import SampleOrder

    batching: dict[str, Any] = {"batch_size": 64, "drop_remainder": True, "repeat": 1}
    chosen = SampleOrder(samples=samples, seed=1, shuffle=True, buffer_size=None, **batching)
    chosen.batches(0, 1024)
    windows = 20
    began = time.process_time()
    for window in range(1, windows + 1):
        chosen.batches(window * 100, 1024)
    return 1000 * (time.process_time() - began) / windows


def reading_records(samples: int) -> float:
    """Microseconds of processor time to read a sample in a batch of 4,096, of a number of them."""
    column, _ = _record_column(samples)
    chosen = np.random.default_rng(0).integers(0, samples, 4096)
    column[chosen[:10]]
    began = time.process_time()
    column[chosen]
    return 1e6 * (time.process_time() - began) / len(chosen)


def single_read(samples: int) -> float:
    """Microseconds of processor time to read one sample by its index, of a number of them."""
    column, _ = _record_column(samples)
    began, reads = time.process_time(), 300
    for sample in range(reads):
        column[np.array([sample])]
    return 1e6 * (time.process_time() - began) / reads


def _record_column(samples: int) -> tuple[Any, Any]:
    from pipeline import load_recipe
    from pipeline.cli.convert.records import main
    from pipeline.core.reporter import Reporter
    from pipeline.stages.data import load_data

    folder = Path(tempfile.mkdtemp()) / "records"
    source = ["dataset=synthetic", f"dataset.train_size={samples}", "dataset.eval_size=10"]
    with redirect_stdout(StringIO()):
        main(folder, ["+recipe=lenet5_digits", "model=mlp", *source])
        chosen = ["dataset=records", f"dataset.root={folder}", "model=mlp"]
        dataset = load_data(load_recipe("lenet5_digits", chosen), Reporter())
    return dataset.train.columns["image"], dataset


def shared_processors(jobs: int) -> float:
    """Processors that the jobs of submitit_local get in all, as a multiple of those there are."""
    from pipeline.study.sweep.threads import count_jobs_at_once, count_processors

    launcher = {"_target_": "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"}
    processors = max(1, count_processors() // count_jobs_at_once(launcher, jobs))
    return jobs * processors / max(jobs, count_processors())
