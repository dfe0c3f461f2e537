"""Compare two commits: do the same recipes give the same numbers, and old files work with new code?

    python -m tests.same_numbers BASE [--head HEAD] [--rounds 5] [--data ../shared/data]

Checks both commits out beside each other and runs a set of recipes with each. Every metrics.jsonl
must be the same byte for byte, the price of a step on the emulated device the same but for names,
and the newer code must resume a run and use a knowledge bank of the older. Prints one line a check
and the ratio of start-up times; the exit status is 1 where something differs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
QUIET = ("monitor.tensorboard=false", "monitor.sample_images=0")
TRAIN_ONLY = "stages=[data,build,compile,train]"
SHORT = "+recipe=lenet5_digits", "train.passes=3"
TWO_PROCESSES = "parallel.mode=data", "launch=local", "launch.processes=2"
VECTORIZED = (
    *SHORT, "seed=1,2", "hydra.sweeper.vectorize=true", "monitor.tensorboard=false",
)  # fmt: skip


@dataclass(frozen=True)
class Checkout:
    """A commit in a folder of its own, with a cache of its own."""

    folder: Path
    work: Path

    def run(self, name: str, *arguments: str, cache: Path | None = None) -> Path:
        """Run the command line in a new directory and return it. Raises RuntimeError."""
        run_dir = self.work / name
        named = [] if any(a.startswith("train.resume=") for a in arguments) else [run_dir]
        command = [*arguments, *QUIET, *(f"hydra.run.dir={folder}" for folder in named)]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "XDG_CACHE_HOME": str(cache or self.work / "cache"),
        }
        self.work.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", *command],
            cwd=self.work,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{self.folder.name}: {name}: {done.stderr.strip()[-2000:]}")
        return run_dir


def trained(data: Path | None, folder: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names and arguments of the runs whose metrics are compared."""
    yield "lenet5_digits", ("+recipe=lenet5_digits",)
    yield "lenet5_digits, O2", (*SHORT, "train.precision=O2")
    yield "lenet5_digits, THOR", (*SHORT, "optimizer=thor", "train.optimizer.lr=0.01")
    yield "lenet5_digits, streamed", (*SHORT, "train.feed=stream")
    yield "lenet5_digits, two processes", (*SHORT, *TWO_PROCESSES)
    if data is None:
        return
    mnist = f"dataset.root={data / 'mnist'}"
    yield "lenet5_mnist, 1,000 steps", ("+recipe=lenet5_mnist", mnist, "train.steps=1000")
    yield "mlp_mnist, 500 steps", ("+recipe=mlp_mnist", mnist, "train.steps=500")
    with tarfile.open(data / "cifar10" / "cifar-10-binary.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    cifar = f"dataset.root={folder}"
    yield "resnet20_cifar10, 8 steps", ("+recipe=resnet20_cifar10", cifar, "train.steps=8")


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Places where two trees of JSON differ, keys that only one has among them."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            if key not in one or key not in other:
                yield f"{where}.{key}: only in one"
            else:
                yield from differences(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from differences(a, b, f"{where}[{i}]")
    elif one != other:
        yield f"{where}: {one!r} and {other!r}"


def check_metrics(base: Checkout, head: Checkout, data: Path | None) -> Iterator[str | None]:
    """Yield for every recipe None where both wrote the same metrics.jsonl, else what differs."""
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, arguments) in enumerate(trained(data, Path(folder))):
            only = () if name == "lenet5_digits" else (TRAIN_ONLY,)
            logs = [
                (side.run(f"train{i}", *arguments, *only) / "metrics.jsonl").read_bytes()
                for side in (base, head)
            ]
            lines = logs[0].count(b"\n")
            print(f"{name}: {lines:,} lines, {'the same' if logs[0] == logs[1] else 'DIFFERENT'}")
            yield None if logs[0] == logs[1] and lines else f"{name}: metrics.jsonl differs"


def check_vectorized(base: Checkout, head: Checkout) -> str | None:
    """Compare the logs of two members of a sweep that one program trains."""
    logs = []
    for side in (base, head):
        folder = side.work / "sweep"
        side.run("swept", "-m", *VECTORIZED, TRAIN_ONLY, f"hydra.sweep.dir={folder}")
        logs.append([file.read_bytes() for file in sorted(folder.rglob("metrics.jsonl"))])
    same = logs[0] == logs[1] and len(logs[0]) == 2
    print(f"two members of a vectorized sweep: {'the same' if same else 'DIFFERENT'}")
    return None if same else "vectorized: metrics.jsonl differs"


def check_price(base: Checkout, head: Checkout) -> str | None:
    """Compare the price of ResNet-50 on 8 emulated devices."""
    arguments = (
        "+recipe=resnet50_cifar10",
        "dataset.name=synthetic",
        "+dataset.like=cifar10",
        "device=ascend910",
        "parallel.mode=data",
        "parallel.devices=8",
        "parallel.batch_per_device=32",
        "stages=[data,build,compile]",
    )
    prices = [
        json.loads((side.run("price", *arguments) / "price.json").read_text())
        for side in (base, head)
    ]
    found = list(differences(*prices))
    print(f"price.json: {'the same' if not found else f'{len(found)} differences'}")
    for line in found[:20]:
        print(f"    {line}")
    numbers = [line for line in found if not line.endswith("only in one") and "'" not in line]
    return f"price.json: {numbers[0]}" if numbers else None


def check_old_files(base: Checkout, head: Checkout) -> Iterator[str | None]:
    """Resume a run of the base commit, and use a knowledge bank that it filled, with the head."""
    saving = "stages=[data,build,compile,train,checkpoint]", "schedule=constant"
    whole = base.run("whole", *SHORT, *saving) / "metrics.jsonl"
    part = base.run("part", *SHORT, *saving, "train.passes=2")
    head.run("part", *SHORT, *saving, f"train.resume={part}")
    same = (part / "metrics.jsonl").read_bytes() == whole.read_bytes()
    print(f"a checkpoint of the base, resumed: {'the same' if same else 'DIFFERENT'}")
    yield None if same else "a run of the base that is resumed has other metrics"
    cache, small = base.work / "bank", (*SHORT, TRAIN_ONLY, "train.batch_size=16")
    tuned = base.run("tuned", *small, "autotune=tune", cache=cache)
    used = head.run("used", *small, cache=cache)
    one, other = (json.loads((d / "lowerings.json").read_text()) for d in (tuned, used))
    found = list(differences(one, other))
    print(f"a knowledge bank of the base: {'the same lowerings' if not found else found[:3]}")
    yield None if not found else "a knowledge bank of the base gives other lowerings"


def start_ups(base: Checkout, head: Checkout, rounds: int) -> None:
    """Print how long both take to train one step, in alternating runs, programs being cached."""
    seconds: dict[Path, list[float]] = {base.folder: [], head.folder: []}
    for number in range(rounds + 1):
        for side in (base, head):
            begun = time.perf_counter()
            side.run(f"start{number}", "+recipe=lenet5_digits", "train.steps=1", TRAIN_ONLY)
            if number:
                seconds[side.folder].append(time.perf_counter() - begun)
    old, new = (statistics.median(seconds[side.folder]) for side in (base, head))
    ratios = [a / b for a, b in zip(seconds[head.folder], seconds[base.folder], strict=True)]
    print(
        f"start-up: base {old:.2f} s, head {new:.2f} s; head over base, by rounds: median "
        f"{statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}, n={rounds}"
    )


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """A worktree of a commit, removed afterwards."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all comparisons and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.same_numbers")
    parser.add_argument("base")
    parser.add_argument("--head", default="HEAD")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    options = parser.parse_args(arguments)
    data = options.data.resolve() if options.data.is_dir() else None
    if data is None:
        print(f"{options.data}: is not there; recipes of MNIST and CIFAR-10 are left out")
    with (
        tempfile.TemporaryDirectory() as temporary,
        checked_out(options.base, Path(temporary) / "base") as old,
        checked_out(options.head, Path(temporary) / "head") as new,
    ):
        base = Checkout(old, Path(temporary) / "work_base")
        head = Checkout(new, Path(temporary) / "work_head")
        found = [
            *check_metrics(base, head, data),
            check_vectorized(base, head),
            check_price(base, head),
            *check_old_files(base, head),
        ]
        start_ups(base, head, options.rounds)
    problems = [problem for problem in found if problem is not None]
    print("\n".join(problems) if problems else f"{len(found)} comparisons: nothing differs")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
