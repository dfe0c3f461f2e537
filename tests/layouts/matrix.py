"""Compare the bits of every shipped recipe and step feature on devices, feeds and sinks.

    python -m tests.layouts.matrix [--all] [--rows NAME ...]

A row is a shipped recipe, made small, a feature of the step or an optimizer. It is trained on one
device with resident data and one sink, and then in other cells: `parallel.mode=data` on 1, 2 and 4
devices, streamed data, sinks of 1 step and 7. Metrics, evaluations and all arrays of the last
checkpoint must be the same bits. Runs without a mode have other sums than runs in shards, so they
are compared with each other. By default a few cells have each value once; --all has all of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import load_recipe, run
from pipeline.checkpoint.restore import read_saved
from tests import outcome
from tests.conftest import ROOT, TINY
from tests.test_recipes import BUILT, MADE_SMALL, OF_FILES, TABLES, TEXTS, TRAINED, twin

STEPS = 12
ALL = 100
"""Sink size that no run reaches."""


@dataclass(frozen=True)
class Row:
    """A recipe and its overrides."""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    alone: bool = False
    """Whether the recipe is refused with a mode."""


@dataclass(frozen=True)
class Cell:
    """Where and how a row is trained."""

    mode: str
    devices: int
    feed: str
    sink: int

    def list_overrides(self) -> list[str]:
        """Return the overrides of a recipe."""
        return [
            f"parallel.mode={self.mode}",
            *([f"parallel.devices={self.devices}"] if self.mode != "none" else []),
            f"train.feed={self.feed}",
            f"train.sink_size={self.sink}",
        ]

    def __str__(self) -> str:
        sink = "all" if self.sink == ALL else self.sink
        place = "no mode" if self.mode == "none" else f"{self.mode} on {self.devices}"
        return f"{place}, {self.feed}, sinks of {sink}"


FIRST = {mode: Cell(mode, 1, "resident", ALL) for mode in ("none", "data")}
"""The cell of each mode that the others are compared with."""
DRAWN = (
    FIRST["data"],
    Cell("data", 1, "stream", 1),
    Cell("data", 2, "stream", 7),
    Cell("data", 4, "resident", 1),
    FIRST["none"],
    Cell("none", 1, "stream", 7),
)
EVERY = (
    *(Cell("data", *values) for values in product((1, 2, 4), ("resident", "stream"), (ALL, 7, 1))),
    *(Cell("none", 1, *values) for values in product(("resident", "stream"), (ALL, 7, 1))),
)

NETWORK = (
    "model=layers",
    "model.layers=[{name: conv, features: 6, kernel: 3, stride: 2}, batch_norm, relu, flatten,"
    "{name: dropout, rate: 0.3}, {name: dense, features: $classes}]",
)
SMALL_BATCH_NETWORK = (
    "model=layers",
    "model.layers=[{name: conv, features: 3, kernel: 3, stride: 4}, relu, global_avg_pool,"
    "{name: dense, features: $classes}]",
)
SMALL_GPT = ("model.features=16", "model.hidden=32", "model.heads=2", "model.blocks=1")
UNFREEZE = (
    "train.freeze=[batch_norm_*]",
    "train.unfreeze=[{pattern: batch_norm_*, after_steps: 5}]",
)
FEATURES: Mapping[str, Sequence[str]] = {
    "clipping": ("train.clip.norm=0.5",),
    "clipping of values": ("train.clip.value=0.001",),
    "phases": UNFREEZE,
    "phases, AdamW": (*UNFREEZE, "optimizer=adamw"),
    "phases, NAdam": (*UNFREEZE, "optimizer=nadam"),
    "microbatches": ("train.accumulate_steps=2",),
    "loss scale": ("train.loss_scale={name: dynamic, init: 128.0, factor: 2.0, window: 5}",),
    "average of weights": ("train.ema.decay=0.9",),
    "ledger": ("train.ledger=true",),
    "rates by depth": ("train.lr_decay_by_layer=0.8",),
    "attacked images": ("++train.adversarial={attack: pgd, radius: 0.1, steps: 2}",),
    "TRADES": ("++train.adversarial={attack: trades, norm: l2, radius: 0.5, steps: 2}",),
    "label smoothing": ("train.loss.smoothing=0.1",),
    "ignored label": ("dataset.ignore_index=3",),
    "skipped steps": ("train.on_nan=skip",),
    "sum of losses": ("train.loss.reduction=sum", "train.optimizer.lr=0.0001"),
    "precision O2": ("train.precision=O2",),
    "lookahead": ("train.features=[{name: lookahead, steps: 3}]",),
    "average as teacher": ("train.features=[{name: distill, teacher: ema, decay: 0.9}]",),
    "penalty on input gradients": ("train.features=[gradient_penalty]",),
    "labels of several steps": ("train.features=[{name: accumulate_labels, labels: 50}]",),
    "SWA": ("train.features=[{name: swa, start: 0.25, steps: 3}]",),
    "LAWA": ("train.features=[{name: lawa, count: 2, steps: 3}]",),
    "noise scale": ("train.features=[gradient_noise]", "train.accumulate_steps=2"),
}
OFTEN: Mapping[str, Sequence[str]] = {
    "shampoo": ("train.optimizer.period=3", "train.optimizer.block=8"),
    "soap": ("train.optimizer.period=3",),
}
"""Overrides of optimizers that would compute their matrices once in 12 steps, or never."""
SUM_NORM_GPT = (
    *("model=gpt2", "dataset=text", "optimizer=sgd", "dataset.length=16", *SMALL_GPT),
    *("train.optimizer.lr=0.1", "train.clip.norm=1.0", "schedule=constant"),
)
PRIVATE = (
    *("train.batch_size=96", "model=layers"),
    "model.layers=[{name: conv, features: 3, kernel: 3, stride: 2, bias: true}, relu, flatten,"
    "{name: dense, features: $classes}]",
    "+privacy={noise: 1.0, delta: 1.0e-3, expected_batch_size: 24, accountant: rdp, seed: 5}",
)
QUIET = ("monitor.tensorboard=false", "monitor.sample_images=0")


def list_feature_rows() -> Iterator[Row]:
    """Yield a row for each feature of the step and each optimizer."""
    base = (*TINY, "train.epochs=null", f"train.steps={STEPS}", "eval.every_epochs=null")
    base = (*base, "eval.every_steps=6", "optimizer=adam", "train.optimizer.lr=0.01")
    for name, overrides in FEATURES.items():
        yield Row(name, "lenet5_digits", (*base, *NETWORK, *overrides))
    hardest = (*base, *NETWORK, "train.loss.hardest_share=0.5")
    yield Row("hardest share", "lenet5_digits", hardest, alone=True)
    yield Row("privacy", "lenet5_digits", (*base, *PRIVATE))
    gpt = (*QUIET, *SUM_NORM_GPT, f"train.steps={STEPS}", "train.batch_size=16")
    yield Row("clipped GPT", "gpt_text", (*gpt, "eval.every_steps=6"))
    for file in sorted((ROOT / "conf" / "optimizer").glob("*.yaml")):
        network = SMALL_BATCH_NETWORK if file.stem == "thor" else NETWORK
        chosen = (f"optimizer={file.stem}", *OFTEN.get(file.stem, ()))
        yield Row(f"optimizer {file.stem}", "lenet5_digits", (*base, *network, *chosen))


def list_recipe_rows(folder: Path) -> Iterator[Row]:
    """Yield a row for each shipped recipe; image files are written to `folder`."""
    steps = ("++train.sink_epochs=null", "++train.epochs=null", "train.steps=6")
    for name, source in {**TRAINED, **BUILT, "gan_mnist": "mnist"}.items():
        small = MADE_SMALL.get(name, [])
        if name.startswith(("resnet18", "resnet50")):
            small = ["model.blocks=[1,1]", "model.widths=[4,8]"]
        yield Row(name, name, (*QUIET, *twin(source), *small))
    text = (*QUIET, "model.features=16", "model.hidden=16", "model.heads=2", "model.blocks=1")
    text = (*text, *steps, "train.batch_size=8", "eval.samples=12")
    text = (*text, "train.schedule.warmup_epochs=0.0", "train.schedule.warmup_steps=0")
    for name, overrides in TEXTS.items():
        yield Row(name, name, (*text, *overrides))
    for name, save in OF_FILES.items():
        files = (f"dataset.root={save(folder / name)}", *MADE_SMALL.get(name, []))
        yield Row(name, name, (*QUIET, *files, *steps, "train.batch_size=8"))
    for name in TABLES:
        yield Row(name, name, (*QUIET, *steps, "train.batch_size=32"))
    private = [key for key in twin("mnist") if not key.startswith(("train.batch", "+dataset.tr"))]
    private += ["+dataset.train_size=96", "train.batch_size=48", "train.accumulate_steps=2"]
    # A noise instead of an epsilon, whose noise takes minutes to find for few samples.
    private += ["++privacy.expected_batch_size=12", "privacy.epsilon=null", "++privacy.noise=1.0"]
    yield Row("lenet5_mnist_private", "lenet5_mnist_private", (*QUIET, *private))


def train(row: Row, cell: Cell, run_dir: Path, cache: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Train, and return the metrics, the evaluations and the arrays of the last checkpoint."""
    arguments = [*row.overrides, *cell.list_overrides(), f"cache.root={cache}"]
    if row.recipe == "lenet5_mnist_private" or row.name == "privacy":
        arguments += ["++privacy.seed=5"]
    with redirect_stdout(StringIO()):
        status = run(load_recipe(row.recipe, arguments), run_dir).status
    if status != "done":
        raise AssertionError(f"{row.name}, {cell}: the run is {status}")
    evals = run_dir / "evals.jsonl"
    lines = outcome.read_lines(evals) if evals.exists() else []
    return outcome.metrics(run_dir), lines, dict(read_saved(run_dir).arrays)


