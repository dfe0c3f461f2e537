"""The input pipeline alone, here and in PyTorch's DataLoader, side by side.

    python -m benchmarks.data --peers torch --root DIR

CIFAR-10 from memory, in random order: crop with a padding of 4, flip, normalise to float32. Every
pipeline has a process of its own and its rounds in turn. Ours runs as it does inside a training
step, either from the split on the device or streamed in windows; the DataLoader maps sample by
sample in worker processes. The pixels of all must have the same mean and deviation.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.child import child_process, names_among
from benchmarks.loading import Loaded, Work
from benchmarks.measure import add_save, alternate, heading, publish, table, usable_cores
from pipeline import load_recipe
from pipeline.config.cache import cache_root
from pipeline.core.errors import PipelineError

PACKAGES = ("jax", "jaxlib", "grain", "torch", "torchvision", "pillow", "numpy")
WARM_UP_BATCHES = 20
TOLERANCE = 0.1
"""How far means and deviations over the warm-up may be apart together. The mean of a batch of 128
scatters by 0.05, that of 20 batches by 0.01."""


@dataclass(frozen=True)
class Contestant:
    """A module of `benchmarks.loading`, its way, and what must be installed."""

    module: str
    way: str
    packages: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """The packages that are not installed."""
        return tuple(name for name in self.packages if find_spec(name) is None)


OURS = {
    "ours, resident, inside the step": Contestant("ours", "resident"),
    "ours, streamed, then inside the step": Contestant("ours", "stream"),
}
PEERS = {
    "torch": {
        "torch DataLoader, torchvision transforms": Contestant(
            "torch_loader", "torchvision", ("torch", "torchvision")
        ),
        "torch DataLoader, the same steps on PIL images": Contestant(
            "torch_loader", "pil", ("torch",)
        ),
        "torch DataLoader, NumPy slices by hand": Contestant("torch_loader", "numpy", ("torch",)),
    }
}


def main() -> int:
    """Compare, print a Markdown table, and save it where asked to."""
    args = _arguments()
    contestants = dict(OURS)
    for peer in args.peers:
        contestants |= PEERS[peer]
    with tempfile.TemporaryDirectory() as folder:
        try:
            work = Work(_arrays(Path(folder), args.root), args.batch_size, "", args.workers)
            rates, absent = compare(contestants, work, args.rounds, args.round_s)
        except (PipelineError, LoaderError) as error:
            print(f"benchmarks.data: {error}", file=sys.stderr)
            return 1
    publish(report(rates, absent, work, args.rounds), args.save)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=names_among(PEERS), default=[], help=",".join(PEERS))
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2, help="of a DataLoader")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-s", type=float, default=2.0, help="seconds a round, about")
    parser.add_argument("--root", help="dataset.root; default: download the data")
    add_save(parser, "data.md")
    return parser.parse_args()


def _arrays(folder: Path, root: str | None) -> Path:
    """CIFAR-10's training split as an .npz that any process reads at once."""
    recipe = load_recipe("resnet18_cifar10", [f"dataset.root={root}"] if root else [])
    split = recipe.dataset.read(cache_root(recipe.cache)).train
    path = folder / "cifar10.npz"
    np.savez(path, images=split.columns["image"][:], labels=split.columns["label"][:])
    return path


class LoaderError(Exception):
    """A pipeline failed, or loads something else; the text says which and how."""


