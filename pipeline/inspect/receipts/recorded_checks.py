"""Checks of what a receipt and its run's files record: its chain, its subjects, logs, checkpoints.

They hold on any machine. `verify_receipt` has the checks of what must be computed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipeline.checkpoint.checkpoint_folder import FOLDER, list_saved_steps, make_checkpoint_path
from pipeline.checkpoint.manifest import DamagedError
from pipeline.checkpoint.restore import read_checkpoint
from pipeline.core.errors import DataError
from pipeline.core.files.name_text import show_name
from pipeline.core.files.value_text import join_first, show
from pipeline.data.copies.checksums import compute_checksum
from pipeline.engine.monitors.log_lines import EVALS, METRICS, read_lines
from pipeline.inspect.receipts.chain import (
    ChainRecord,
    Numbers,
    digest_arrays,
    find_broken,
    list_evaluations,
)
from pipeline.inspect.receipts.run_receipt import digest_evaluation
from pipeline.inspect.receipts.statement import STATE, Receipt, read_evaluation, read_logged
from pipeline.stages.record.recorded_recipe import hash_recipe
from pipeline.stages.record.run_directory import RECIPE, read_outcome
from pipeline.stages.record.trained_run import read_run_recipe

MAX_LINKS = 10
"""Most links whose steps a message has."""
MAX_NAME = 200
"""Most characters of a file's name in a run."""
ROBUST = "robust_accuracy"
"""Final metric that attacks measure, which a receipt doesn't claim."""
Verdict = Literal["verified", "broken", "differs", "not comparable"]


class Problem(NamedTuple):
    """A disagreement with a receipt."""

    kind: Literal["broken", "differs"]
    """broken: of recorded things, on any machine; differs: of something that was computed here."""
    text: str


class ReplayedSegment(NamedTuple):
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
    segments: list[ReplayedSegment] = field(default_factory=list)
    """All segments that could be drawn."""
    drawn: list[ReplayedSegment] = field(default_factory=list)
    """Segments that were trained again."""
    uncovered: list[ReplayedSegment] = field(default_factory=list)
    """Steps that no segment has."""
    checkpoints: list[int] = field(default_factory=list)
    """Steps of links whose checkpoints have the link's state."""
    unproven: list[str] = field(default_factory=list)
    """Claims of the receipt that nothing here shows, true or false."""
    notes: list[str] = field(default_factory=list)
    later_step: int | None = None
    """Step of a whole checkpoint after the receipt, if the run went on; else None."""

    @property
    def verdict(self) -> Verdict:
        kinds = {problem.kind for problem in self.problems}
        if "broken" in kinds:
            return "broken"
        if "differs" in kinds:
            return "not comparable" if self.causes else "differs"
        is_whole = self.drawn and not self.uncovered and not self.unproven
        return "verified" if is_whole else "not comparable"

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
            "unproven": self.unproven,
            "chance": self.compute_chance(),
            "seed": self.seed,
            "notes": self.notes,
            "later_step": self.later_step,
        }


def check_chain(verification: Verification) -> bool:
    """Return whether the chain is whole, and the one that its receipt states; note what isn't."""
    receipt = verification.receipt
    records = receipt.records
    texts = []
    for name, stated, value in (
        ("head", receipt.stated_head, records[-1].digest),
        ("number of steps", receipt.stated_steps, receipt.last_step),
    ):
        if stated is not None and stated != value:
            texts.append(f"the stated {name} is {show(stated):.70}, the chain's {show(value)}")
    position = find_broken(records)
    if position is not None:
        record = records[position]
        texts.append(
            f"the chain is broken at record {position}, the {record.kind} of step {record.step:,}"
        )
    verification.problems += [Problem("broken", text) for text in texts]
    return not texts


def check_files(verification: Verification, run_dir: Path) -> None:
    """Compare a receipt with the run's files: subjects, logs, checkpoints and the summary."""
    receipt = verification.receipt
    broken = make_adder(verification, "broken")
    verification.later_step = _find_later_step(run_dir, receipt.last_step)
    state = f"{STATE} after step {receipt.last_step}"
    if receipt.subjects.get(state) != receipt.links[-1].body["state"]:
        broken(f"subject {state}: isn't the state of the last link")
    for name, digest in receipt.subjects.items():
        if name == state:
            continue
        path = run_dir / name
        if Path(name).is_absolute() or ".." in Path(name).parts or len(name) > MAX_NAME:
            broken(f"subject {show_name(name):.80}: isn't a file of the run")
        elif not path.is_file():
            verification.notes.append(f"{show_name(name)} is gone since")
        elif compute_checksum(path) != digest:
            reason = _explain_change(verification, run_dir, name)
            if reason is None:
                broken(f"{show_name(name)}: isn't the file that the receipt names")
            else:
                verification.notes.append(reason)
    for text in _compare_logs(verification, run_dir):
        broken(text)
    for link in receipt.links:
        problem = _compare_checkpoint(link, run_dir, verification)
        if problem is not None:
            broken(problem)
    if verification.later_step is None:
        for text in _compare_summary(receipt, run_dir):
            broken(text)


def require_parent(receipt: Receipt, parent: Receipt, where: str) -> None:
    """Raise DataError unless a run may begin with steps of another one, whose receipt is `where`.

    A link of the parent must be at the step at which the chain of the receipt begins.
    """
    step = receipt.links[0].step
    if step == 0:
        raise DataError(f"{where}: the chain of its child begins at the start, so it has no parent")
    steps = [link.step for link in parent.links]
    if step not in steps:
        names = join_first(list(map(str, steps)), MAX_LINKS)
        raise DataError(
            f"{where}: has no link of step {step:,}, with which its child begins; it has {names}"
        )


