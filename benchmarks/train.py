"""The same training here and in what one would use instead, side by side.

    python -m benchmarks.train --task lenet5 --peers torch,torch_compile,keras,mindspore,jax_loop

Every contestant trains the same network from the same initial weights with the same batches of real
data, optimizer, batch size and precision, on all cores, in a process of its own; they have their
rounds in turn. Before anything is timed, the sizes of their parameters must be equal and their
first losses must agree, so a row that appears in the table is known to train the same thing.

What is timed: ours is the whole training stage, with sampling, gathering from uint8, normalising
and all telemetry of every step written. The peers find normalised float32 batches in memory, and
write and print nothing. Nobody augments, resizes or evaluates, compiling is done beforehand, and a
round begins behind a step that is not timed; LeNet-5 is given MNIST at 32x32, ResNet-50 512 images
of CIFAR-10 at 224x224, both resized before.
What each peer does in a step stands in its module under `benchmarks/peers`.

The peers come with `pip install '.[bench]'`; where there is no GPU, install the CPU build of torch
before, or pip fetches CUDA with it. Those that are not installed are left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child import names_among
from benchmarks.contestant import ContestantError, Ready, Round, started
from benchmarks.measure import RESULTS, add_save, alternate, heading, publish, table, usable_cores
from benchmarks.peers import PEERS
from benchmarks.tasks import PRECISIONS, TASKS, Task, make_task
from pipeline.core.errors import PipelineError

OURS = "ours"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "keras", "mindspore", "numpy")
QUIET_LOAD = 0.5
FIRST = 0.002
"""How far apart the losses of the first step may be, relatively."""
LATER = {"float32": 0.02, "bf16": 0.05}
"""The same of the next two steps, as frameworks sum in other orders."""


@dataclass(frozen=True)
class Comparison:
    """What came out: warm contestants, their rounds, and why others have none."""

    task: Task
    ready: Mapping[str, Ready]
    rounds: Mapping[str, list[Round]]
    absent: Mapping[str, str]
    load: float
    """The load average of the machine before anything ran: what others were doing."""


def main() -> int:
    """Compare, print a Markdown table, and save it where asked to."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        try:
            task = make_task(
                args.task,
                Path(folder),
                root=args.root,
                batch_size=args.batch_size,
                precision=args.precision,
                sink_size=args.sink_size,
                threads=usable_cores(),
                overrides=tuple(args.override),
            )
            comparison = compare(task, args.peers, args.rounds, args.round_s)
        except (PipelineError, ContestantError) as error:
            print(f"benchmarks.train: {error}", file=sys.stderr)
            return error.exit_status if isinstance(error, PipelineError) else 1
    save = RESULTS / _file_name(task) if args.save == RESULTS else args.save
    publish(report(comparison, f"python -m benchmarks.train {' '.join(_said(args))}"), save)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--peers", type=names_among(PEERS), default=[], help=",".join(PEERS))
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--batch-size", type=int, help="default: the recipe's")
    parser.add_argument("--sink-size", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-s", type=float, default=3.0, help="seconds a round, about")
    parser.add_argument("--root", type=Path, help="dataset.root; default: download the data")
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for our recipe; layers and optimizer, also the peers'",
    )
    add_save(parser, "")
    return parser.parse_args()


def compare(task: Task, peers: list[str], rounds: int, round_s: float) -> Comparison:
    """Start ours and the peers, see that they train the same, and let them have their rounds.

    A peer that is not installed or fails is absent, and why is said. Raises ContestantError where
    ours fails, or a peer turns out to train something else.
    """
    ready: dict[str, Ready] = {}
    turns: dict[str, Callable[[], Round]] = {}
    absent: dict[str, str] = {}
    load = _say_load()
    with ExitStack() as stack:
        for name in (OURS, *peers):
            try:
                contestant = stack.enter_context(started(_module(name), task, round_s))
                ready[name] = contestant.warm_up()
            except ContestantError as error:
                if name == OURS:
                    raise
                absent[name] = str(error)
                print(f"{name}: {error}", file=sys.stderr)
                continue
            print(f"{name}: ready after {ready[name].start_s:.0f} s", file=sys.stderr)
            later = max(LATER[task.precision], task.spec.padded_apart)
            _check_same(name, ready[name], ready[OURS], later)
            turns[name] = contestant.run
        return Comparison(task, ready, alternate(turns, rounds), absent, load)


def _say_load() -> float:
    """The load average; where others are busy, a warning."""
    load = os.getloadavg()[0]
    if load > QUIET_LOAD:
        warning = f"load average {load:.1f}: others are running, so judge nothing by this"
        print(warning, file=sys.stderr)
    return load


def _module(name: str) -> str:
    """Where a contestant is found. Raises ContestantError where what it needs is not installed."""
    if name == OURS:
        return "benchmarks.ours"
    missing = PEERS[name].missing
    if missing:
        raise ContestantError(f"not installed: {', '.join(missing)}; pip install '.[bench]'")
    return PEERS[name].module


