"""Planted bugs that `python -m pipeline test --against` finds, and its false alarms.

    python -m benchmarks.planted_bugs --bugs 60 --clean 300 --seed 2 --save

Side B trains a small network on the shipped digits. In side A a bug is planted, drawn by the seed,
and the same scaling of images is another map op, rounded otherwise, so bits seldom agree. The bug
is found if an expectation isn't met. A clean side A has a drawn change that should be harmless:
the other op, which alone needs pairs, or another sink size, feed, size of evaluation batches, or
events in between. There an expectation that isn't met is a false alarm. Runs are those of this
process: single ones by `pipeline.run`, pairs by one program for each side, as in a sweep with
`hydra.sweeper.vectorize=true`. The command trains as many runs, in processes of a few runs each.
With `--minutes`, no test begins later; with `--first`, the clean sides before that number are left
out, which another command has judged.
"""

from __future__ import annotations

import argparse
import io
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.forks import run_quietly
from benchmarks.measure import add_save, heading, publish, table
from pipeline import load_recipe, run
from pipeline.stages.data import read_selected
from pipeline.study.expect import judge
from pipeline.study.expect.expectations import RecipeTest, parse_expectations
from pipeline.study.expect.sides import CodeSide
from pipeline.training import step

PACKAGES = ("jax", "jaxlib")
SECTION = {"loss@60": "recorded", "loss": "recorded"}
"""Expectations: the training loss up to step 60, and the loss of the evaluation."""
OTHER_OP = "another op for the scaling of images"
OPS = {
    "normalize": "{name: normalize, mean: [%s], std: [6.0]}",
    "rescale": "{name: rescale, factor: %s, shift: %s}",
    "crop": "{name: random_crop, size: [8, 8], padding: [1, 1, 1, 1]}",
}
LAYERS = (
    "[flatten,{name: dense, features: 32},relu,{name: dropout, rate: %s},"
    "{name: dense, features: '$classes'}]"
)


@dataclass(frozen=True)
class Setting:
    """What a bug may change in the recipe of side A."""

    rate: float = 0.003
    decay: float = 0.1
    beta: float = 0.9
    mean: float = 4.9
    eval_mean: float = 4.9
    crops: bool = True
    dropout: float = 0.2
    batch_size: int = 32
    shuffles: bool = True
    schedule: str = "cosine"
    smoothing: float = 0.0
    file: str = "digits"

    def list_keys(self, folder: Path, *, rescales: bool = False) -> list[str]:
        """Return the keys of the recipe; `folder` has the data.

        With `rescales`, images are scaled by the op whose results are rounded otherwise.
        """
        scales = [
            OPS["rescale"] % (1 / 6.0, -mean / 6.0) if rescales else OPS["normalize"] % mean
            for mean in (self.mean, self.eval_mean)
        ]
        train_ops = [scales[0], *([OPS["crop"]] if self.crops else [])]
        return [
            "dataset=numpy",
            f"dataset.root={folder / self.file}.npz",
            f"dataset.train.ops=[{','.join(train_ops)}]",
            f"dataset.eval.ops=[{scales[1]}]",
            f"dataset.train.shuffle={str(self.shuffles).lower()}",
            "model=layers",
            f"model.layers={LAYERS % self.dropout}",
            "optimizer=adamw",
            f"train.optimizer.lr={self.rate}",
            f"train.optimizer.weight_decay={self.decay}",
            f"train.optimizer.b1={self.beta}",
            f"schedule={self.schedule}",
            f"train.loss.smoothing={self.smoothing}",
            f"train.batch_size={self.batch_size}",
            "train.steps=120",
            "stages=[data,build,compile,train,eval]",
            "monitor.tensorboard=false",
            "monitor.sample_images=0",
        ]


@dataclass(frozen=True)
class Bug:
    """A planted bug: another setting, or a change of the code during the runs of side A."""

    name: str
    setting: Setting = Setting()
    plant: Callable[[], AbstractContextManager[Any]] = nullcontext


def _evaluate_with_dropout() -> AbstractContextManager[Any]:
    """Evaluate as in training, with one draw of dropout."""
    import jax

    def predict(config: Any, variables: Any, batch: Any) -> Any:
        inputs, labels = step.map_batch(config, config.eval_ops, batch)
        rngs = {"dropout": jax.random.key(0)}
        network = partial(config.network.apply, train=True, rngs=rngs)
        return config.apply_lowerings(network)(variables, inputs), labels

    return mock.patch.object(step, "predict", predict)


