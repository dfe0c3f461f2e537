"""Verification of a receipt: its chain, the files of the run, and random segments trained again.

What a receipt says is compared with the run's files everywhere. What must be computed is compared
too, but a difference counts only on the machine's class and with the versions that the receipt
names: elsewhere it is "not comparable".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from pipeline.checkpoint.checkpoint_folder import FOLDER, list_saved_steps, make_checkpoint_path
from pipeline.checkpoint.manifest import DamagedError
from pipeline.checkpoint.restore import arrange_arrays, read_checkpoint
from pipeline.config.compose import check_tree
from pipeline.core.errors import DataError
from pipeline.core.files.name_text import show_name
from pipeline.core.files.value_text import show
from pipeline.data.copies.checksums import compute_checksum
from pipeline.data.order import draw_permutation
from pipeline.engine.monitors.log_lines import EVALS, METRICS, read_lines
from pipeline.inspect.dumps.opened_recipe import rebuild
from pipeline.inspect.receipts.chain import (
    ChainRecord,
    Numbers,
    digest_arrays,
    digest_rows,
    digest_state,
    find_broken,
)
from pipeline.inspect.receipts.run_receipt import (
    describe_environment,
    digest_evaluation,
    make_origin,
    select_numbers,
)
from pipeline.inspect.receipts.statement import STATE, Receipt
from pipeline.inspect.replay import Replay, find_last_step
from pipeline.stages.build import fingerprint_rate_files
from pipeline.stages.record.provenance import describe_process
from pipeline.stages.record.recorded_recipe import LENGTH
from pipeline.stages.record.run_directory import read_outcome
from pipeline.stages.record.summary import list_versions
from pipeline.stages.record.trained_run import read_run_recipe
from pipeline.training.state import TrainState

Verdict = Literal["verified", "broken", "differs", "not comparable"]


class Problem(NamedTuple):
    """A disagreement with a receipt."""

    kind: Literal["broken", "differs"]
    """broken: of recorded things, on any machine; differs: of something that was computed here."""
    text: str


class Segment(NamedTuple):
    """Steps start + 1 to stop, between two states that are known: the start, or a checkpoint."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.start + 1:,} to {self.stop:,}"


@dataclass
class Verification:
    """Result of a verification."""

    receipt: Receipt
    seed: int
    problems: list[Problem] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    """Why an honest run may have other bits here."""
    segments: list[Segment] = field(default_factory=list)
    """All segments that could be drawn."""
    drawn: list[Segment] = field(default_factory=list)
    """Segments that were trained again."""
    uncovered: list[Segment] = field(default_factory=list)
    """Steps that no segment has."""
    checkpoints: list[int] = field(default_factory=list)
    """Steps of links whose checkpoints have the link's state."""
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        kinds = {problem.kind for problem in self.problems}
        if "broken" in kinds:
            return "broken"
        if "differs" in kinds:
            return "not comparable" if self.causes else "differs"
        return "verified" if self.drawn and not self.uncovered else "not comparable"

    def compute_chance(self, forged: int = 1) -> float:
        """Return the probability that at least one of `forged` segments was drawn."""
        total, drawn = len(self.segments), len(self.drawn)
        if total - drawn < forged:
            return 1.0 if drawn else 0.0
        return 1 - math.comb(total - forged, drawn) / math.comb(total, drawn)

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "problems": [problem._asdict() for problem in self.problems],
            "not_comparable": self.causes,
            "steps": self.receipt.last_step,
            "links": len(self.receipt.links),
            "while_training": self.receipt.while_training,
            "checkpoints": self.checkpoints,
            "segments": len(self.segments),
            "replayed": [list(segment) for segment in self.drawn],
            "replayed_steps": sum(segment.stop - segment.start for segment in self.drawn),
            "uncovered": [list(segment) for segment in self.uncovered],
            "chance": self.compute_chance(),
            "seed": self.seed,
            "notes": self.notes,
        }


