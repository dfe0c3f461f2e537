"""What a run with a fault in it must be: done with all it should have saved, or ended in order."""

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
from tests.faults.runs import Ended, Nursery
from tests.faults.scenarios import RESUME, RUN, Prepared, begin

STATUSES = (0, 1, 2)
CRASH = re.compile(
    r"Traceback \(most recent call last\)|Exception ignored|Exception in thread|"
    r"Fatal Python error|terminate called|^[A-Z]\w+Warning: ",
    re.MULTILINE,
)
DEFECTS = ("hangs", "crashed", "not explained", "untrue", "lost", "not done")
"""A run that never ends; a traceback, a signal; no reason given; "done" without what it should have
saved; what was saved can't be resumed from; a failure where the run can do without."""
READING = Lock()
"""orbax reads with threads of its own; one checkpoint at a time."""


@dataclass(frozen=True)
class Verdict:
    """What became of a case; `defects` by kind, with what was seen."""

    fault: Fault
    injected: Sequence[str]
    """The calls that were disturbed; none where the run made fewer calls than usual."""
    done: bool
    defects: Mapping[str, str] = field(default_factory=dict)


def try_case(prepared: Prepared, fault: Fault, folder: Path, nursery: Nursery) -> Verdict:
    """Run with a fault in an empty folder, and judge."""
    case, log = begin(prepared, folder / "case"), folder / "calls"
    environment = fault.environment(case / prepared.scenario.root, log)
    # Hydra makes the run directory first of all.
    whole = fault.nth == 1
    ended = nursery.run(prepared.arguments, case, environment, whole=whole)
    injected = log.read_text().splitlines() if log.exists() else []
    defects = dict(_defects(prepared, fault, case, ended, nursery))
    if ended.status and _is_expendable(prepared, case, injected):
        defects["not done"] = ended.console[-6000:]
    return Verdict(fault, injected, ended.status == 0 and not ended.hangs, defects)


def _defects(
    prepared: Prepared, fault: Fault, case: Path, ended: Ended, nursery: Nursery
) -> list[tuple[str, str]]:
    said = ended.console[-6000:]
    found = []
    if ended.hangs:
        found.append(("hangs", said))
    elif ended.status not in STATUSES:
        found.append(("crashed", f"exit status {ended.status}\n{said}"))
    elif CRASH.search(ended.console):
        found.append(("crashed", said))
    elif ended.status and not _explains(ended.console, fault, prepared):
        found.append(("not explained", said))
    if ended.status == 0:
        found += [("untrue", f"{lack}\n{said}") for lack in find_lacks(case / RUN, prepared)[:1]]
        return found
    return found + [
        ("lost", f"{loss}\n{said}") for loss in _find_losses(prepared, case, nursery)[:1]
    ]


def _is_expendable(prepared: Prepared, case: Path, injected: Sequence[str]) -> bool:
    """Whether all calls that were disturbed are about what the run must do without."""
    folder = prepared.scenario.expendable
    return folder is not None and all(f" {case / folder}" in call for call in injected)


def _explains(console: str, fault: Fault, prepared: Prepared) -> bool:
    """Whether an error is said, and the path or the system's reason with it."""
    _, error, message = console.partition("error: ")
    clues = [*fault.reasons(), f"{RUN}/", f"{RUN}:", f"{prepared.scenario.root}/"]
    return bool(error) and any(clue in message for clue in clues)


def find_lacks(run_dir: Path, prepared: Prepared) -> list[str]:
    """Return what a run that says that it is done does not have, or has otherwise."""
    lacks = []
    try:
        status = json.loads((run_dir / "summary.json").read_text())["status"]
        if status != "done":
            lacks.append(f"summary.json says {status}")
        json.loads((run_dir / "provenance.json").read_text())
    except (OSError, ValueError) as error:
        lacks.append(f"can't be read: {error}")
    wanted = prepared.unbroken
    for name in ("metrics.jsonl", "evals.jsonl"):
        file = run_dir / name
        if not file.exists() or file.read_bytes() != (wanted / name).read_bytes():
            lacks.append(f"{name} is another")
    if not (run_dir / "recipe.yaml").exists():
        lacks.append("there is no recipe.yaml")
    for step in list_saved_steps(wanted / "checkpoints"):
        lacks += _differences(make_checkpoint_path(run_dir / "checkpoints", step), prepared)
    return lacks


def _differences(folder: Path, prepared: Prepared) -> list[str]:
    with READING:
        try:
            found = read_checkpoint(folder)
        except (DataError, OSError) as error:
            return [f"checkpoint {folder.name}: {error}"]
        wanted = read_checkpoint(prepared.unbroken / "checkpoints" / folder.name)
    return [] if _are_same(found, wanted) else [f"checkpoint {folder.name} is another"]


def _are_same(one: Checkpoint, other: Checkpoint) -> bool:
    return (
        one.host == other.host
        and one.arrays.keys() == other.arrays.keys()
        and all(_same_bits(one.arrays[path], other.arrays[path]) for path in other.arrays)
    )


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _find_losses(prepared: Prepared, case: Path, nursery: Nursery) -> list[str]:
    """Go on with a run that failed, without faults, and return what it can't have any more."""
    root = case / RUN / "checkpoints"
    steps = list_saved_steps(root) if root.is_dir() else []
    lost = []
    # One before it may be half gone: its deletion may have failed, once the newest was complete.
    for step in steps[-1:]:
        try:
            with READING:
                read_checkpoint(root / str(step))
        except (DataError, OSError) as error:
            lost.append(f"checkpoint {step} is complete by its name, and is not: {error}")
    begun = (case / RUN / "recipe.yaml").exists()
    arguments = list(prepared.arguments)
    again = [*arguments, RESUME] if begun and RESUME not in arguments else arguments
    ended = nursery.run(again, case, {}, whole=False)
    if ended.status != 0:
        return [*lost, f"can't be gone on with: {ended.console[-3000:]}"]
    resumed = re.findall(r"^resume .* from step (\d+)$", ended.console, re.MULTILINE)
    if steps and resumed != [str(max(steps))]:
        lost.append(f"went on from {resumed} instead of {max(steps)}")
    return lost + [f"resumed, {lack}" for lack in find_lacks(case / RUN, prepared)]
