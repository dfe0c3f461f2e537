"""The flow of A-01: look a computation up, tune where asked to, keep what was found."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import jax

from pipeline.errors import RunError
from pipeline.files.knowledge_bank import Entry, Round, Status, add_to_bank, read_bank, ticks_best
from pipeline.lowerings.candidates import can_compute, candidates
from pipeline.lowerings.problem.image_layout import Layout
from pipeline.lowerings.problem.lowering import (
    DEFAULT,
    DEFAULTS,
    Engine,
    Lowering,
    Lowerings,
    Problem,
)
from pipeline.lowerings.tune.layouts import TimedLayout
from pipeline.lowerings.tune.machine import describe_device, find_engines
from pipeline.lowerings.tune.rule import is_worth_a_call, usual_lowering
from pipeline.lowerings.tune.search import Mode, Strategy, search
from pipeline.lowerings.tune.timing import Stopwatch

BUILT_IN = Path(__file__).parent / "built_in.json"
"""What was found for the shapes of the shipped recipes, on the devices that its keys name."""

WORTH_SHARE, WORTH_US = 0.1, 1000.0
"""oneDNN is called where it saves this share of what is chosen for, and so much a step: a
program that calls it is compiled anew in every process."""

ProgressClock = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class Tuning:
    """How lowerings are chosen; `folder` keeps the user's bank and what was probed."""

    mode: Mode
    strategy: Strategy
    folder: Path
    kept: Lowerings | None = None
    """What an earlier part of the run was computed with, and the rest has to be."""

    @property
    def bank(self) -> Path:
        """The user's bank, which is read before the built-in one."""
        return self.folder / "lowerings.json"


@dataclass(frozen=True)
class Timed:
    """A lowering and what it takes."""

    lowering: Lowering
    us: float


@dataclass(frozen=True)
class TuneResult:
    """What is known of a problem: the default before, the best after, the best by XLA alone."""

    problem: Problem
    before_us: float
    after: Timed
    plain: Timed
    status: Status
    rounds: tuple[Round, ...] = ()


@dataclass(frozen=True)
class LoweringChoice:
    """How the layers of a network are computed, and how that came about."""

    lowerings: Lowerings = DEFAULTS
    found: tuple[TuneResult, ...] = ()
    by_rule: int = 0
    """How many problems no bank knew and nobody tuned."""
    layout: Layout = "nhwc"
    """Of the images between the layers."""
    layout_found: TimedLayout | None = None
    """What is known of the layouts, where it is not chosen by rule."""

    @property
    def calls_onednn(self) -> bool:
        """Whether any of them needs oneDNN."""
        return any(way.engine == "onednn" for _, way in self.lowerings.chosen)

    @property
    def tuned(self) -> int:
        """How many problems were timed just now."""
        statuses = [found.status for found in self.found]
        statuses += [found.status for found in self._layouts]
        return sum(status != "bank_hit" for status in statuses)

    @property
    def _layouts(self) -> tuple[TimedLayout, ...]:
        return () if self.layout_found is None else (self.layout_found,)

    def to_result(self) -> Mapping[str, Any]:
        """The result file of A-03: times in microseconds, the bank's part as booleans.

        The totals are of the operators; the layout of the whole network stands beside them.
        """
        totals = {
            "before_tune": sum(found.before_us for found in self.found),
            "after_tune": sum(found.after.us for found in self.found),
        }
        operators = [_operator(found) for found in self.found]
        operators += [found.to_operator() for found in self._layouts]
        return {"result_data": totals, "operators": operators}


def choose_lowerings(
    problems: Iterable[Problem], device: jax.Device, tuning: Tuning, watch: ProgressClock
) -> LoweringChoice:
    """A lowering for every problem. `watch` is entered with what is tuned, while it is.

    Raises RunError for a bank that is not one, and for a kept lowering that can't be carried out.
    """
    asked = tuple(problems)
    if tuning.kept is not None:
        return _as_before(tuning.kept, asked, device, tuning.folder)
    if tuning.mode == "off" or device.platform != "cpu":
        return LoweringChoice()
    known = {**read_bank(BUILT_IN, _checked), **read_bank(tuning.bank, _checked)}
    here = describe_device(device)
    keys = {problem: f"{problem} on {here}" for problem in asked}
    calls = (_calls_onednn(known.get(keys[p])) or is_worth_a_call(p) for p in asked)
    needed = tuning.mode != "bank" or any(calls)
    engines = _engines(asked, device, tuning.folder) if needed else {}
    found, ruled = [], []
    for problem, key in keys.items():
        at_hand = engines.get(problem.dtype, frozenset(("xla",)))
        result = _tune_one(problem, known.get(key), at_hand, device, tuning, watch)
        if result is None:
            ruled.append((str(problem), usual_lowering(problem, at_hand)))
            continue
        found.append(result)
        if result.status in ("bank_append", "bank_update"):
            # Each as it is found: a large network takes minutes, and may be cut short.
            add_to_bank(tuning.bank, {key: _entry(result)}, _checked)
    return _settle(tuple(found), tuple(ruled))


