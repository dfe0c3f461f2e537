"""Compare random recipes on every layout of devices.

    python -m tests.layouts --recipes 50 [--seed N]

Each recipe is trained on 1, 2, 4 and 8 devices of one process, and on 1, 2 and 4 devices in each of
two processes, with different sinks, loaders and modes (`data` or `fsdp`). Losses, gradient norms,
evaluations and every array of the last checkpoint must be the same bits.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from pipeline import load_recipe, run
from pipeline.checkpoint.restore import read_saved
from tests import outcome
from tests.conftest import TINY

STEPS = 12
BATCH = 16
LISTED = (
    "{name: lookahead, steps: 3}",
    "{name: distill, teacher: ema, decay: 0.9}",
    "gradient_penalty",
    "{name: accumulate_labels, labels: 50}",
    "gradient_noise",
)
"""Listed features of a step."""


@dataclass(frozen=True)
class Layout:
    """A number of processes, and of devices in each of them."""

    processes: int
    devices: int

    def overrides(self) -> list[str]:
        """Return the overrides of a recipe."""
        total = [f"parallel.devices={self.processes * self.devices}"]
        if self.processes == 1:
            return total
        return [*total, "launch=local", f"launch.processes={self.processes}"]

    def __str__(self) -> str:
        return f"{self.processes}x{self.devices}"


ALONE = tuple(Layout(1, devices) for devices in (1, 2, 4, 8))
IN_PROCESSES = tuple(Layout(2, devices) for devices in (1, 2, 4))


def draw_recipe(seed: int) -> list[str]:
    """Draw the overrides of a small network, its optimizer and features of training."""
    rng = random.Random(seed)
    layers = []
    if rng.random() < 0.6:
        layers += [f"{{name: conv, features: {rng.choice([3, 6])}, kernel: 3, stride: 2}}"]
        layers += ["batch_norm"] if rng.random() < 0.7 else []
        layers += ["relu", "{name: max_pool, kernel: 2, stride: 2}"]
    layers += ["flatten", f"{{name: dense, features: {rng.choice([8, 12])}}}", "relu"]
    layers += [f"{{name: dropout, rate: {rng.choice([0.2, 0.5])}}}"] if rng.random() < 0.6 else []
    layers += ["{name: dense, features: $classes}"]
    optional = {
        "train.accumulate_steps=2": 0.4,
        "train.loss_scale={name: dynamic, init: 128.0, factor: 2.0, window: 5}": 0.3,
        "train.ema.decay=0.9": 0.3,
        "dataset.ignore_index=3": 0.3,
        "train.loss.smoothing=0.1": 0.3,
        "train.on_nan=skip": 0.2,
        "train.clip.norm=1.0": 0.3,
        "train.loss.reduction=sum": 0.1,
    }
    chosen = [key for key, share in optional.items() if rng.random() < share]
    listed = [feature for feature in LISTED if rng.random() < 0.25]
    if "train.loss.reduction=sum" in chosen:  # which accumulated labels refuse
        listed = [feature for feature in listed if "accumulate_labels" not in feature]
    chosen += [f"train.features=[{','.join(listed)}]"] if listed else []
    return [
        f"model.layers=[{','.join(layers)}]",
        f"optimizer={rng.choice(['momentum', 'adam', 'adamw', 'lion', 'lamb'])}",
        f"train.optimizer.lr={rng.choice([0.001, 0.01])}",
        f"seed={rng.randrange(1000)}",
        *([] if chosen else ["parallel.shards=16"]),
        *chosen,
    ]


def train(recipe: Sequence[str], layout: Layout, folder: Path, cache: Path, seed: int) -> object:
    """Train, and return the results that must be equal on all layouts."""
    rng = random.Random(f"{seed} {layout}")
    run_dir = folder / str(layout)
    lr = [override for override in recipe if override.startswith("train.optimizer.lr")]
    replaced = ("train.batch_size", "train.optimizer.lr")
    arguments = [
        "model=layers",
        *[override for override in TINY if not override.startswith(replaced)],
        *[override for override in recipe if override not in lr],
        *lr,
        f"train.batch_size={BATCH}",
        "train.epochs=null",
        f"train.steps={STEPS}",
        f"parallel.mode={rng.choice(['data', 'fsdp'])}",
        f"train.sink_size={rng.choice([1, 5, 7, 100])}",
        f"train.feed={rng.choice(['resident', 'stream'])}",
        "eval.every_epochs=null",
        "eval.every_steps=6",
        f"cache.root={cache}",
        *layout.overrides(),
    ]
    with redirect_stdout(StringIO()):
        run(load_recipe("lenet5_digits", arguments), run_dir)
    arrays = {path: array.tobytes() for path, array in read_saved(run_dir).arrays.items()}
    return outcome.metrics(run_dir), outcome.read_lines(run_dir / "evals.jsonl"), arrays


def main() -> int:
    """Print a line for each recipe; return 1 if a layout differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.layouts", description=__doc__)
    parser.add_argument("--recipes", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="layouts of one process")
    options = parser.parse_args()
    layouts = ALONE if options.alone else (*ALONE, *IN_PROCESSES)
    num_different = 0
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.seed, options.seed + options.recipes):
            recipe = draw_recipe(number)
            folder = Path(name) / str(number)
            first = train(recipe, layouts[0], folder, Path(name) / "cache", number)
            differing = [
                str(layout)
                for layout in layouts[1:]
                if train(recipe, layout, folder, Path(name) / "cache", number) != first
            ]
            num_different += bool(differing)
            result = f"differs on {', '.join(differing)}" if differing else "equal"
            print(f"recipe {number}: {result}: {' '.join(recipe)}", flush=True)
    minutes = (time.monotonic() - start_s) / 60
    counts = f"{options.recipes} recipes, {len(layouts)} layouts, {num_different} mismatches"
    print(f"{counts}, {minutes:.1f} min")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