def compare(
    contestants: Mapping[str, Contestant], work: Work, rounds: int, round_s: float
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return images a second by round of all that are installed, and why others are absent.

    Raises LoaderError if a loader fails or loads something else.
    """
    turns = {}
    absent = {}
    proof = None
    with ExitStack() as stack:
        for name, contestant in contestants.items():
            if contestant.missing:
                absent[name] = f"not installed: {', '.join(contestant.missing)}"
                continue
            loader = stack.enter_context(
                _start_loader(name, contestant, replace(work, way=contestant.way), round_s)
            )
            loaded = loader.warm_up()
            proof = proof or loaded
            if abs(loaded.mean - proof.mean) + abs(loaded.std - proof.std) > TOLERANCE:
                raise LoaderError(f"{name} loads something else: {loaded} where ours has {proof}")
            turns[name] = loader.images_per_s
        return alternate(turns, rounds), absent


class LoaderProcess:
    """The parent's end of a pipeline's process."""

    def __init__(self, name: str, pipe: Connection, work: Work) -> None:
        self._name = name
        self._pipe = pipe
        self._work = work

    def warm_up(self) -> Loaded:
        """Load a few batches, and settle how many a round has."""
        return self._ask("warm up")

    def images_per_s(self) -> float:
        """Run a round."""
        loaded, seconds = self._ask("round")
        return loaded.batches * self._work.batch_size / seconds

    def _ask(self, request: str) -> Any:
        self._pipe.send(request)
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise LoaderError(f"{self._name}: its process ended") from None
        if isinstance(answer, str):
            raise LoaderError(f"{self._name}: {answer}")
        return answer


@contextmanager
def _start_loader(
    name: str, contestant: Contestant, work: Work, round_s: float
) -> Iterator[LoaderProcess]:
    """Start a pipeline in a process that ends with the context."""
    # No daemon: a DataLoader starts processes.
    child = child_process(_serve, contestant.module, work, round_s, daemon=False)
    with child as (_, pipe):
        yield LoaderProcess(name, pipe, work)


def _serve(pipe: Connection, module: str, work: Work, round_s: float) -> None:
    """The child's end: answer requests until the pipe is closed."""
    loader = None
    batches = 0
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            if loader is None:
                loader = importlib.import_module(f"benchmarks.loading.{module}").open_loader(work)
            if request == "warm up":
                answer: Any = _mean(loader.load(1) for _ in range(WARM_UP_BATCHES))
                started_at = time.perf_counter()
                loader.load(WARM_UP_BATCHES)
                batches = int(round_s * WARM_UP_BATCHES / (time.perf_counter() - started_at)) + 1
            else:
                started_at = time.perf_counter()
                answer = loader.load(batches), time.perf_counter() - started_at
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pipe.send(answer)


def _mean(loaded: Iterable[Loaded]) -> Loaded:
    """Means over batches that were loaded one by one."""
    batches, means, deviations = zip(*loaded, strict=True)
    return Loaded(sum(batches), statistics.mean(means), statistics.mean(deviations))


def report(
    rates: Mapping[str, list[float]], absent: Mapping[str, str], work: Work, rounds: int
) -> str:
    """Markdown: the table, the machine and the versions."""
    ours = statistics.median(next(iter(rates.values())))
    rows = [
        [
            name,
            f"{statistics.median(speeds):,.0f}",
            f"{min(speeds):,.0f} to {max(speeds):,.0f}",
            f"{1e6 / statistics.median(speeds):.2f}",
            f"{ours / statistics.median(speeds):.1f}x",
        ]
        for name, speeds in rates.items()
    ]
    rows += [[name, why, "", "", ""] for name, why in absent.items()]
    header = ("pipeline", "images/s, median", "min to max", "us an image", "ours is faster by")
    title = f"Input pipeline: CIFAR-10, crop, flip, normalise, batch {work.batch_size}"
    command = (
        f"python -m benchmarks.data --workers {work.workers} --batch-size "
        f"{work.batch_size} --rounds {rounds}{' --peers torch' if len(rates) > 2 else ''}"
    )
    return "\n".join(
        (
            heading(title, command, PACKAGES),
            f"{rounds} rounds, alternating; DataLoader with {work.workers} workers on "
            f"{usable_cores()} cores; faster: the first row against each.\n",
            table(header, rows),
        )
    )


if __name__ == "__main__":
    sys.exit(main())