def check_chain(verification: Verification) -> bool:
    """Return whether the chain is whole; note the first broken record."""
    records = verification.receipt.records
    position = find_broken(records)
    if position is not None:
        record = records[position]
        text = (
            f"the chain is broken at record {position}, the {record.kind} of step {record.step:,}"
        )
        verification.problems.append(Problem("broken", text))
    return position is None


def check_files(verification: Verification, run_dir: Path) -> None:
    """Compare a receipt with the run's files: subjects, logs, checkpoints and the summary."""
    receipt = verification.receipt
    broken = _make_adder(verification, "broken")
    goes_on = find_last_step(run_dir) > receipt.last_step
    state = f"{STATE} after step {receipt.last_step}"
    if receipt.subjects.get(state) != receipt.links[-1].body["state"]:
        broken(f"subject {state}: isn't the state of the last link")
    for name, digest in receipt.subjects.items():
        if name == state:
            continue
        path = run_dir / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            broken(f"subject {show_name(name)}: isn't a file of the run")
        elif not path.is_file():
            verification.notes.append(f"{show_name(name)} is gone since")
        elif compute_checksum(path) != digest:
            if goes_on:
                verification.notes.append(f"{show_name(name)} has changed: the run went on")
            else:
                broken(f"{show_name(name)}: isn't the file that the receipt names")
    for text in _compare_logs(receipt, run_dir):
        broken(text)
    for link in receipt.links:
        problem = _compare_checkpoint(link, run_dir, verification)
        if problem is not None:
            broken(problem)
    end = receipt.end
    outcome = read_outcome(run_dir)
    if end is not None and not goes_on and outcome:
        metrics = outcome.get("metrics")
        recorded = select_numbers(metrics if isinstance(metrics, Mapping) else {})
        for name, value in _read_metrics(end).items():
            if recorded.get(name) != value:
                broken(
                    f"{show_name(name)} of summary.json is {show(recorded.get(name))}, the "
                    f"receipt has {show(value)}"
                )


def _make_adder(
    verification: Verification, kind: Literal["broken", "differs"]
) -> Callable[[str], None]:
    return lambda text: verification.problems.append(Problem(kind, text))


def _read_metrics(end: ChainRecord) -> Mapping[str, Any]:
    metrics = end.body.get("metrics")
    return metrics if isinstance(metrics, Mapping) else {}


def _compare_logs(receipt: Receipt, run_dir: Path) -> Iterator[str]:
    """Yield a text for the first link whose numbers, and the first whose evaluations, differ from
    the logs."""
    if not (run_dir / METRICS).is_file():
        yield f"{METRICS}: is missing"
        return
    lines = iter(read_lines(run_dir / METRICS))
    line = next(lines, None)
    start = receipt.links[0].step
    while line is not None and line.step <= start:
        line = next(lines, None)
    for link in receipt.links[1:]:
        numbers = Numbers()
        while line is not None and line.step <= link.step:
            numbers.add_line(line)
            line = next(lines, None)
        if numbers.finish() != link.body["numbers"]:
            yield f"{METRICS}: steps {start + 1:,} to {link.step:,} differ from the chain"
            break
        start = link.step
    logged = {}
    if (run_dir / EVALS).is_file():
        for line in read_lines(run_dir / EVALS):
            logged[line.step] = digest_evaluation(line.step, line.fields)
    for record in receipt.records:
        evaluations = record.body.get("evaluations")
        for pair in evaluations if isinstance(evaluations, list) else ():
            if not isinstance(pair, list) or logged.get(pair[0]) != pair[-1]:
                yield f"{EVALS}: the evaluation {show(pair):.40} differs from the chain"
                return


def _compare_checkpoint(link: ChainRecord, run_dir: Path, verification: Verification) -> str | None:
    """Note the checkpoint of a link if it has the link's state; return a text if it hasn't."""
    root = run_dir / FOLDER
    if link.step not in list_saved_steps(root):
        return None
    path = make_checkpoint_path(root, link.step)
    try:
        arrays = read_checkpoint(path).arrays
    except DamagedError as error:
        return str(error)
    if digest_arrays(arrays) != link.body["state"]:
        return f"{path}: isn't the state of the link of step {link.step:,}"
    verification.checkpoints.append(link.step)
    return None


