"""Choose lowerings: look a computation up in the banks, tune it where the mode says so, and
keep the results."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import jax

from pipeline.core.errors import RunError
from pipeline.core.files.knowledge_bank import (
    Banks,
    Entry,
    Round,
    Status,
    operator_record,
    reuse_or_search,
    ticks_best,
)
from pipeline.core.host.platforms import platform_of
from pipeline.models.lowerings.candidates import can_compute, candidates
from pipeline.models.lowerings.problem.image_layout import Layout
from pipeline.models.lowerings.problem.lowering import (
    DEFAULT,
    DEFAULTS,
    Engine,
    Lowering,
    Lowerings,
    Problem,
)
from pipeline.models.lowerings.tune.layouts import TimedLayout
from pipeline.models.lowerings.tune.machine import find_engines, scopes_from
from pipeline.models.lowerings.tune.rule import is_worth_a_call, usual_lowering
from pipeline.models.lowerings.tune.search import Mode, Strategy, search
from pipeline.models.lowerings.tune.timing import Stopwatch

BUILT_IN = Path(__file__).parent / "built_in.json"
"""Bank of the shapes of the shipped recipes, on the devices that its keys name."""

WORTH_SHARE, WORTH_US = 0.1, 1000.0
"""oneDNN is called where it saves at least this share of the time of all problems, and this many
microseconds a step: a program that calls it is compiled again in every process."""

ProgressClock = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class Tuning:
    """Settings of the tuner; `folder` holds the user's bank and the results of probes."""

    mode: Mode
    strategy: Strategy
    folder: Path
    kept: Lowerings | None = None
    """Lowerings of an earlier part of the run, which the rest must use too."""

    @property
    def bank(self) -> Path:
        """The user's bank. Its entries replace those of the built-in one."""
        return self.folder / "lowerings.json"


@dataclass(frozen=True)
class Timed:
    """A lowering and its time in microseconds."""

    lowering: Lowering
    us: float


@dataclass(frozen=True)
class TunedProblem:
    """Times of a problem: the default before, the best after, and the best by XLA alone (plain)."""

    problem: Problem
    before_us: float
    after: Timed
    plain: Timed
    status: Status
    rounds: tuple[Round, ...] = ()

    @property
    def us(self) -> float:
        """Time of the best, in microseconds."""
        return self.after.us


@dataclass(frozen=True)
class LoweringChoice:
    """The lowerings and the layout of a network, and the results that they were chosen by."""

    lowerings: Lowerings = DEFAULTS
    results: tuple[TunedProblem, ...] = ()
    by_rule: int = 0
    """Number of problems that are in no bank and were not tuned."""
    layout: Layout = "nhwc"
    """Layout of the images between the layers."""
    layout_found: TimedLayout | None = None
    """Times of the layouts; None where the layout is chosen by rule."""

    @property
    def calls_onednn(self) -> bool:
        """Whether any of them needs oneDNN."""
        return any(lowering.engine == "onednn" for _, lowering in self.lowerings.chosen)

    @property
    def tuned(self) -> int:
        """Number of problems and layouts that were timed in this run."""
        statuses = [result.status for result in self.results]
        statuses += [result.status for result in self._layouts]
        return sum(status != "bank_hit" for status in statuses)

    @property
    def _layouts(self) -> tuple[TimedLayout, ...]:
        return () if self.layout_found is None else (self.layout_found,)

    def to_document(self) -> dict[str, Any]:
        """Return the layout and the lowering of each problem as JSON."""
        computations = {problem: str(how) for problem, how in self.lowerings.chosen}
        return {"layout": self.layout, "computations": computations}

    @staticmethod
    def from_document(document: Any) -> LoweringChoice:
        """Return the choice that JSON describes. Raises ValueError, KeyError or TypeError."""
        layouts: tuple[Layout, ...] = get_args(Layout)
        layout = layouts[layouts.index(document["layout"])]
        computations = document["computations"].items()
        lowerings = Lowerings(tuple((p, Lowering.parse(how)) for p, how in computations))
        return LoweringChoice(lowerings, layout=layout)

    def to_result(self) -> Mapping[str, Any]:
        """AutoTune's result file: times in microseconds, the bank's part as booleans.

        The totals are sums over the operators; the layout of the network is listed after them.
        """
        totals = {
            "before_tune": sum(result.before_us for result in self.results),
            "after_tune": sum(result.after.us for result in self.results),
        }
        operators = [_operator(result) for result in self.results]
        operators += [result.to_operator() for result in self._layouts]
        return {"result_data": totals, "operators": operators}