def _check_same(name: str, peer: Ready, ours: Ready, later: float) -> None:
    """Raise ContestantError unless both have the same parameters and the same first losses."""
    if peer.sizes != ours.sizes:
        raise ContestantError(
            f"{name} has {sum(peer.sizes):,} parameters in {len(peer.sizes)} arrays, ours "
            f"{sum(ours.sizes):,} in {len(ours.sizes)}: not the same network"
        )
    pairs = enumerate(zip(peer.proof, ours.proof, strict=True))
    # Written so that a loss that is not a number agrees with nothing.
    if not all(
        abs(its - own) <= (later if step else FIRST) * abs(own) for step, (its, own) in pairs
    ):
        shown = " against ".join(", ".join(f"{x:.4f}" for x in p) for p in (peer.proof, ours.proof))
        raise ContestantError(f"{name} trains something else: its first losses are {shown}")


def report(comparison: Comparison, command: str) -> str:
    """Markdown: what was compared, the table, the rounds, the machine and the versions."""
    task, ready = comparison.task, comparison.ready
    header = (
        "contestant",
        "ms/step, median",
        "min to max",
        "images/s",
        "ours is faster by",
        "loss of step 1",
        "step 3",
        "mean of the last round",
        "steps a round",
    )
    # A round is as long as fits into its seconds, which may be less than a sink.
    sink = min(task.sink_size, min(one.steps for one in comparison.rounds[OURS]))
    title = f"{task.name}, batch {task.batch_size}, {task.precision}, ours in sinks of {sink:,}"
    return "\n".join(
        (
            heading(title, command, PACKAGES),
            f"{sum(ready[OURS].sizes):,} parameters in each; {len(comparison.rounds[OURS])} "
            f"rounds, alternating; load average before: {comparison.load:.1f}.\n",
            table(header, _rows(comparison)),
            "Milliseconds a step, round by round:\n",
            table(*_round_table(comparison)),
        )
    )


def _rows(comparison: Comparison) -> list[list[str]]:
    task, columns = comparison.task, _step_ms(comparison)
    ours_ms = statistics.median(columns[OURS])
    rows = []
    for name, times in columns.items():
        median_ms = statistics.median(times)
        contestant = OURS if name.startswith(OURS) else name
        proof, last = comparison.ready[contestant].proof, comparison.rounds[contestant][-1]
        rows.append(
            [
                name if name.startswith(OURS) else f"{name}: {PEERS[name].how}",
                f"{median_ms:.3f}",
                f"{min(times):.3f} to {max(times):.3f}",
                f"{1e3 * task.batch_size / median_ms:,.0f}",
                f"{median_ms / ours_ms:.2f}x",
                f"{proof[0]:.4f}",
                f"{proof[-1]:.4f}",
                f"{last.result.loss:.4f}",
                _steps_a_round(comparison.rounds[contestant]),
            ]
        )
    rows += [[name, why, *[""] * 7] for name, why in comparison.absent.items()]
    return rows


def _steps_a_round(rounds: Sequence[Round]) -> str:
    """The steps of the rounds: their range where they differ."""
    counts = [one.steps for one in rounds]
    least, most = min(counts), max(counts)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _step_ms(comparison: Comparison) -> dict[str, list[float]]:
    """Milliseconds a step of every round; of ours also those of the dispatches alone."""
    columns = {}
    for name, rounds in comparison.rounds.items():
        columns[name] = [one.step_ms for one in rounds]
        parts = [one.result.part_s for one in rounds if one.result.part_s is not None]
        if parts:
            columns[f"{name}, dispatches alone"] = [
                1e3 * part / one.steps for part, one in zip(parts, rounds, strict=True)
            ]
    return columns


def _round_table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    columns = _step_ms(comparison)
    count = len(comparison.rounds[OURS])
    rows = [[name, *(f"{ms:.3f}" for ms in times)] for name, times in columns.items()]
    return ["contestant", *map(str, range(1, count + 1))], rows


def _said(args: argparse.Namespace) -> list[str]:
    """The arguments that decide the figures."""
    said = [f"--task {args.task}"]
    said += [f"--peers {','.join(args.peers)}"] if args.peers else []
    said += [f"--precision {args.precision}"] if args.precision != "float32" else []
    said += [f"--batch-size {args.batch_size}"] if args.batch_size else []
    said += [f"--sink-size {args.sink_size}"] if args.sink_size != 1000 else []
    said += [f"--rounds {args.rounds}"]
    return [*said, *(f"--override {override}" for override in args.override)]


def _file_name(task: Task) -> str:
    return f"train_{task.name}_{task.precision}.md"


if __name__ == "__main__":
    raise SystemExit(main())
