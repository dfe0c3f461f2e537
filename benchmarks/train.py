"""The same training in this project and in other frameworks, side by side.

    python -m benchmarks.train --task lenet5 --peers torch,torch_compile,keras,mindspore,jax_loop

Every contestant trains the same network from the same initial weights with the same batches of real
data, optimizer, batch size and precision, on all cores, in a separate process; they have their
rounds in turn. Before anything is timed, the sizes of their parameters must be equal and their
first losses must agree, so every row of the table trains the same thing.

What is timed: ours is the whole training stage, with sampling, gathering from uint8, normalising
and all telemetry of every step written. The peers find normalised float32 batches in memory, and
write and print nothing. No contestant augments, resizes or evaluates, compiling is done before, and
a round begins after a step that isn't timed. LeNet-5 trains on MNIST at 32x32, ResNet-50 on 512
images of CIFAR-10 at 224x224, both resized before.
What each peer does in a step is in its module under `benchmarks/peers`.

The peers come with `pip install '.[bench]'`. Without a GPU, install the CPU build of torch before,
or pip fetches CUDA with it. Peers that aren't installed are left out.
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
"""The largest relative difference of the losses of the first step."""
LATER = {"float32": 0.02, "bf16": 0.05}
"""The same for the next two steps, as frameworks sum in other orders."""


@dataclass(frozen=True)
class Comparison:
    """The result: warm contestants, their rounds, and why others have none."""

    task: Task
    ready: Mapping[str, Ready]
    rounds: Mapping[str, list[Round]]
    absent: Mapping[str, str]
    load: float
    """The load average of the machine before anything ran, which other programs caused."""


def main() -> int:
    """Compare, print a Markdown table, and save it with `--save`."""
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
    publish(
        report(comparison, f"python -m benchmarks.train {' '.join(_format_options(args))}"), save
    )
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
    """Start ours and the peers, check that they train the same, and run their rounds.

    A peer that isn't installed or fails is absent, with the reason. Raises ContestantError if ours
    fails, or if a peer trains something else.
    """
    ready: dict[str, Ready] = {}
    turns: dict[str, Callable[[], Round]] = {}
    absent: dict[str, str] = {}
    load = _check_load()
    with ExitStack() as stack:
        for name in (OURS, *peers):
            try:
                contestant = stack.enter_context(started(_find_module(name), task, round_s))
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


def _check_load() -> float:
    """Return the load average; print a warning if other programs are busy."""
    load = os.getloadavg()[0]
    if load > QUIET_LOAD:
        warning = f"load average {load:.1f}: others are running, so judge nothing by this"
        print(warning, file=sys.stderr)
    return load


def _find_module(name: str) -> str:
    """Return a contestant's module. Raises ContestantError if a package isn't installed."""
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
    # This form refuses a loss that is NaN.
    if not all(
        abs(theirs - expected) <= (later if step else FIRST) * abs(expected)
        for step, (theirs, expected) in pairs
    ):
        losses = " against ".join(
            ", ".join(f"{loss:.4f}" for loss in proof) for proof in (peer.proof, ours.proof)
        )
        raise ContestantError(f"{name} trains something else: its first losses are {losses}")


def report(comparison: Comparison, command: str) -> str:
    """Return Markdown: what was compared, the table, the rounds, the machine and the versions."""
    task = comparison.task
    num_parameters = sum(comparison.ready[OURS].sizes)
    header = (
        *("contestant", "ms/step, median", "min to max", "images/s", "ours is faster by"),
        *("loss of step 1", "step 3", "mean of the last round", "steps a round"),
    )
    # A round is as long as fits into its seconds, which may be less than a sink.
    sink = min(task.sink_size, min(turn.steps for turn in comparison.rounds[OURS]))
    title = f"{task.name}, batch {task.batch_size}, {task.precision}, ours in sinks of {sink:,}"
    parts = [
        heading(title, command, PACKAGES),
        f"{num_parameters:,} parameters in each; {len(comparison.rounds[OURS])} "
        f"rounds, alternating; load average before: {comparison.load:.1f}.\n",
        table(header, _make_rows(comparison)),
        "Milliseconds a step, round by round:\n",
        table(*_make_round_table(comparison)),
    ]
    return "\n".join(parts)


def _make_rows(comparison: Comparison) -> list[list[str]]:
    columns = _collect_step_ms(comparison)
    ours_ms = statistics.median(columns[OURS])
    rows = []
    for name, times in columns.items():
        median_ms = statistics.median(times)
        contestant = OURS if name.startswith(OURS) else name
        proof = comparison.ready[contestant].proof
        last = comparison.rounds[contestant][-1]
        rows.append(
            [
                name if name.startswith(OURS) else f"{name}: {PEERS[name].how}",
                f"{median_ms:.3f}",
                f"{min(times):.3f} to {max(times):.3f}",
                f"{1e3 * comparison.task.batch_size / median_ms:,.0f}",
                f"{median_ms / ours_ms:.2f}x",
                f"{proof[0]:.4f}",
                f"{proof[-1]:.4f}",
                f"{last.result.loss:.4f}",
                _format_steps(comparison.rounds[contestant]),
            ]
        )
    rows += [[name, why, *[""] * 7] for name, why in comparison.absent.items()]
    return rows


def _format_steps(rounds: Sequence[Round]) -> str:
    """Return the steps of a round, as a range if rounds differ."""
    counts = sorted({turn.steps for turn in rounds})
    return f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"


def _collect_step_ms(comparison: Comparison) -> dict[str, list[float]]:
    """Return milliseconds a step of every round; of ours also of its dispatches alone."""
    columns = {}
    for name, rounds in comparison.rounds.items():
        columns[name] = [turn.step_ms for turn in rounds]
        parts = [turn.result.part_s for turn in rounds if turn.result.part_s is not None]
        if parts:
            columns[f"{name}, dispatches alone"] = [
                1e3 * part / turn.steps for part, turn in zip(parts, rounds, strict=True)
            ]
    return columns


def _make_round_table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    columns = _collect_step_ms(comparison)
    count = len(comparison.rounds[OURS])
    rows = [[name, *(f"{ms:.3f}" for ms in times)] for name, times in columns.items()]
    return ["contestant", *map(str, range(1, count + 1))], rows


def _format_options(args: argparse.Namespace) -> list[str]:
    """Return the arguments that decide the figures."""
    options = [f"--task {args.task}"]
    options += [f"--peers {','.join(args.peers)}"] if args.peers else []
    options += [f"--precision {args.precision}"] if args.precision != "float32" else []
    options += [f"--batch-size {args.batch_size}"] if args.batch_size else []
    options += [f"--sink-size {args.sink_size}"] if args.sink_size != 1000 else []
    options += [f"--rounds {args.rounds}"]
    return [*options, *(f"--override {override}" for override in args.override)]


def _file_name(task: Task) -> str:
    return f"train_{task.name}_{task.precision}.md"


if __name__ == "__main__":
    raise SystemExit(main())