def choose_lowerings(
    problems: Iterable[Problem], device: jax.Device, tuning: Tuning, watch: ProgressClock
) -> LoweringChoice:
    """Choose a lowering for every problem. `watch` is entered around the tuning of each.

    Raises RunError for a bank that is not one, and for a kept lowering that can't be carried out.
    """
    requested = tuple(problems)
    if tuning.kept is not None:
        return _as_before(tuning.kept, requested, device, tuning.folder)
    if tuning.mode == "off" or not platform_of(device.platform).chooses_lowerings:
        return LoweringChoice()
    banks = Banks(tuning.bank, BUILT_IN, check_lowering_entry)
    known = banks.read()
    here, *lesser = scopes_from(device)
    if tuning.mode == "bank":
        known = _with_lesser(known, requested, here, lesser)
    keys = {problem: f"{problem} on {here}" for problem in requested}
    calls = (_calls_onednn(known.get(keys[p])) or is_worth_a_call(p) for p in requested)
    needed = tuning.mode != "bank" or any(calls)
    engines = _engines(requested, device, tuning.folder) if needed else {}
    results, ruled = [], []
    for problem, key in keys.items():
        available = engines.get(problem.dtype, frozenset(("xla",)))
        result = _tune_one(problem, known.get(key), available, device, tuning, watch)
        if result is None:
            ruled.append((str(problem), usual_lowering(problem, available)))
            continue
        results.append(result)
        if result.status in ("bank_append", "bank_update"):
            # Each one at once: a large network takes minutes, and the run may be stopped.
            banks.add({key: _entry(result)})
    return _choose(tuple(results), tuple(ruled))


def _with_lesser(
    known: Mapping[str, Entry], problems: tuple[Problem, ...], here: str, lesser: Sequence[str]
) -> dict[str, Entry]:
    """The entries, and those of lesser instruction sets for problems without one.

    In ResNet-18 what was found on AVX-512 is 5 to 10 % faster than the rule's choice on a
    processor with AMX that can't be used.
    """
    found = dict(known)
    for problem in problems:
        entries = (known.get(f"{problem} on {scope}") for scope in (here, *lesser))
        entry = next((entry for entry in entries if entry is not None), None)
        if entry is not None:
            found[f"{problem} on {here}"] = entry
    return found


def _engines(
    problems: tuple[Problem, ...], device: jax.Device, folder: Path
) -> Mapping[str, frozenset[Engine]]:
    """Usable engines by dtype."""
    dtypes = dict.fromkeys(problem.dtype for problem in problems)
    return {dtype: find_engines(device, dtype, folder) for dtype in dtypes}


def _as_before(
    kept: Lowerings,
    problems: tuple[Problem, ...],
    device: jax.Device,
    folder: Path,
) -> LoweringChoice:
    by_text = {str(problem): problem for problem in problems}
    requested = [(by_text[text], lowering) for text, lowering in kept.chosen if text in by_text]
    wants_onednn = any(lowering.engine == "onednn" for _, lowering in requested)
    engines = _engines(problems, device, folder) if wants_onednn else {}
    for problem, lowering in requested:
        here = engines.get(problem.dtype, frozenset(("xla",)))
        chooses = platform_of(device.platform).chooses_lowerings
        able = chooses and can_compute(problem, lowering, here)
        if lowering != DEFAULT and not able:
            raise RunError(f"{lowering} can't compute {problem} here, as this run did before")
    return LoweringChoice(kept)


