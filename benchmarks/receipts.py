"""Receipts: forged ones are found as often as is said, honest ones pass, and how long they take.

    python -m benchmarks.receipts forgeries [--each 60] [--seed 0] [--kinds seed,sample,metric]
    python -m benchmarks.receipts honest [--runs 20] [--seed 0]
    python -m benchmarks.receipts overhead [--rounds 7]

`forgeries` trains one run with ten segments, and makes as many forged runs of each kind:

* step: the update of one step is left out, and training goes on from there
* weight: a weight is changed between two steps, and training goes on from there
* seed: from a link on, batches are those of another seed
* sample: the label of one sample is another one, from the start
* metric: a logged loss, or the final accuracy, is another number

The forger has the run's program, trains all later steps, and writes checkpoints, logs and a whole
chain with true digests of the false states. Half of the forgers can't sign, so their receipt stays
as it was. Each segment is trained again, which says how many are false; then 200 seeds draw
segments for `--share 5%`, and the share that is found is compared with the probability that
`verify` states for that number of false segments.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from pipeline import load_recipe
from pipeline.checkpoint.checkpoint_folder import FOLDER, make_checkpoint_path
from pipeline.checkpoint.checkpointer import Checkpoints, Retention
from pipeline.engine.monitors.metrics_log import metrics_lines
from pipeline.inspect.dumps.opened_recipe import OpenedRecipe, build_recipe, make_silent_reporter
from pipeline.inspect.receipts import run_receipt
from pipeline.inspect.receipts.chain import ChainRecord, digest_state, extend_chain
from pipeline.inspect.receipts.recorded_checks import (
    ReplayedSegment,
    Verification,
    check_chain,
    check_files,
)
from pipeline.inspect.receipts.run_receipt import digest_evaluation
from pipeline.inspect.receipts.statement import (
    Receipt,
    format_statement,
    make_receipt,
    parse_statement,
    read_evaluation,
    read_logged,
)
from pipeline.inspect.receipts.verify_receipt import (
    check_computed,
    draw_segments,
    replay_segments,
)
from pipeline.inspect.replay import Replay, open_replay
from pipeline.stages import run as stages_run
from pipeline.stages.record.recorded_recipe import hash_recipe
from pipeline.stages.run import run
from pipeline.stages.runner.context import RunOptions
from pipeline.training.state import TrainState

STEPS, LINK, SAVE = 400, 20, 40
SHARE = 0.05
DRAWS = 200
QUIET = ("monitor.tensorboard=false",)
RUN = (
    "model=mlp", "model.hidden=[32]", f"train.steps={STEPS}", f"receipt.every_steps={LINK}",
    f"checkpoint.every_steps={SAVE}", "checkpoint.keep=50", *QUIET,
)  # fmt: skip
MLP = ("model=mlp", "model.hidden=[512, 512]", "train.batch_size=64", "train.sink_size=200")
OVERHEADS: Sequence[tuple[str, tuple[str, ...], tuple[int, ...]]] = (
    ("LeNet-5", ("train.sink_size=200", "train.epochs=80"), (50, 200)),
    ("MLP 1024-512-512-10, batches of 64", (*MLP, "train.epochs=100"), (200,)),
)
"""Network on the digits, its overrides, and the numbers of steps between two links."""
POOL = 5
"""Other seeds, and changed samples, whose programs are compiled once."""
KINDS = ("step", "weight", "seed", "sample", "metric")


@dataclass
class Forger:
    """The programs with which forged runs are trained."""

    replay: Replay
    receipt: Receipt
    seeds: list[Replay]
    samples: list[Replay]

    def forge(self, kind: str, rng: np.random.Generator, folder: Path) -> str:
        """Write a forged run into `folder`, a copy of the honest one. Returns what was forged."""
        if kind == "metric":
            return self._forge_metric(rng, folder)
        if kind in ("seed", "sample"):
            pool = self.seeds if kind == "seed" else self.samples
            number = int(rng.integers(len(pool)))
            start = LINK * int(rng.integers(STEPS // LINK)) if kind == "seed" else 0
            state = self.replay.go_to(start)
            self._write(folder, pool[number], state, start)
            return f"{kind} {number} from step {start}"
        step = int(rng.integers(1, STEPS))
        state = self.replay.go_to(step - 1 if kind == "step" else step)
        if kind == "step":
            # The update is left out, and the step counted.
            state = replace(state, step=jnp.int32(step))
        else:
            flat, tree = jax.tree.flatten(state.params)
            place = int(rng.integers(len(flat)))
            changed = np.array(flat[place])
            changed.reshape(-1)[rng.integers(changed.size)] += np.float32(0.01)
            flat[place] = changed
            state = replace(state, params=jax.tree.unflatten(tree, flat))
        self._write(folder, self.replay, state, step)
        return f"{kind} {step}"

    def _write(self, folder: Path, replay: Replay, state: TrainState, start: int) -> None:
        """Train on from a false state after `start` steps; replace checkpoints and logs."""
        opened = self.replay.opened
        tree = opened.recipe.model_dump(mode="json")
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)[:start]
        states = {start: state} if start % LINK == 0 and start else {}
        position = start
        schedule = replace(opened.built.run_schedule, sink_steps=None)
        while position < STEPS:
            stop = (position // LINK + 1) * LINK
            for reached, steps in replay.run_steps(state, position, stop):
                state = reached
                lines.append(metrics_lines([steps], schedule))
            state = jax.tree.map(np.array, state)
            states[stop] = state
            position = stop
        (folder / "metrics.jsonl").write_text("".join(lines))
        for step in [step for step in states if step % SAVE == 0]:
            shutil.rmtree(make_checkpoint_path(folder / FOLDER, step))
        select = opened.built.step_config.select_saved
        with Checkpoints(
            folder, Retention(99, None), tree, hash_recipe(tree), select=select
        ) as all_:
            for step, saved in sorted(states.items()):
                if step % SAVE == 0:
                    all_.save(step, saved, {}, None)
        metrics = self.replay.evaluate(states[STEPS]).metrics
        loss = json.loads(lines[-1].splitlines()[-1])["loss"]
        self._set_metrics(folder, {**metrics, "train_loss": float(np.float32(loss))})
        self.states = {step: digest_state(saved, select) for step, saved in states.items()}

    def _set_metrics(self, folder: Path, metrics: Mapping[str, Any]) -> None:
        summary = json.loads((folder / "summary.json").read_text())
        summary["metrics"] |= metrics
        (folder / "summary.json").write_text(json.dumps(summary))
        line = json.loads((folder / "evals.jsonl").read_text().splitlines()[-1])
        line |= {name: value for name, value in metrics.items() if name in line}
        (folder / "evals.jsonl").write_text(json.dumps(line) + "\n")

    def _forge_metric(self, rng: np.random.Generator, folder: Path) -> str:
        self.states = {}
        if rng.integers(2):
            self._set_metrics(folder, {"accuracy": 0.999})
            return "final accuracy"
        step = int(rng.integers(STEPS))
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        fields = json.loads(lines[step])
        fields["loss"] = float(np.float32(fields["loss"] * 0.9))
        lines[step] = json.dumps(fields) + "\n"
        (folder / "metrics.jsonl").write_text("".join(lines))
        return f"loss of step {step + 1}"

    def chain_again(self, folder: Path) -> Receipt:
        """Return the receipt that the forger signs: true digests of the false run."""
        records: list[ChainRecord] = []
        metrics = json.loads((folder / "summary.json").read_text())["metrics"]
        start = 0
        for record in self.receipt.records:
            body = dict(record.body)
            if record.kind == "link":
                logged = read_logged(folder, start, record.step)
                body["numbers"] = logged["numbers"]
                body["state"] = self.states.get(record.step, body["state"])
                start = record.step
            # Also the digest of the final evaluation, which the end has.
            body |= _digest_evaluations(folder, body)
            if record.kind == "end":
                body["metrics"] = {name: metrics[name] for name in body["metrics"]}
            records.append(extend_chain(records, body))
        (folder / "receipt.jsonl").write_text(
            "".join(json.dumps(record.to_dict()) + "\n" for record in records)
        )
        return make_receipt(self.replay.opened, folder, make_silent_reporter())


def _digest_evaluations(folder: Path, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the evaluations of a record, as the log in `folder` now has them."""
    pairs = [
        [step, digest_evaluation(step, read_evaluation(folder, step))]
        for step, _ in body.get("evaluations", ())
    ]
    return {"evaluations": pairs} if "evaluations" in body else {}


