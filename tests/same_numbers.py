"""Compare two commits: are the numbers of recipes the same, and do old files work with new code?

    python -m tests.same_numbers BASE [--head HEAD] [--rounds 5] [--data ../shared/data]

Checks out both commits beside each other and runs a set of recipes with each. Every metrics.jsonl
must be the same byte for byte, the price of a step on the emulated device the same except for
names, and the newer code must resume a run and use a knowledge bank of the older code. Prints a
line for each check and the ratio of start-up times; the exit status is 1 if something differs.
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
SHORT = ("+recipe=lenet5_digits", "train.steps=132")
TWO_PROCESSES = ("parallel.mode=data", "launch=local", "launch.processes=2")
VECTORIZED = (
    *SHORT, "seed=1,2", "hydra.sweeper.vectorize=true", "monitor.tensorboard=false",
)  # fmt: skip


@dataclass(frozen=True)
class Checkout:
    """A commit in a separate folder, with a separate cache."""

    folder: Path
    work: Path

    def run(self, name: str, *arguments: str, cache: Path | None = None) -> Path:
        """Run the command line in a new directory and return it. Raises RuntimeError."""
        run_dir = self.work / name
        command = [*arguments, *QUIET]
        if not any(argument.startswith("train.resume=") for argument in arguments):
            command.append(f"hydra.run.dir={run_dir}")
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


def iter_runs(data: Path | None, folder: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield names and arguments of the runs whose metrics are compared."""
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


def iter_differences(base: Any, head: Any, path: str = "") -> Iterator[str]:
    """Yield the differences of two JSON trees, with keys that only one of them has."""
    if isinstance(base, dict) and isinstance(head, dict):
        for key in sorted(base.keys() | head.keys()):
            if key not in base or key not in head:
                yield f"{path}.{key}: only in one"
            else:
                yield from iter_differences(base[key], head[key], f"{path}.{key}")
    elif isinstance(base, list) and isinstance(head, list) and len(base) == len(head):
        for i, pair in enumerate(zip(base, head, strict=True)):
            yield from iter_differences(pair[0], pair[1], f"{path}[{i}]")
    elif base != head:
        yield f"{path}: {base!r} and {head!r}"


def read_log(run_dir: Path) -> bytes:
    """Read metrics.jsonl; earlier versions called an epoch a pass."""
    return (run_dir / "metrics.jsonl").read_bytes().replace(b'"pass": ', b'"epoch": ')


def check_metrics(base: Checkout, head: Checkout, data: Path | None) -> Iterator[str | None]:
    """Yield None for a recipe if both commits wrote the same metrics.jsonl, else the difference."""
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, arguments) in enumerate(iter_runs(data, Path(folder))):
            stages = () if name == "lenet5_digits" else (TRAIN_ONLY,)
            logs = [read_log(side.run(f"train{i}", *arguments, *stages)) for side in (base, head)]
            lines = logs[0].count(b"\n")
            print(f"{name}: {lines:,} lines, {'the same' if logs[0] == logs[1] else 'DIFFERENT'}")
            yield None if logs[0] == logs[1] and lines else f"{name}: metrics.jsonl differs"


def check_vectorized(base: Checkout, head: Checkout) -> str | None:
    """Compare the logs of two members of a vectorized sweep."""
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
    differences = list(iter_differences(prices[0], prices[1]))
    print(f"price.json: {f'{len(differences)} differences' if differences else 'the same'}")
    for line in differences[:20]:
        print(f"    {line}")
    numbers = [line for line in differences if not line.endswith("only in one") and "'" not in line]
    return f"price.json: {numbers[0]}" if numbers else None


def check_old_files(base: Checkout, head: Checkout) -> Iterator[str | None]:
    """Resume a run of the base commit with the head, and use a knowledge bank of the base."""
    saving = ("stages=[data,build,compile,train,checkpoint]", "schedule=constant")
    whole = base.run("whole", *SHORT, *saving) / "metrics.jsonl"
    part = base.run("part", *SHORT, *saving, "train.steps=88")
    yield check_resume(head, part, whole, (*SHORT, *saving))
    cache = base.work / "bank"
    small = (*SHORT, TRAIN_ONLY, "train.batch_size=16")
    tuned = base.run("tuned", *small, "autotune=tune", cache=cache)
    used = head.run("used", *small, cache=cache)
    files = [run_dir / "lowerings.json" for run_dir in (tuned, used)]
    lowerings = [json.loads(file.read_text()) for file in files]
    differences = list(iter_differences(lowerings[0], lowerings[1]))
    print(f"a knowledge bank of the base: {differences[:3] or 'the same lowerings'}")
    yield "other lowerings with a knowledge bank of the base" if differences else None


def check_resume(head: Checkout, part: Path, whole: Path, arguments: Sequence[str]) -> str | None:
    """Resume a run of the base with the head, and compare its log with that of a whole run.

    If the layout of checkpoints has changed, the head refuses to, and must restore the weights.
    """
    try:
        head.run("part", *arguments, f"train.resume={part}")
    except RuntimeError as error:
        if "was saved by an earlier version" not in str(error):
            raise
        head.run("restored", *arguments, f"checkpoint.restore={part}")
        print("a checkpoint of the base: refused to be resumed, by its message; weights restored")
        return None
    same = (part / "metrics.jsonl").read_bytes() == whole.read_bytes()
    print(f"a checkpoint of the base, resumed: {'the same' if same else 'DIFFERENT'}")
    return None if same else "a run of the base that is resumed has other metrics"


def time_starts(base: Checkout, head: Checkout, rounds: int) -> None:
    """Print the time to train one step with cached programs, in alternating runs."""
    seconds: dict[Path, list[float]] = {base.folder: [], head.folder: []}
    for number in range(rounds + 1):
        for side in (base, head):
            start_s = time.perf_counter()
            side.run(f"start{number}", "+recipe=lenet5_digits", "train.steps=1", TRAIN_ONLY)
            if number:
                seconds[side.folder].append(time.perf_counter() - start_s)
    old, new = (statistics.median(seconds[side.folder]) for side in (base, head))
    pairs = zip(seconds[head.folder], seconds[base.folder], strict=True)
    ratios = [head_s / base_s for head_s, base_s in pairs]
    print(
        f"start-up: base {old:.2f} s, head {new:.2f} s; head over base, by rounds: median "
        f"{statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}, n={rounds}"
    )


@contextmanager
def check_out(commit: str, folder: Path) -> Iterator[Path]:
    """Add a worktree of a commit, and remove it afterwards."""
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
        check_out(options.base, Path(temporary) / "base") as old,
        check_out(options.head, Path(temporary) / "head") as new,
    ):
        base = Checkout(old, Path(temporary) / "work_base")
        head = Checkout(new, Path(temporary) / "work_head")
        results = [
            *check_metrics(base, head, data),
            check_vectorized(base, head),
            check_price(base, head),
            *check_old_files(base, head),
        ]
        time_starts(base, head, options.rounds)
    problems = [problem for problem in results if problem is not None]
    print("\n".join(problems) if problems else f"{len(results)} comparisons: nothing differs")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