def draw_bug(rng: np.random.Generator) -> Bug:
    """Return one of the kinds of bugs, with a size."""
    up = rng.choice((0.95, 1.05))
    kinds = (
        Bug(f"rate times {up}", Setting(rate=0.003 * up)),
        Bug("decay missing", Setting(decay=0.0)),
        Bug(f"decay times {up**6:.2f}", Setting(decay=0.1 * up**6)),
        Bug("dropout while evaluating", plant=_evaluate_with_dropout),
        Bug("no dropout", Setting(dropout=0.0)),
        Bug(f"dropout {0.2 * up**4:.2f}", Setting(dropout=round(0.2 * up**4, 3))),
        Bug("1 of 20 labels shifted", Setting(file="shifted")),
        Bug("augmentation off", Setting(crops=False)),
        Bug(f"wrong mean, {4.9 * up**4:.1f}", Setting(mean=4.9 * up**4, eval_mean=4.9 * up**4)),
        Bug(f"evaluation's mean {4.9 * up**4:.1f}", Setting(eval_mean=4.9 * up**4)),
        Bug("samples in file order", Setting(shuffles=False)),
        Bug(f"beta1 {0.9 * up**0.6:.2f}", Setting(beta=round(0.9 * up**0.6, 3))),
        Bug("constant rate", Setting(schedule="constant")),
        Bug("label smoothing 0.02", Setting(smoothing=0.02)),
        Bug(f"batch of {round(32 * up / 2) * 2}", Setting(batch_size=round(32 * up / 2) * 2)),
    )
    return kinds[int(rng.integers(len(kinds)))]


def draw_harmless_keys(rng: np.random.Generator) -> tuple[str, tuple[str, ...]]:
    """Return a change that should change no figure beyond rounding, and its keys."""
    kinds: tuple[tuple[str, tuple[str, ...]], ...] = (
        (OTHER_OP, ()),
        ("other sinks", (f"train.sink_size={rng.integers(1, 60)}",)),
        ("streamed samples", ("train.feed=stream",)),
        ("smaller evaluation batches", (f"dataset.eval.batch_size={rng.integers(16, 200)}",)),
        ("events", (f"eval.every_steps={rng.integers(7, 60)}", "checkpoint.every_steps=31")),
    )
    return kinds[int(rng.integers(len(kinds)))]


@dataclass(frozen=True)
class LocalSide(CodeSide):
    """A side whose runs are in this process."""

    keys: tuple[str, ...]
    plant: Callable[[], AbstractContextManager[Any]]

    def train(self, name: str, keys: Sequence[str], run_dir: Path) -> None:
        recipe = load_recipe(name, [*self.keys, *_select_length(keys)])
        silence = io.StringIO()
        with self.plant(), redirect_stdout(silence), redirect_stderr(silence):
            assert run(recipe, run_dir).status == "done"

    def train_seeds(
        self, name: str, keys: Sequence[str], seeds: Sequence[int], folder: Path
    ) -> dict[int, Path]:
        own_keys = [key for key in self.keys if not key.startswith("seed=")]
        seed = f"seed={','.join(map(str, seeds))}"
        sweep = (f"hydra.sweep.dir={folder}", "hydra.sweeper.vectorize=true")
        with self.plant():
            run_quietly("-m", f"+recipe={name}", *own_keys, *_select_length(keys), seed, *sweep)
        return {seed: folder / str(number) for number, seed in enumerate(seeds)}


def _select_length(keys: Sequence[str]) -> list[str]:
    return [key for key in keys if key.startswith(("train.end_step", "stages"))]


def write_data(folder: Path) -> None:
    """Write the shipped digits, and a copy in which a label of 20 is one too high."""
    raw = read_selected(load_recipe("lenet5_digits"))
    arrays: dict[str, Any] = {
        f"{letter}_{name}": np.asarray(split.columns[column])
        for name, split in (("train", raw.train), ("test", raw.eval))
        for letter, column in (("x", "image"), ("y", "label"))
    }
    np.savez(folder / "digits.npz", **arrays)
    labels = arrays["y_train"].copy()
    labels[::20] = (labels[::20] + 1) % 10
    np.savez(folder / "shifted.npz", **{**arrays, "y_train": labels})