def verify(replay: Replay, receipt: Receipt, share: float, seed: int) -> Verification:
    """Verify a receipt as the command does."""
    verification = Verification(parse_statement(format_statement(receipt), "receipt"), seed)
    if check_chain(verification):
        check_files(verification, replay.run_dir)
        check_computed(verification, replay)
        draw_segments(verification, share)
        replay_segments(verification, replay)
    return verification


def with_folder(replay: Replay, folder: Path) -> Replay:
    """Return a replay of another run by the same program."""
    return Replay(
        replay.opened, folder, make_silent_reporter(), advice="", _executable=replay._compile()
    )


def train(overrides: tuple[str, ...], folder: Path) -> Any:
    recipe = load_recipe("lenet5_digits", overrides)
    return run(recipe, RunOptions(run_dir=folder, console=Console(file=io.StringIO())))


def open_forger(folder: Path, replay: Replay) -> Forger:
    opened = replay.opened
    seeds, samples = [], []
    for number in range(POOL):
        # The honest run has the default seed; one of the pool would forge nothing.
        recipe = load_recipe("lenet5_digits", (*RUN, f"seed={opened.recipe.seed + number + 1}"))
        seeds.append(_open_program(build_recipe(recipe, make_silent_reporter()), folder))
        columns = dict(opened.dataset.train.columns)
        label = np.array(columns["label"])
        row = int(np.random.default_rng(number).integers(len(label)))
        label[row] = (label[row] + 1) % 10
        train_split = replace(opened.dataset.train, columns={**columns, "label": label})
        dataset = replace(opened.dataset, train=train_split)
        samples.append(_open_program(replace(opened, dataset=dataset), folder))
    receipt = make_receipt(opened, folder, make_silent_reporter())
    return Forger(replay, receipt, seeds, samples)