def check_computed(verification: Verification, replay: Replay) -> None:
    """Compare a receipt with what follows from the recipe and the data here: recipe, environment,
    data, rows and the first state."""
    receipt, opened = verification.receipt, replay.opened
    differs = _make_adder(verification, "differs")
    versions = list_versions(opened.backend.describe())
    splits = {"train": opened.dataset.train}
    process = vars(describe_process(opened.recipe.seed, versions, opened.backend.device, splits))
    if rate_files := fingerprint_rate_files(opened.recipe.train):
        process["data"] = {**process["data"], "learning rates": rate_files}
    here = make_origin(read_run_recipe(replay.run_dir), process, 0)
    environment = describe_environment(process)
    changes = [list_other_environment(origin.body, environment) for origin in receipt.origins]
    verification.causes += dict.fromkeys(text for texts in changes for text in texts)
    if opened.backend.device.platform != "cpu":
        verification.causes.append("equal bits are promised for the CPU alone")
    if opened.recipe.train.callbacks:
        verification.causes.append("train.callbacks, which aren't called")
    if opened.recipe.parallel.reproducible is False:
        verification.causes.append("parallel.reproducible = false")
    origins = [origin.body for origin in receipt.origins]
    if any(origin.get("recipe") != here["recipe"] for origin in origins):
        differs("recipe.yaml: isn't the recipe of the receipt")
    is_last = find_last_step(replay.run_dir) == receipt.last_step
    if is_last and origins[-1].get("length") != here["length"]:
        differs("recipe.yaml: has another length than the receipt")
    if any(origin.get("data") != here["data"] for origin in origins):
        differs("the training data aren't those of the receipt")
    start = receipt.links[0].step
    for link in receipt.links:
        if link.body["rows"] != digest_rows(opened.dataset.train_order, start, link.step):
            differs(f"steps {start + 1:,} to {link.step:,} read other rows by this recipe")
            break
        start = link.step
    if receipt.links[0].step == 0:
        state = jax.tree.map(np.array, opened.fresh_state())
        if _digest(replay, state) != receipt.links[0].body["state"]:
            differs("the first state isn't that of the recipe")


def list_other_environment(origin: Mapping[str, Any], environment: Mapping[str, Any]) -> list[str]:
    """Return a text for each part of the environment that differs from a receipt's."""
    recorded = origin.get("environment")
    recorded = recorded if isinstance(recorded, Mapping) else {}
    texts = []
    for part, current in environment.items():
        former = recorded.get(part)
        if isinstance(current, Mapping) and isinstance(former, Mapping):
            for name in dict.fromkeys((*former, *current)):
                if former.get(name) != current.get(name):
                    text = f"{part} {name}: {show(former.get(name))} -> {show(current.get(name))}"
                    texts.append(show_name(text))
        elif former != current:
            texts.append(show_name(f"{part}: {show(former)} -> {show(current)}"))
    return texts


def _digest(replay: Replay, state: TrainState) -> str:
    return digest_state(state, replay.opened.built.step_config.select_saved)


def draw_segments(verification: Verification, share: float) -> None:
    """List the segments of a receipt, and draw a share of them, rounded up, without repetition."""
    receipt = verification.receipt
    links = [link.step for link in receipt.links]
    known = [step for step in links if step == 0 or step in verification.checkpoints]
    starts = [step for step in known if step < links[-1]]
    stops = [*starts[1:], links[-1]]
    verification.segments = [
        Segment(start, stop) for start, stop in zip(starts, stops, strict=True)
    ]
    begin = starts[0] if starts else links[-1]
    if begin > links[0]:
        verification.uncovered = [Segment(links[0], begin)]
    total = len(verification.segments)
    if total:
        count = min(total, max(1, math.ceil(share * total - 1e-9)))
        chosen = sorted(draw_permutation(verification.seed, 0, total)[:count].tolist())
        verification.drawn = [verification.segments[position] for position in chosen]


