"""Verdicts on slow and healthy runs, and the gain of the advised change.

    python -m tests.verdicts slow            # slow runs, each again with the change
    python -m tests.verdicts healthy [ROOT]  # shipped recipes and networks, with data in ROOT

Each run is profiled as `python -m pipeline profile` does. The achieved gain is the ratio of the
training times of both runs, which run in turn; the fastest round counts.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from pipeline import load_recipe
from pipeline.core.errors import PipelineError
from pipeline.core.files.bounded_read import read_json
from tests.inspect.profiler import slow_components
from tests.whole_run import run

ONLY = [
    *("profile.mode=only", "stages=[data,build,compile,train]", "monitor.tensorboard=false"),
    "monitor.sample_images=0",
]
ROUNDS = 3
DIGITS = ["dataset=digits", "train.epochs=null"]
MLP = [*DIGITS, "model=mlp", "train.steps=2000", "train.batch_size=16"]
LAYERS = [*DIGITS, "model=layers", "train.steps=400", "train.batch_size=32"]
STACK = "[{name: conv, features: 32, kernel: 3}"
END = ",global_avg_pool,{name: dense, features: $classes}]"


@dataclass(frozen=True)
class Case:
    """A slow run, the right verdict, and the keys of the change."""

    name: str
    slow: Sequence[str]
    verdict: str
    fixed: Sequence[str]
    """Overrides of the change; they replace the same keys of the slow run."""
    caches: bool = True
    """Whether runs share a cache of programs; false if compiling them is the slow part."""

    @property
    def fixed_overrides(self) -> list[str]:
        """All overrides of the changed run."""
        keys = {override.partition("=")[0] for override in self.fixed}
        unchanged = [text for text in self.slow if text.partition("=")[0] not in keys]
        return [*unchanged, *self.fixed]


SLOW_READER = [
    *("dataset.name=slow_reader", "dataset.read_ms=0.3", "dataset.root=null", "train.epochs=null"),
    *("model=mlp", "model.hidden=[64]", "train.steps=4000", "train.batch_size=16"),
    *("train.feed=stream", "train.sink_size=50"),
]


# Long enough to hide the compilation of the evaluation beside the first steps.
NEW_SHAPES = [*DIGITS, "model=mlp", "model.hidden=[64]", "train.steps=8000", "train.batch_size=16"]
NEW_SHAPES += ["train.callbacks=[{name: new_shapes}]"]
SAME_SHAPES = ["train.callbacks=[{name: new_shapes, changes: false}]"]

CASES = (
    Case("slow reader", SLOW_READER, "data-bound", ["train.feed=resident"]),
    Case(
        "sinks of one step",
        [*MLP, "model.hidden=[16]", "train.sink_size=1", "train.steps=20000"],
        "dispatch-bound",
        ["train.sink_size=500"],
    ),
    Case(
        "callback",
        [*LAYERS, f"model.layers={STACK},ask_python{END}", "train.sink_size=100"],
        "callback-bound",
        [f"model.layers={STACK},{{name: ask_python, asks: false}}{END}"],
    ),
    Case(
        "shape change",
        [*NEW_SHAPES, "train.sink_size=200"],
        "recompiling",
        SAME_SHAPES,
        caches=False,
    ),
    Case(
        "shape change, four times as often",
        [*NEW_SHAPES, "train.sink_size=50"],
        "recompiling",
        SAME_SHAPES,
        caches=False,
    ),
    Case(
        "bf16 products that convert",
        [*MLP, "model.hidden=[1024,1024]", "train.precision=bf16", "train.batch_size=8"],
        "converting",
        ["train.precision=O0"],
    ),
    Case(
        "elementwise",
        [*LAYERS, f"model.layers={STACK},{{name: gelu_stack}}{END}", "train.sink_size=50"],
        "elementwise-bound",
        [f"model.layers={STACK}{END}"],
    ),
)

CIFAR = ["dataset.name=synthetic", "+dataset.like=cifar10", "profile.steps=20"]
HEALTHY: tuple[tuple[str, Sequence[str]], ...] = (
    ("lenet5_digits", []),
    ("lenet5_digits, batch 128", ["train.batch_size=128"]),
    ("lenet5_digits, adam", ["optimizer=adam"]),
    ("lenet5_digits, without map ops", ["dataset.train.ops=[{name: resize, size: [32, 32]}]"]),
    ("breast_cancer_mlp", []),
    ("diabetes_mlp", []),
    ("bert_docstrings", []),
    ("gpt_text", ["profile.steps=20"]),
    ("unet_digit_masks", ["profile.steps=20"]),
    ("lenet5_mnist", ["dataset.root={root}/mnist"]),
    ("lenet5_mnist_thor", ["dataset.root={root}/mnist"]),
    ("mlp_mnist", ["dataset.root={root}/mnist"]),
    ("mlp_mnist, batch 256", ["dataset.root={root}/mnist", "train.batch_size=256"]),
    ("mlp_mnist, bf16", ["dataset.root={root}/mnist", "train.precision=bf16"]),
    ("mlp_quickstart", ["dataset.root={root}/mnist"]),
    ("resnet20_cifar10", [*CIFAR, "train.batch_size=16"]),
    ("resnet18_cifar10", [*CIFAR, "train.batch_size=8"]),
    ("resnet9_cifar10_speedrun", [*CIFAR, "train.batch_size=8"]),
    ("resnet50_cifar10", [*CIFAR, "train.batch_size=2"]),
    ("lenet5_digits_finetune", ["checkpoint.restore=null"]),
)
"""Recipes and the overrides that they need here."""


def profile_recipe(
    overrides: Sequence[str], recipe: str = "lenet5_digits", *, caches: bool = True
) -> dict[str, Any]:
    """Profile a run and return its profile.json."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        run_dir = Path(folder) / "run"
        cache = [] if caches else [f"cache.root={folder}/cache"]
        run(load_recipe(recipe, [*overrides, *ONLY, *cache]), run_dir)
        return read_json(run_dir / "profile" / "profile.json")