def _open_program(opened: OpenedRecipe, folder: Path) -> Replay:
    return Replay(opened, folder, make_silent_reporter(), advice="")


def try_forgeries(each: int, seed: int, kinds: tuple[str, ...] = KINDS) -> int:
    """Print a row for each kind; return the number of forgeries that certainly were missed."""
    missed = 0
    with tempfile.TemporaryDirectory() as root:
        honest = Path(root) / "honest"
        train(RUN, honest)
        with open_replay(honest, make_silent_reporter()) as replay:
            forger = open_forger(honest, replay)
            print("| kind | forged | unsigned found | signed | surely found | stated | found |")
            print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
            for kind in kinds:
                unsigned = signed = sure = unsigned_found = 0
                stated: list[float] = []
                found: list[float] = []
                for case in range(each):
                    rng = np.random.default_rng((seed, KINDS.index(kind), case))
                    folder = Path(root) / "forged"
                    shutil.copytree(honest, folder)
                    forger.forge(kind, rng, folder)
                    other = with_folder(replay, folder)
                    if case % 2:
                        unsigned += 1
                        verdict = verify(other, forger.receipt, SHARE, case).verdict
                        unsigned_found += verdict in ("broken", "differs")
                    else:
                        signed += 1
                        result = measure_chance(other, forger.chain_again(folder))
                        if result is None:
                            sure += 1
                        else:
                            stated.append(result[0])
                            found.append(result[1])
                            missed += result[0] == 0
                    shutil.rmtree(folder)
                missed += unsigned - unsigned_found
                shares = [f"{np.mean(values):.3f}" if values else "-" for values in (stated, found)]
                print(
                    f"| {kind} | {each} | {unsigned_found} of {unsigned} | {signed} | {sure} | "
                    f"{shares[0]} | {shares[1]} |",
                    flush=True,
                )
    print(f"forgeries that nothing would have found: {missed}")
    return missed


def measure_chance(replay: Replay, receipt: Receipt) -> tuple[float, float] | None:
    """Return the stated probability of finding a forged receipt, and the share of draws that find
    it; None if it is found without a draw."""
    verification = Verification(parse_statement(format_statement(receipt), "receipt"), 0)
    check_chain(verification)
    check_files(verification, replay.run_dir)
    check_computed(verification, replay)
    draw_segments(verification, SHARE)
    segments = verification.segments
    verification.drawn = []
    replay_segments(verification, replay)
    if verification.problems:
        return None
    false = set(_find_false(verification, replay, segments))
    draw_segments(verification, SHARE)
    stated = verification.compute_chance(len(false)) if false else 0.0
    hits = 0
    for seed in range(DRAWS):
        verification.seed = seed
        draw_segments(verification, SHARE)
        hits += bool(false & set(verification.drawn))
    return stated, hits / DRAWS


