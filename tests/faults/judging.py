"""Judges a run with a fault: it must save everything, or end with a message and be resumable."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import numpy as np

from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.checkpoint.restore import Checkpoint, list_saved_steps, read_checkpoint
from pipeline.core.errors import DataError
from tests.faults.faults import Fault
from tests.faults.runs import Nursery, RunResult
from tests.faults.scenarios import RESUME, RUN, Baseline, copy_template

STATUSES = (0, 1, 2)
CRASH = re.compile(
    r"Traceback \(most recent call last\)|Exception ignored|Exception in thread|"
    r"Fatal Python error|terminate called|^[A-Z]\w+Warning: ",
    re.MULTILINE,
)
DEFECTS = ("hangs", "crashed", "not explained", "untrue", "lost", "not done")
"""A run that never ends; a traceback or a signal; no reason; "done" with missing or wrong files;
saved files that can't be resumed; a failure although the files are expendable."""
READING = Lock()
"""Orbax reads in its threads; only one checkpoint is read at a time."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a case; `defects` maps kinds to evidence."""

    fault: Fault
    injected: Sequence[str]
    """The calls that failed; empty if the run made fewer calls than the baseline."""
    done: bool
    defects: Mapping[str, str] = field(default_factory=dict)


def try_case(baseline: Baseline, fault: Fault, folder: Path, nursery: Nursery) -> Verdict:
    """Run with a fault in an empty folder, and judge."""
    case = copy_template(baseline, folder / "case")
    log = folder / "calls"
    environment = fault.environment(case / baseline.scenario.root, log)
    # Hydra makes the run directory first of all.
    whole = fault.nth == 1
    result = nursery.run(baseline.arguments, case, environment, whole=whole)
    injected = log.read_text().splitlines() if log.exists() else []
    defects = dict(_list_defects(baseline, fault, case, result, nursery))
    if result.status and _is_expendable(baseline, case, injected):
        defects["not done"] = result.console[-6000:]
    return Verdict(fault, injected, result.status == 0 and not result.hangs, defects)


def _list_defects(
    baseline: Baseline, fault: Fault, case: Path, result: RunResult, nursery: Nursery
) -> list[tuple[str, str]]:
    text = result.console[-6000:]
    defects = []
    if result.hangs:
        defects.append(("hangs", text))
    elif result.status not in STATUSES:
        defects.append(("crashed", f"exit status {result.status}\n{text}"))
    elif CRASH.search(result.console):
        defects.append(("crashed", text))
    elif result.status and not _is_explained(result.console, fault, baseline):
        defects.append(("not explained", text))
    if result.status == 0:
        lacks = find_lacks(case / RUN, baseline)
        return defects + [("untrue", f"{lack}\n{text}") for lack in lacks[:1]]
    losses = _find_losses(baseline, case, nursery)
    return defects + [("lost", f"{loss}\n{text}") for loss in losses[:1]]


def _is_expendable(baseline: Baseline, case: Path, injected: Sequence[str]) -> bool:
    """Return whether only calls in the expendable folder failed."""
    folder = baseline.scenario.expendable
    return folder is not None and all(f" {case / folder}" in call for call in injected)


def _is_explained(console: str, fault: Fault, baseline: Baseline) -> bool:
    """Return whether an error message has the path or the reason of the system."""
    _, error, message = console.partition("error: ")
    clues = [*fault.reasons(), f"{RUN}/", f"{RUN}:", f"{baseline.scenario.root}/"]
    return bool(error) and any(clue in message for clue in clues)


def find_lacks(run_dir: Path, baseline: Baseline) -> list[str]:
    """Return the missing and the different files of a run that reports that it is done."""
    lacks = []
    try:
        status = json.loads((run_dir / "summary.json").read_text())["status"]
        if status != "done":
            lacks.append(f"summary.json says {status}")
        json.loads((run_dir / "provenance.json").read_text())
    except (OSError, ValueError) as error:
        lacks.append(f"can't be read: {error}")
    expected = baseline.unbroken
    for name in ("metrics.jsonl", "evals.jsonl"):
        file = run_dir / name
        if not file.exists() or file.read_bytes() != (expected / name).read_bytes():
            lacks.append(f"{name} is another")
    if not (run_dir / "recipe.yaml").exists():
        lacks.append("there is no recipe.yaml")
    for step in list_saved_steps(expected / "checkpoints"):
        folder = make_checkpoint_path(run_dir / "checkpoints", step)
        lacks += _compare_checkpoint(folder, baseline)
    return lacks


def _compare_checkpoint(folder: Path, baseline: Baseline) -> list[str]:
    with READING:
        try:
            checkpoint = read_checkpoint(folder)
        except (DataError, OSError) as error:
            return [f"checkpoint {folder.name}: {error}"]
        expected = read_checkpoint(baseline.unbroken / "checkpoints" / folder.name)
    return [] if _are_same(checkpoint, expected) else [f"checkpoint {folder.name} is another"]


def _are_same(checkpoint: Checkpoint, expected: Checkpoint) -> bool:
    arrays = checkpoint.arrays
    return (
        checkpoint.host == expected.host
        and arrays.keys() == expected.arrays.keys()
        and all(_has_same_bits(arrays[path], array) for path, array in expected.arrays.items())
    )


def _has_same_bits(array: np.ndarray, expected: np.ndarray) -> bool:
    return array.dtype == expected.dtype and array.tobytes() == expected.tobytes()


def _find_losses(baseline: Baseline, case: Path, nursery: Nursery) -> list[str]:
    """Resume a failed run without faults, and return what it has lost."""
    root = case / RUN / "checkpoints"
    steps = list_saved_steps(root) if root.is_dir() else []
    losses = []
    # An older checkpoint may be half deleted: the deletion may have failed after the newest save.
    for step in steps[-1:]:
        try:
            with READING:
                read_checkpoint(root / str(step))
        except (DataError, OSError) as error:
            losses.append(f"checkpoint {step} is complete by its name, and is not: {error}")
    has_run = (case / RUN / "recipe.yaml").exists()
    arguments = list(baseline.arguments)
    if has_run and RESUME not in arguments:
        arguments.append(RESUME)
    result = nursery.run(arguments, case, {}, whole=False)
    if result.status != 0:
        return [*losses, f"can't be resumed: {result.console[-3000:]}"]
    resumed = re.findall(r"^resume .* from step (\d+)$", result.console, re.MULTILINE)
    if steps and resumed != [str(max(steps))]:
        losses.append(f"resumed from {resumed} instead of {max(steps)}")
    return losses + [f"resumed, {lack}" for lack in find_lacks(case / RUN, baseline)]