def list_differences(one: Any, other: Any) -> list[str]:
    """Return what of two results isn't the same bits: metrics, evaluations, paths of arrays."""
    names = [name for name, i in (("metrics", 0), ("evaluations", 1)) if one[i] != other[i]]
    paths = sorted(one[2].keys() | other[2].keys())
    bits = [
        [np.asarray(result[2][path]).tobytes() if path in result[2] else None for path in paths]
        for result in (one, other)
    ]
    arrays = [path for path, ours, theirs in zip(paths, *bits, strict=True) if ours != theirs]
    return names + arrays


def compare_row(row: Row, cells: Sequence[Cell], folder: Path, cache: Path) -> Iterator[str]:
    """Train a row in cells; yield a text for each cell whose bits differ from its mode's first."""
    for mode, first in FIRST.items():
        if row.alone and mode != "none":
            continue
        mine = [cell for cell in cells if cell.mode == mode]
        expected = train(row, first, folder / str(first), cache)
        for cell in mine:
            if cell == first:
                continue
            differing = list_differences(expected, train(row, cell, folder / str(cell), cache))
            if differing:
                more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
                yield f"{cell}: {', '.join(differing[:4])}{more}"


def main() -> int:
    """Print a line of a table for each row; return 1 if a cell differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.layouts.matrix", description=__doc__)
    parser.add_argument("--all", action="store_true", help="all cells, not a few")
    parser.add_argument("--rows", nargs="*", help="rows by name; by default all")
    options = parser.parse_args()
    cells = EVERY if options.all else DRAWN
    num_wrong = 0
    print(f"| row | of {len(cells)} cells | s |\n| --- | --- | ---: |")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [*list_feature_rows(), *list_recipe_rows(folder / "files")]
        chosen = rows if options.rows is None else [row for row in rows if row.name in options.rows]
        for row in chosen:
            start_s = time.monotonic()
            try:
                differing = list(compare_row(row, cells, folder / row.name, folder / "cache"))
            except Exception as error:  # A row that doesn't run is a line too.
                differing = [f"{type(error).__name__}: {' '.join(str(error).split())}"]
            num_wrong += bool(differing)
            result = "; ".join(differing) if differing else "equal"
            seconds = time.monotonic() - start_s
            print(f"| {row.name} | {result} | {seconds:.0f} |", flush=True)
    print(f"{len(chosen)} rows, {len(cells)} cells, {num_wrong} rows differ")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
