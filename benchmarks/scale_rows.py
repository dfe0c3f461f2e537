"""Costs of data, models and whole runs at a size, which `benchmarks.scale` measures."""

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
    *("dataset=synthetic", "model=mlp", "model.hidden=[16]", "train.steps=200"),
    *("monitor.tensorboard=false", "monitor.sample_images=0"),
)
IMAGE = (28, 28, 1)


def measure_in_process(measure: Callable[[int], float], size: int) -> float:
    """Measure in a new process, whose memory and caches no other row has used."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, size).result()


def read_peak_mb() -> float:
    """Return the peak memory of this program in MB.

    `ru_maxrss` begins with the peak of the process that started it.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1e3
    raise OSError("/proc/self/status: has no VmHWM")


def _run(overrides: Sequence[str]) -> Any:
    from pipeline import load_recipe, run

    with redirect_stdout(StringIO()):
        return run(load_recipe("lenet5_digits", list(overrides)), Path(tempfile.mkdtemp()))


def measure_sweep(jobs: int) -> float:
    """Measure by how many MB jobs after the second raise a process's peak; .npz data of 100 MB."""
    return measure_in_process(_measure_sweep, jobs)


def _measure_sweep(jobs: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        data = _write_npz(Path(folder), 120_000)
        peaks = []
        for seed in range(jobs + 2):
            _run([*TINY[1:], "dataset=numpy", f"dataset.root={data}", f"seed={seed}"])
            peaks.append(read_peak_mb())
    return peaks[-1] - peaks[1]


def _write_npz(folder: Path, samples: int) -> Path:
    images = np.random.default_rng(0).integers(0, 255, (samples, *IMAGE), np.uint8)
    labels = np.arange(samples) % 10
    test: dict[str, Any] = {"x_test": images[:100], "y_test": labels[:100]}
    np.savez(folder / "data.npz", x_train=images, y_train=labels, **test)
    return folder / "data.npz"


def measure_npz(samples: int) -> float:
    """Measure the peak memory of reading an .npz, without imports, as a multiple of its size."""
    return measure_in_process(_measure_npz, samples)


def _measure_npz(samples: int) -> float:
    from pipeline import load_recipe
    from pipeline.core.reporter import Reporter
    from pipeline.stages.data import load_data

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        load_data(load_recipe("lenet5_digits", ["model=mlp"]), Reporter())
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            data = process.submit(_write_npz, Path(folder), samples).result()
        before_mb = read_peak_mb()
        keys = ["dataset=numpy", f"dataset.root={data}", "model=mlp"]
        load_data(load_recipe("lenet5_digits", keys), Reporter())
        return (read_peak_mb() - before_mb) * 1e6 / data.stat().st_size


def compile_second_job(blocks: int) -> float:
    """Measure the processor seconds to compile a program with oneDNN for the second time."""
    return measure_in_process(_compile_second_job, blocks)


def _compile_second_job(blocks: int) -> float:
    network = [f"model.blocks=[{blocks},{blocks},{blocks},{blocks}]", "train.batch_size=32"]
    sizes = ["dataset.train_size=64", "dataset.eval_size=32"]
    job = [*TINY[:1], *TINY[4:], "model=resnet18", *network, *sizes, "train.steps=1"]
    for _ in range(2):
        summary = _run(job)
    return float(summary.time["compile_s"])


def initialise(features: int) -> float:
    """Measure the processor seconds to draw a ViT of 24 blocks of a width."""
    return measure_in_process(_initialise, features)


def _initialise(features: int) -> float:
    init, seed = _build_vit(24, features)
    program = _compile(init, seed)
    before_s = time.process_time()
    program(seed)
    return time.process_time() - before_s


def compile_initialisation_s(blocks: int) -> float:
    """Measure the processor seconds to compile the initialisation of a ViT."""
    return measure_in_process(_compile_initialisation_s, blocks)


def _compile_initialisation_s(blocks: int) -> float:
    init, seed = _build_vit(blocks, 192)
    before_s = time.process_time()
    _compile(init, seed)
    return time.process_time() - before_s


def _build_vit(blocks: int, features: int) -> tuple[Any, Any]:
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


def _compile(init: Any, seed: Any) -> Any:
    import jax

    from pipeline.backends.initialisation import UNOPTIMIZED, compile_initialisation
    from pipeline.training.parallel.state_sharing import DevicePlacement

    def compile_function(function: Any, args: Any, options: Any) -> Any:
        return jax.jit(function).lower(*args).compile(compiler_options=options)

    def compile_on_devices(function: Any) -> Any:
        return compile_function(function, (seed,), UNOPTIMIZED)

    placement = DevicePlacement((jax.devices()[0],))
    return compile_initialisation(init, seed, placement, compile_function, compile_on_devices)


def read_first_window(samples: int) -> float:
    """Measure the seconds until the first window of a stream is read."""
    summary = _run([*TINY, "train.feed=stream", f"dataset.train_size={samples}"])
    return float(summary.time["first_window_s"])


def compare_speeds(steps: int) -> float:
    """Return the reported speed of a run that waits for data over its training stage's speed."""
    overrides = [*TINY[:3], *TINY[4:], "train.feed=stream", f"train.steps={steps}"]
    summary = _run(overrides)
    true_speed = steps * 32 / float(summary.time["train_s"])
    return float(summary.time["images_per_s"]) / true_speed


def save(parameters: int) -> float:
    """Measure the rate of saving float32 numbers until all is on disk, in GB/s by the clock."""
    return _measure_checkpoint_gb_per_s(parameters)[0]


def restore(parameters: int) -> float:
    """Measure the rate of reading back and comparing float32 numbers, in GB/s by the clock."""
    return _measure_checkpoint_gb_per_s(parameters)[1]


def _measure_checkpoint_gb_per_s(parameters: int) -> tuple[float, float]:
    from pipeline.checkpoint.checkpointer import Checkpoints, Retention
    from pipeline.checkpoint.restore import read_state
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
        # The first save imports modules, which doesn't count.
        checkpoints.save(1, TrainState(np.int32(1), {}, {}, {}, scale), {}, None)  # type: ignore[arg-type]
        checkpoints.finish()
        started_at = time.perf_counter()
        checkpoints.save(2, state, {}, None)
        checkpoints.finish()
        saved_at = time.perf_counter()
        read_state(Path(folder), 2, state)
        read_at = time.perf_counter()
    gigabytes = numbers.nbytes / 1e9
    return gigabytes / (saved_at - started_at), gigabytes / (read_at - saved_at)


def order_samples(samples: int) -> float:
    """Measure the processor milliseconds for the order of a window of 65,536 samples."""
    from pipeline.data.order import SampleOrder

    batching: dict[str, Any] = {"batch_size": 64, "drop_remainder": True, "repeat": 1}
    order = SampleOrder(samples=samples, seed=1, shuffle=True, buffer_size=None, **batching)
    order.batches(0, 1024)
    windows = 20
    before_s = time.process_time()
    for window in range(1, windows + 1):
        order.batches(window * 100, 1024)
    return 1000 * (time.process_time() - before_s) / windows


def read_records(samples: int) -> float:
    """Measure the processor microseconds to read a sample in a batch of 4,096 of `samples`."""
    column, _ = _write_record_column(samples)
    rows = np.random.default_rng(0).integers(0, samples, 4096)
    column[rows[:10]]
    before_s = time.process_time()
    column[rows]
    return 1e6 * (time.process_time() - before_s) / len(rows)


def read_single(samples: int) -> float:
    """Measure the processor microseconds to read one of `samples` by its index."""
    column, _ = _write_record_column(samples)
    reads = 300
    before_s = time.process_time()
    for sample in range(reads):
        column[np.array([sample])]
    return 1e6 * (time.process_time() - before_s) / reads


def _write_record_column(samples: int) -> tuple[Any, Any]:
    from pipeline import load_recipe
    from pipeline.cli.convert.records import main
    from pipeline.core.reporter import Reporter
    from pipeline.stages.data import load_data

    folder = Path(tempfile.mkdtemp()) / "records"
    source = ["dataset=synthetic", f"dataset.train_size={samples}", "dataset.eval_size=10"]
    with redirect_stdout(StringIO()):
        main(folder, ["+recipe=lenet5_digits", "model=mlp", *source])
        keys = ["dataset=records", f"dataset.root={folder}", "model=mlp"]
        dataset = load_data(load_recipe("lenet5_digits", keys), Reporter())
    return dataset.train.columns["image"], dataset


def count_shared_processors(jobs: int) -> float:
    """Return the processors of all jobs of submitit_local, as a multiple of the machine's."""
    from pipeline.study.sweep.jobs import count_jobs_at_once, count_processors

    launcher = {"_target_": "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"}
    processors = max(1, count_processors() // count_jobs_at_once(launcher, jobs))
    return jobs * processors / max(jobs, count_processors())