def judge_side(
    folder: Path, seed: int, keys: Sequence[str], bug: Bug | None = None
) -> tuple[bool, str, float]:
    """Return whether an expectation isn't met, the figures, and the seconds of the test.

    `keys` are side A's, without the seed.
    """
    first = f"seed={1000 * (seed + 1)}"
    shared = (*Setting().list_keys(folder), first)
    reference = LocalSide("B", Path(), Path(), shared, nullcontext)
    plant = bug.plant if bug else nullcontext
    ours = LocalSide("A", Path(), Path(), (*keys, first), plant)
    recipe = load_recipe("lenet5_digits", shared)
    tested = RecipeTest("lenet5_digits", folder / "x.yaml", recipe, parse_expectations(SECTION))
    begun = time.perf_counter()
    with mock.patch.object(judge, "make_here", return_value=ours):
        outcomes = judge.judge_recipe(tested, reference, most_pairs=16)
    figures = "; ".join(f"{item.expectation.partition(':')[0]} {item.figure}" for item in outcomes)
    return any(item.verdict == "not met" for item in outcomes), figures, time.perf_counter() - begun


@dataclass
class Counts:
    """What is found so far, by kind, and the seconds of each test."""

    tests: Counter[str] = field(default_factory=Counter)
    not_met: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def add(self, kind: str, is_not_met: bool, seconds: float) -> None:
        """Count a test."""
        self.tests[kind] += 1
        self.not_met[kind] += is_not_met
        self.seconds.append(seconds)

    def __str__(self) -> str:
        return f"{self.not_met.total()} of {self.tests.total()}"


def judge_bugs(folder: Path, count: int, seed: int, end: float) -> tuple[Counts, list[list[str]]]:
    """Return the counts and a row of the table for each planted bug, until the time `end`."""
    counts = Counts()
    rows: list[list[str]] = []
    for number in range(count):
        if time.perf_counter() > end:
            break
        bug = draw_bug(np.random.default_rng((seed, number)))
        keys = bug.setting.list_keys(folder, rescales=True)
        is_found, figures, seconds = judge_side(folder, 1000 * seed + number, keys, bug)
        counts.add(bug.name, is_found, seconds)
        rows.append([bug.name, "found" if is_found else "missed", figures])
        print(*rows[-1], f"{seconds:.0f} s", sep=" | ", flush=True)
    return counts, rows


def judge_clean_sides(folder: Path, numbers: Sequence[int], seed: int, end: float) -> Counts:
    """Return the counts of clean sides by their harmless change, until the time `end`."""
    counts = Counts()
    for number in numbers:
        if time.perf_counter() > end:
            break
        kind, changed = draw_harmless_keys(np.random.default_rng((seed, 1, number)))
        keys = (*Setting().list_keys(folder, rescales=kind == OTHER_OP), *changed)
        is_alarm, figures, seconds = judge_side(folder, 1000 * seed + 500 + number, keys)
        counts.add(kind, is_alarm, seconds)
        print(kind, "false alarm" if is_alarm else "met", figures, sep=" | ", flush=True)
    return counts


def _describe_bugs(bugs: Counts) -> str:
    times = bugs.seconds or [0.0]
    text = f"took {np.median(times):.0f} s (median), at most {max(times):.0f} s."
    return f"Found: {bugs} bugs. A test with a bug {text}"


def main() -> None:
    """Plant bugs, count what is found and what is a false alarm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bugs", type=int, default=60)
    parser.add_argument("--clean", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first of the clean sides")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf)
    add_save(parser, "planted_bugs.md")
    options = parser.parse_args()
    end = time.perf_counter() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_data(folder)
        bugs, rows = judge_bugs(folder, options.bugs, options.seed, end)
        numbers = range(options.first, options.clean)
        clean = judge_clean_sides(folder, numbers, options.seed, end)
    command = f"python -m benchmarks.planted_bugs --bugs {options.bugs} --clean {options.clean}"
    command += f" --first {options.first}" if options.first else ""
    alarms = f"False alarms: {clean} clean sides."
    parts = [
        heading("Planted bugs", f"{command} --seed {options.seed}", PACKAGES),
        f"{_describe_bugs(bugs)} {alarms}\n" if options.bugs else f"{alarms}\n",
        table(
            ["harmless change", "clean sides", "false alarms"],
            [[kind, str(n), str(clean.not_met[kind])] for kind, n in sorted(clean.tests.items())],
        ),
    ]
    if rows:
        parts += ["", table(["bug", "", "figures"], rows)]
    publish("\n".join(parts), options.save)


if __name__ == "__main__":
    main()