def time_step_ms(overrides: Sequence[str], *, caches: bool) -> float:
    """Train without a profile and return the mean milliseconds of a step."""
    slow_components.forget_programs()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        unprofiled = [text for text in ONLY if not text.startswith("profile.")]
        unprofiled += [] if caches else [f"cache.root={folder}/cache"]
        recipe = load_recipe("lenet5_digits", [*overrides, *unprofiled])
        summary = run(recipe, Path(folder) / "run")
        return 1000 * (summary.time["train_s"] or 0.0) / summary.steps


def judge_slow_runs(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each slow run: verdict, predicted and achieved gain."""
    for case in CASES:
        if names and case.name not in names:
            continue
        profile = profile_recipe(case.slow, caches=case.caches)
        verdict = profile["verdict"]
        right = verdict["name"].partition(",")[0] == case.verdict
        slow_ms = float("inf")
        fixed_ms = float("inf")
        for _ in range(ROUNDS):
            slow_ms = min(slow_ms, time_step_ms(case.slow, caches=case.caches))
            fixed_ms = min(fixed_ms, time_step_ms(case.fixed_overrides, caches=case.caches))
        predicted = verdict["change"]["gain"] if verdict["change"] else float("nan")
        achieved = slow_ms / fixed_ms
        print(f"{case.name}: {verdict['text']}", flush=True)
        yield (
            case.name,
            verdict["name"] if right else f"WRONG: {verdict['name']}",
            f"{profile['profiles'][0]['step_ms']:.3g}",
            f"{slow_ms:.3g}",
            f"{fixed_ms:.3g}",
            f"{predicted:.2f}x",
            f"{achieved:.2f}x",
            f"{predicted / achieved - 1:+.0%}",
        )


def judge_healthy_runs(root: Path | None) -> Iterator[tuple[str, ...]]:
    """Yield a row for each healthy recipe."""
    for name, overrides in HEALTHY:
        if any("{root}" in word for word in overrides) and root is None:
            continue
        filled = [word.replace("{root}", str(root)) for word in overrides]
        try:
            profile = profile_recipe(filled, name.partition(",")[0])
        except PipelineError as error:
            yield name, "not run", str(error).splitlines()[-1]
            continue
        verdict = profile["verdict"]
        coverage = profile["profiles"][0]["coverage"]
        yield (
            name,
            verdict["name"],
            f"{profile['profiles'][0]['step_ms']:.3g}",
            f"{coverage['named']:.1%}",
            f"{coverage['parts_of_step']:.1%}",
            verdict["text"],
        )


def main(arguments: Sequence[str]) -> int:
    """Print a Markdown table."""
    if arguments[:1] == ["slow"]:
        heads = (
            "run",
            "verdict",
            "profiled ms",
            "trained ms",
            "changed",
            "predicted",
            "achieved",
            "off by",
        )
        rows = judge_slow_runs(arguments[1:])
    elif arguments[:1] == ["healthy"]:
        heads = ("recipe", "verdict", "ms", "named", "parts", "text")
        rows = judge_healthy_runs(Path(arguments[1]) if len(arguments) > 1 else None)
    else:
        print(__doc__)
        return 2
    print(f"| {' | '.join(heads)} |\n| {' | '.join('---' for _ in heads)} |", flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