def _engines(
    problems: tuple[Problem, ...], device: jax.Device, folder: Path
) -> Mapping[str, frozenset[Engine]]:
    """By dtype."""
    dtypes = dict.fromkeys(problem.dtype for problem in problems)
    return {dtype: find_engines(device, dtype, folder) for dtype in dtypes}


def _as_before(
    kept: Lowerings,
    problems: tuple[Problem, ...],
    device: jax.Device,
    folder: Path,
) -> LoweringChoice:
    by_text = {str(problem): problem for problem in problems}
    asked = [(by_text[text], how) for text, how in kept.chosen if text in by_text]
    wants_onednn = any(how.engine == "onednn" for _, how in asked)
    engines = _engines(problems, device, folder) if wants_onednn else {}
    for problem, how in asked:
        here = engines.get(problem.dtype, frozenset(("xla",)))
        able = device.platform == "cpu" and can_compute(problem, how, here)
        if how != DEFAULT and not able:
            raise RunError(f"{how} can't compute {problem} here, as this run did before")
    return LoweringChoice(kept)


def _tune_one(
    problem: Problem,
    entry: Entry | None,
    engines: frozenset[Engine],
    device: jax.Device,
    tuning: Tuning,
    watch: ProgressClock,
) -> TuneResult | None:
    """From the bank, else from a search; of a repeated search and the bank the better."""
    ways = candidates(problem, engines)
    banked = _from_bank(problem, entry, engines)
    if tuning.mode != "repeat" and (banked or tuning.mode == "bank"):
        return banked
    with watch(str(problem)):
        seed = zlib.crc32(str(problem).encode())
        result = search(ways, Stopwatch(problem, device), tuning.strategy, seed)
    plain = result.best(lambda way: way.engine == "xla")
    tuned = TuneResult(
        problem,
        before_us=result.times_us[ways[0]],
        after=Timed(result.best(), result.times_us[result.best()]),
        plain=Timed(plain, result.times_us[plain]),
        status="bank_append" if banked is None else "bank_update",
        rounds=result.rounds,
    )
    if banked is not None and banked.after.us <= tuned.after.us:
        return replace(banked, status="bank_reserved", rounds=tuned.rounds)
    return tuned


def _calls_onednn(entry: Entry | None) -> bool:
    """Whether it takes a probe, a process and most of a second, to know what an entry is worth."""
    return entry is not None and Lowering.parse(entry["after"]["lowering"]).engine == "onednn"


def _from_bank(
    problem: Problem, entry: Entry | None, engines: frozenset[Engine]
) -> TuneResult | None:
    """What a bank says, unless it names what there is not (any more) on this machine."""
    if entry is None:
        return None
    after, plain = (
        Timed(Lowering.parse(entry[name]["lowering"]), entry[name]["us"])
        for name in ("after", "plain")
    )
    if not all(can_compute(problem, timed.lowering, engines) for timed in (after, plain)):
        return None
    return TuneResult(problem, entry["before_us"], after, plain, "bank_hit")


def _settle(
    found: tuple[TuneResult, ...], ruled: tuple[tuple[str, Lowering], ...]
) -> LoweringChoice:
    """oneDNN only where it is worth a program that can't be kept."""
    saved_us = sum(f.plain.us - f.after.us for f in found)
    total_us = sum(f.plain.us for f in found)
    worth = saved_us > max(WORTH_US, WORTH_SHARE * total_us)
    worth |= any(way.engine == "onednn" for _, way in ruled)
    if not worth:
        found = tuple(replace(f, after=f.plain) for f in found)
    best = ((str(f.problem), f.after.lowering) for f in found)
    return LoweringChoice(Lowerings((*best, *ruled)), found, len(ruled))


def _entry(found: TuneResult) -> Entry:
    after, plain = (
        {"lowering": str(timed.lowering), "us": timed.us} for timed in (found.after, found.plain)
    )
    return {"before_us": found.before_us, "after": after, "plain": plain}


def _checked(entry: Entry) -> Entry:
    """An entry whose lowerings can be read and whose times are positive numbers."""
    checked: dict[str, Any] = {"before_us": float(entry["before_us"])}
    for name in ("after", "plain"):
        Lowering.parse(entry[name]["lowering"])
        checked[name] = {"lowering": entry[name]["lowering"], "us": float(entry[name]["us"])}
    times_us = [checked["before_us"], checked["after"]["us"], checked["plain"]["us"]]
    if not all(0 < us < float("inf") for us in times_us):
        raise ValueError(f"times {times_us}")
    return checked


def _operator(found: TuneResult) -> Mapping[str, Any]:
    names: tuple[Status, ...] = get_args(Status)
    return {
        "op": [found.problem.kind, found.problem.role],
        "key": str(found.problem),
        "result_data": {"before_tune": found.before_us, "after_tune": found.after.us},
        "status_data": {name: found.status == name for name in names},
        "lowering": asdict(found.after.lowering),
        "ticks_best": ticks_best(found.rounds),
    }