def check_parent(verification: Verification, parent: Verification, run_dir: Path) -> None:
    """Compare a fork with the verified receipt of the run that it began with: the state, and the
    logs up to its first step. If they agree, the parent covers the steps before."""
    first = verification.receipt.links[0]
    step = first.step
    broken = make_adder(verification, "broken")
    links = [link for link in parent.receipt.links if link.step <= step]
    if links[-1].body["state"] != first.body["state"]:
        broken(f"the parent's state after step {step:,} isn't the one that the chain begins with")
    for start, link in pairwise(links):
        if read_logged(run_dir, start.step, link.step)["numbers"] != link.body["numbers"]:
            text = f"{METRICS}: steps {start.step + 1:,} to {link.step:,} differ from the parent's"
            broken(text)
            break
    chained = list_evaluations(parent.receipt.records)
    for line in read_lines(run_dir / EVALS) if (run_dir / EVALS).is_file() else ():
        is_before = links[0].step < line.step < step
        if is_before and chained.get(line.step) != digest_evaluation(line.step, line.fields):
            broken(f"{EVALS}: the evaluation after step {line.step:,} isn't the parent's")
            break
    if parent.verdict == "verified":
        # What a parent that is a fork itself leaves uncovered is in its verdict.
        verification.uncovered = [part for part in verification.uncovered if part.start >= step]
    elif parent.verdict in ("broken", "differs"):
        verification.problems.append(Problem(parent.verdict, "the parent's receipt isn't true"))
    else:
        verification.unproven.append("the parent's receipt")


def _compare_summary(receipt: Receipt, run_dir: Path) -> Iterator[str]:
    """Yield a text for each final metric that the receipt and the summary don't share."""
    outcome = read_outcome(run_dir)
    if receipt.end is None or not outcome:
        return
    metrics = outcome.get("metrics")
    summary = metrics if isinstance(metrics, Mapping) else {}
    expected = {
        **read_evaluation(run_dir, receipt.last_step),
        **{name: value for name, value in read_metrics(receipt.end).items() if value is not None},
    }
    for name in dict.fromkeys((*expected, *summary)):
        value, other = expected.get(name), summary.get(name)
        if name == ROBUST and name not in expected and read_run_recipe(run_dir).eval.robustness:
            continue
        if value != other:
            claim = f"has {show(value):.60}" if name in expected else "has none"
            yield f"{show_name(name)} of summary.json is {show(other):.60}, the receipt {claim}"


def _find_later_step(run_dir: Path, step: int) -> int | None:
    """Return the step of the last whole checkpoint after a step; None without one.

    A line of a log is no evidence that a run went on, since anyone can write one.
    """
    root = run_dir / FOLDER
    for saved in sorted(list_saved_steps(root), reverse=True):
        if saved <= step:
            break
        with suppress(DamagedError, KeyError):
            if read_checkpoint(make_checkpoint_path(root, saved)).step == saved:
                return saved
    return None


def _explain_change(verification: Verification, run_dir: Path, name: str) -> str | None:
    """Return what a run that went on has changed in a subject; None if that isn't all.

    A log may have more lines, of later steps. The recipe may have another length, and other keys
    that a resumed run may change.
    """
    receipt = verification.receipt
    last, later = receipt.last_step, verification.later_step
    if later is None:
        return None
    if name in (METRICS, EVALS):
        digest = hashlib.sha256()
        for line in read_lines(run_dir / name):
            if line.step > last:
                break
            digest.update(line.text)
        is_same = digest.hexdigest() == receipt.subjects[name]
        text = f"{name} goes on after step {last:,}; there is a checkpoint of step {later:,}"
        return text if is_same else None
    if name == RECIPE:
        recipe = hash_recipe(read_run_recipe(run_dir).model_dump(mode="json"))
        if all(origin.body.get("recipe") == recipe for origin in receipt.origins):
            return f"{name} has changed in keys that a resumed run may change, such as its length"
    return None


def make_adder(
    verification: Verification, kind: Literal["broken", "differs"]
) -> Callable[[str], None]:
    return lambda text: verification.problems.append(Problem(kind, text))


def read_metrics(end: ChainRecord) -> Mapping[str, Any]:
    metrics = end.body.get("metrics")
    return metrics if isinstance(metrics, Mapping) else {}


def _compare_logs(verification: Verification, run_dir: Path) -> Iterator[str]:
    """Yield a text for the first link, and the first evaluation, that differs from the logs."""
    receipt = verification.receipt
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
    yield from _compare_evaluations(verification, run_dir)


def _compare_evaluations(verification: Verification, run_dir: Path) -> Iterator[str]:
    """Yield a text for the first evaluation that the chain and the log don't share, among those
    between the first and the last link."""
    receipt = verification.receipt
    missing = list_evaluations(receipt.records)
    chained = dict(missing)
    lines = read_lines(run_dir / EVALS) if (run_dir / EVALS).is_file() else ()
    for line in lines:
        if (receipt.links[0].step or -1) < line.step <= receipt.last_step:
            missing.pop(line.step, None)
            if receipt.end is None and line.step == receipt.last_step not in chained:
                # A run that was killed before the end has logged it.
                text = f"the evaluation after step {line.step:,}: the chain has no end with it"
                verification.unproven.append(text)
            elif chained.get(line.step) != digest_evaluation(line.step, line.fields):
                problem = "differs from the chain" if line.step in chained else "isn't in the chain"
                yield f"{EVALS}: the evaluation after step {line.step:,} {problem}"
                return
    for step in missing:
        yield f"{EVALS}: the evaluation after step {step:,} is missing"
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
