"""Does the memory of a long run grow?

    python -m tests.memory

Trains the smallest network on the shipped digits, with logs and TensorBoard, and samples the
resident memory of the process. The exit status is 1 if it grows by more than LIMIT_MB.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline import load_recipe
from pipeline.engine.monitors.log_lines import last_step
from tests.whole_run import run

LIMIT_MB = 50.0
WARM_UP = 0.1
"""Share of the steps after which everything is loaded."""
PERIOD_S = 0.05
TINY = (
    "model=mlp",
    "model.hidden=[16]",
    "dataset.train.ops=[{name: rescale, factor: 0.0625, shift: 0.0}]",
    "dataset.eval.ops=[{name: rescale, factor: 0.0625, shift: 0.0}]",
    "schedule=constant",
    "train.optimizer.lr=0.01",
    "train.batch_size=16",
    "monitor.loss_every=100000",
)


@dataclass(frozen=True)
class MemorySamples:
    """Resident memory when `steps` steps were in the log."""

    steps: np.ndarray
    resident_mb: np.ndarray

    def growth_mb(self, total: int) -> float:
        """Return the growth from the end of the warm-up to the maximum after it."""
        warm = self.steps >= WARM_UP * total
        after = self.resident_mb[warm]
        return float(after.max() - after[0])

    def iter_tenths(self, total: int) -> Iterator[tuple[int, float]]:
        """Yield the last step and the maximum of each tenth of the run."""
        for tenth in range(1, 11):
            inside = (self.steps > (tenth - 1) * total / 10) & (self.steps <= tenth * total / 10)
            if inside.any():
                yield tenth * total // 10, float(self.resident_mb[inside].max())


def read_resident_mb() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 4096 * pages / 1e6


@contextmanager
def sample_memory(log: Path) -> Iterator[list[tuple[int, float]]]:
    """Collect pairs of finished steps and resident memory in a thread meanwhile."""
    pairs: list[tuple[int, float]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(PERIOD_S):
            pairs.append((last_step(log) or 0, read_resident_mb()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield pairs
    finally:
        done.set()
        thread.join()


def measure(steps: int, overrides: Sequence[str]) -> MemorySamples:
    """Train for `steps` steps and sample the memory."""
    recipe = load_recipe("lenet5_digits", [*TINY, f"train.steps={steps}", *overrides])
    run_dir = Path(tempfile.mkdtemp())
    with sample_memory(run_dir / "metrics.jsonl") as pairs:
        run(recipe, run_dir)
    shutil.rmtree(run_dir)
    numbers = np.array(pairs)
    return MemorySamples(numbers[:, 0].astype(int), numbers[:, 1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print resident memory by tenth of the run; the exit status is 1 if it grows too much."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("overrides", nargs="*", help="such as train.feed=stream")
    options = parser.parse_args(arguments)
    samples = measure(options.steps, ["train.sink_size=1000", *options.overrides])
    for steps, highest in samples.iter_tenths(options.steps):
        print(f"up to step {steps:>11,}  {highest:>8,.1f} MB")
    growth = samples.growth_mb(options.steps)
    print(f"grows by {growth:.1f} MB after warm-up; may by {LIMIT_MB:g}")
    return 0 if growth < LIMIT_MB else 1


if __name__ == "__main__":
    sys.exit(main())