def _find_false(
    verification: Verification, replay: Replay, segments: list[ReplayedSegment]
) -> Iterator[ReplayedSegment]:
    for segment in segments:
        verification.drawn = [segment]
        verification.problems = []
        replay_segments(verification, replay)
        if verification.problems:
            yield segment


def try_honest(runs: int, seed: int) -> int:
    """Verify honest runs whole; return how many don't pass."""
    failures = 0
    for case in range(runs):
        rng = np.random.default_rng((seed, case))
        overrides = (
            *RUN,
            f"seed={rng.integers(1000)}",
            f"train.sink_size={rng.choice([-1, 1, 7, 90])}",
            f"optimizer={rng.choice(['momentum', 'adam', 'lamb'])}",
            "train.optimizer.lr=0.003",
            f"train.feed={rng.choice(['auto', 'stream'])}",
        )
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root) / "run"
            train(overrides, folder)
            with open_replay(folder, make_silent_reporter()) as replay:
                receipt = make_receipt(replay.opened, folder, make_silent_reporter())
                verification = verify(replay, receipt, 1.0, case)
        failures += verification.verdict != "verified"
        print(case, verification.verdict, *verification.problems, flush=True)
    print(f"honest runs that pass: {runs - failures} of {runs}")
    return failures


def train_measured(overrides: tuple[str, ...], folder: Path) -> TrainingTime:
    """Train, and return processor seconds: of the process from the first state to the last
    evaluation, so with the links at both ends, and of its thread in receipts."""
    train_and_evaluate = stages_run.train_and_evaluate
    process_s = 0.0

    def train_in_clock(*arguments: Any) -> Iterator[Any]:
        nonlocal process_s
        began_at = time.process_time()
        yield from train_and_evaluate(*arguments)
        process_s = time.process_time() - began_at

    clock = SimpleNamespace(perf_counter=time.thread_time)
    with (
        mock.patch.object(stages_run, "train_and_evaluate", train_in_clock),
        mock.patch.object(run_receipt, "time", clock),
    ):
        summary = train(overrides, folder)
    return TrainingTime(process_s, summary.time.get("receipt_s", 0.0))


class TrainingTime(NamedTuple):
    """Processor seconds of a run."""

    process_s: float
    receipt_s: float


def measure_overhead(rounds: int) -> int:
    """Print the share of processor time that receipts take: of their thread, and by alternating
    runs with and without."""
    print("| network | a link every | in receipts | with / without | rounds |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, overrides, periods in OVERHEADS:
        times: dict[int, list[TrainingTime]] = {period: [] for period in (0, *periods)}
        for number in range(rounds):
            for period in list(times)[:: 1 if number % 2 else -1]:
                words = (*QUIET, *overrides, *([f"receipt.every_steps={period}"] if period else []))
                with tempfile.TemporaryDirectory() as root:
                    times[period].append(train_measured(words, Path(root) / "run"))
        for period in periods:
            shares = [each.receipt_s / each.process_s for each in times[period]]
            ratios = [
                each.process_s / without.process_s
                for each, without in zip(times[period], times[0], strict=True)
            ]
            print(
                f"| {name} | {period} | {statistics.median(shares):.2%} "
                f"({min(shares):.2%} to {max(shares):.2%}) | {statistics.median(ratios):.3f} "
                f"({min(ratios):.3f} to {max(ratios):.3f}) | {rounds} |",
                flush=True,
            )
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["forgeries", "honest", "overhead"])
    parser.add_argument("--each", type=int, default=60)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="the kinds of forgeries")
    args = parser.parse_args()
    kinds = tuple(args.kinds.split(","))
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"kinds {sorted(unknown)} are unknown; there are {', '.join(KINDS)}")
    commands: Mapping[str, Callable[[], int]] = {
        "forgeries": lambda: try_forgeries(args.each, args.seed, kinds),
        "honest": lambda: try_honest(args.runs, args.seed),
        "overhead": lambda: measure_overhead(args.rounds),
    }
    raise SystemExit(1 if commands[args.what]() else 0)


if __name__ == "__main__":
    main()