def _tune_one(
    problem: Problem,
    entry: Entry | None,
    engines: frozenset[Engine],
    device: jax.Device,
    tuning: Tuning,
    watch: ProgressClock,
) -> TunedProblem | None:
    """Result of the bank, else of a search; of a repeated search and the bank, the faster one."""
    banked = _from_bank(problem, entry, engines)
    if banked is None and tuning.mode == "bank":
        return None

    def search_candidates() -> TunedProblem:
        with watch(str(problem)):
            return _search(problem, candidates(problem, engines), device, tuning.strategy)

    tuned = reuse_or_search(banked, search_candidates, repeat=tuning.mode == "repeat")
    rounds = tuned.searched.rounds if tuned.searched is not None else ()
    return replace(tuned.best, status=tuned.status, rounds=rounds)


def _search(
    problem: Problem, lowerings: tuple[Lowering, ...], device: jax.Device, strategy: Strategy
) -> TunedProblem:
    seed = zlib.crc32(str(problem).encode())
    result = search(lowerings, Stopwatch(problem, device), strategy, seed)
    best, plain = result.best(), result.best(lambda lowering: lowering.engine == "xla")
    return TunedProblem(
        problem,
        before_us=result.times_us[lowerings[0]],
        after=Timed(best, result.times_us[best]),
        plain=Timed(plain, result.times_us[plain]),
        status="bank_append",
        rounds=result.rounds,
    )


def _calls_onednn(entry: Entry | None) -> bool:
    """Whether the entry needs oneDNN, whose probe is a process that takes most of a second."""
    return entry is not None and Lowering.parse(entry["after"]["lowering"]).engine == "onednn"


def _from_bank(
    problem: Problem, entry: Entry | None, engines: frozenset[Engine]
) -> TunedProblem | None:
    """Result of a bank; None where it names a lowering that this machine can't compute."""
    if entry is None:
        return None
    after, plain = (
        Timed(Lowering.parse(entry[name]["lowering"]), entry[name]["us"])
        for name in ("after", "plain")
    )
    if not all(can_compute(problem, timed.lowering, engines) for timed in (after, plain)):
        return None
    return TunedProblem(problem, entry["before_us"], after, plain, "bank_hit")


def _choose(
    results: tuple[TunedProblem, ...], ruled: tuple[tuple[str, Lowering], ...]
) -> LoweringChoice:
    """Take the best of each, and oneDNN only where it saves more than it costs to compile."""
    saved_us = sum(result.plain.us - result.after.us for result in results)
    total_us = sum(result.plain.us for result in results)
    worth = saved_us > max(WORTH_US, WORTH_SHARE * total_us)
    worth |= any(lowering.engine == "onednn" for _, lowering in ruled)
    if not worth:
        results = tuple(replace(result, after=result.plain) for result in results)
    best = ((str(result.problem), result.after.lowering) for result in results)
    return LoweringChoice(Lowerings((*best, *ruled)), results, len(ruled))


def _entry(result: TunedProblem) -> Entry:
    after, plain = (
        {"lowering": str(timed.lowering), "us": timed.us} for timed in (result.after, result.plain)
    )
    return {"before_us": result.before_us, "after": after, "plain": plain}


def check_lowering_entry(entry: Entry) -> Entry:
    """The entry. Raises ValueError unless its lowerings can be read and its times are positive."""
    checked: dict[str, Any] = {"before_us": float(entry["before_us"])}
    for name in ("after", "plain"):
        Lowering.parse(entry[name]["lowering"])
        checked[name] = {"lowering": entry[name]["lowering"], "us": float(entry[name]["us"])}
    times_us = [checked["before_us"], checked["after"]["us"], checked["plain"]["us"]]
    if not all(0 < us < float("inf") for us in times_us):
        raise ValueError(f"times {times_us}")
    return checked


def _operator(result: TunedProblem) -> Mapping[str, Any]:
    problem = result.problem
    op = (problem.kind, problem.role)
    return {
        **operator_record(op, str(problem), result.before_us, result.us, result.status),
        "lowering": asdict(result.after.lowering),
        "ticks_best": ticks_best(result.rounds),
    }