def replay_segments(verification: Verification, replay: Replay) -> None:
    """Train the drawn segments again, and compare the state and the numbers at each link; evaluate
    the last state again."""
    receipt = verification.receipt
    with ExitStack() as stack:
        stages = _open_stages(receipt, replay, stack) if verification.drawn else []
        for segment in verification.drawn:
            text = _replay_segment(receipt, stages, segment)
            if text is not None:
                verification.problems.append(Problem("differs", text))
    end = receipt.end
    if end is None or receipt.last_step not in verification.checkpoints:
        return
    metrics = replay.evaluate(_read_state(replay, receipt.last_step)).metrics
    for name, value in select_numbers(metrics).items():
        recorded = _read_metrics(end).get(name, value)
        if recorded != value:
            text = f"{show_name(name)} of the last state is {show(value)}, the receipt has "
            verification.problems.append(Problem("differs", text + show(recorded)))


class _Stage(NamedTuple):
    """A part of a run with one length of its recipe."""

    step: int
    """Steps before it."""
    replay: Replay


def _open_stages(receipt: Receipt, replay: Replay, stack: ExitStack) -> list[_Stage]:
    """Open the run's recipe with the length of each origin, on which learning rates depend.

    Raises RecipeError for a length that no recipe has.
    """
    opened = replay.opened
    current = opened.recipe.model_dump(mode="json")["train"]
    stages: list[_Stage] = []
    for origin in receipt.origins:
        length = origin.body.get("length")
        length = length if isinstance(length, Mapping) else {}
        wanted = {key: length.get(key) for _, key in LENGTH}
        stage_replay = replay
        if wanted != {key: current[key] for key in wanted}:
            tree = opened.recipe.whole_tree()
            tree["train"] |= wanted
            recipe = check_tree(tree, length_replaced=True)
            changed = rebuild(replace(opened, recipe=recipe), replay.run_dir)
            stage_replay = Replay(changed, replay.run_dir, replay.reporter, advice="")
            stack.enter_context(stage_replay)
        stages.append(_Stage(origin.step, stage_replay))
    return stages


def _read_state(replay: Replay, step: int) -> TrainState:
    """Return the state of a link, from the recipe or the checkpoint whose digest was compared."""
    opened = replay.opened
    if step == 0:
        state: TrainState = jax.tree.map(np.array, opened.fresh_state())
        return state
    checkpoint = read_checkpoint(make_checkpoint_path(replay.run_dir / FOLDER, step))
    built = opened.built
    state = arrange_arrays(
        checkpoint.folder, checkpoint.arrays, built.step_config.select_saved(built.state)
    )
    return opened.complete_state(state, replay.run_dir)


def _replay_segment(receipt: Receipt, stages: Sequence[_Stage], segment: Segment) -> str | None:
    """Return a text about the first link of a segment that differs; None if none does."""
    state = _read_state(stages[0].replay, segment.start)
    position = segment.start
    for link in receipt.links:
        if not segment.start < link.step <= segment.stop:
            continue
        numbers = Numbers()
        where = f"steps {position + 1:,} to {link.step:,}, trained again, have"
        while position < link.step:
            stage = next(stage for stage in reversed(stages) if stage.step <= position)
            later = [other.step for other in stages if other.step > position]
            stop = min([link.step, *later])
            done = position
            for reached, steps in stage.replay.run_steps(state, position, stop):
                numbers.add(steps)
                done += len(steps)
                state = reached
            if done < stop:
                return f"{where} a step that isn't finite: {done:,}"
            position = stop
        if numbers.finish() != link.body["numbers"]:
            return f"{where} other numbers"
        if _digest(stages[0].replay, state) != link.body["state"]:
            return f"{where} another state"
    return None


def require_same_run(receipt: Receipt, run_dir: Path) -> None:
    """Raise DataError if the run has fewer steps than its receipt."""
    last = find_last_step(run_dir)
    if last < receipt.last_step:
        raise DataError(
            f"{run_dir}: has done {last:,} steps, the receipt is of {receipt.last_step:,}"
        )
