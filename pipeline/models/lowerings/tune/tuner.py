"""Choose lowerings and layouts: from the banks, by timing candidates, or by a rule."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import jax

from pipeline.core.errors import RunError
from pipeline.core.files.knowledge_bank import (
    UNTIMED,
    Banks,
    Entry,
    Round,
    Status,
    make_operator_record,
    reuse_or_search,
)
from pipeline.core.host.platforms import get_platform
from pipeline.models.lowerings.candidates import can_compute, list_candidates
from pipeline.models.lowerings.problem import (
    DEFAULT,
    DEFAULTS,
    Engine,
    Layout,
    Lowering,
    Lowerings,
    Problem,
    to_file_name,
)
from pipeline.models.lowerings.tune.machine import find_engines, list_scopes
from pipeline.models.lowerings.tune.rule import choose_by_rule, is_worth_a_call
from pipeline.models.lowerings.tune.search import Mode, Stopwatch, Strategy, search

BUILT_IN = Path(__file__).parent / "built_in.json"
"""Bank of the shapes in the shipped recipes, on the devices in its keys."""

WORTH_SHARE = 0.1
WORTH_US = 1000.0
"""oneDNN is called if it saves more than this share of the time of all problems, and more than this
time per step. A program that calls it is compiled again in every process without the extra
`onednn`. The limit is the same with it, since bits may not depend on an extra."""

ProgressClock = Callable[[str], AbstractContextManager[object]]
"""(name of a piece of work) -> the context to do it in, which shows its progress."""

BUILT_IN_LAYOUTS = Path(__file__).parent / "built_in_layouts.json"
"""Bank of the layouts of the shipped recipes, on the devices in its keys."""

LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True)
class TimedLayout:
    """Times of a network's step in every layout, in microseconds."""

    key: str
    times_us: Mapping[str, float]
    status: Status

    @property
    def best(self) -> Layout:
        return min(LAYOUTS, key=self.times_us.__getitem__)

    @property
    def us(self) -> float:
        return self.times_us[self.best]

    def to_operator(self) -> Mapping[str, Any]:
        """Return an entry of AutoTune's result file; `before_tune` is NHWC."""
        op = ("network", "layout")
        record = make_operator_record(op, self.key, self.times_us["nhwc"], self.us, self.status)
        return {**record, "layout": self.best}


def find_layout(
    key: str, mode: Mode, folder: Path, clock: Callable[[Layout], float]
) -> TimedLayout | None:
    """Return a network's times from the banks, or by `clock` in each layout if the mode tunes. None
    if the mode is `bank` and no bank has the network. Raises RunError for a file that isn't a bank.
    """
    banks = Banks(folder / "layouts.json", BUILT_IN_LAYOUTS, check_layout_entry)
    entry = banks.read().get(key)
    if entry is None and mode == "bank":
        return None
    banked = None if entry is None else TimedLayout(key, entry, "bank_hit")

    def time_layouts() -> TimedLayout:
        return TimedLayout(key, {layout: clock(layout) for layout in LAYOUTS}, "bank_append")

    tuned = reuse_or_search(banked, time_layouts, repeat=mode == "repeat")
    if tuned.status != "bank_hit":
        banks.add({key: tuned.best.times_us})
    return replace(tuned.best, status=tuned.status)


def check_layout_entry(entry: Entry) -> Entry:
    """Return the entry. Raises ValueError if not every layout has a positive number."""
    times_us: dict[str, float] = {layout: float(entry[layout]) for layout in LAYOUTS}
    if not all(0 < us < float("inf") for us in times_us.values()):
        raise ValueError(f"times {times_us} must be positive and finite")
    return times_us


@dataclass(frozen=True)
class Tuning:
    """Settings of the tuner; `folder` holds the user's bank and the results of probes."""

    mode: Mode
    strategy: Strategy
    folder: Path
    fixed: Lowerings | None = None
    """The run's lowerings before it was resumed. They are used again."""


@dataclass(frozen=True)
class TimedLowering:
    """A lowering and its time in microseconds."""

    lowering: Lowering
    us: float


@dataclass(frozen=True)
class TunedProblem:
    """Times of a problem."""

    problem: Problem
    before_us: float
    """Time of the default, in microseconds."""
    after: TimedLowering
    """The fastest lowering."""
    plain: TimedLowering
    """The fastest lowering by XLA."""
    status: Status
    rounds: tuple[Round, ...] = ()

    @property
    def us(self) -> float:
        return self.after.us


@dataclass(frozen=True)
class LoweringChoice:
    """The lowerings and the layout of a network, and the times that decided them."""

    lowerings: Lowerings = DEFAULTS
    results: tuple[TunedProblem, ...] = ()
    num_by_rule: int = 0
    """Number of problems that are in no bank and weren't tuned."""
    layout: Layout = "nhwc"
    """Layout of the images between the layers."""
    timed_layout: TimedLayout | None = None
    """Times of the layouts; None if the layout is chosen by rule."""

    @property
    def num_timed(self) -> int:
        """Number of problems and layouts that were timed in this run."""
        layouts = () if self.timed_layout is None else (self.timed_layout,)
        return sum(result.status != "bank_hit" for result in (*self.results, *layouts))

    def to_document(self) -> dict[str, Any]:
        """Return the layout and the lowering of each problem as JSON."""
        computations = {problem: str(lowering) for problem, lowering in self.lowerings.chosen}
        return {"layout": self.layout, "computations": computations}

    @staticmethod
    def from_document(document: Any) -> LoweringChoice:
        """Return the choice that JSON describes. Raises ValueError, KeyError or TypeError."""
        layout: Layout = document["layout"]
        if layout not in LAYOUTS:
            raise ValueError(f"layout {layout}; must be one of {', '.join(LAYOUTS)}")
        computations = document["computations"].items()
        chosen = tuple((problem, Lowering.parse(text)) for problem, text in computations)
        return LoweringChoice(Lowerings(chosen), layout=layout)

    def to_result(self) -> Mapping[str, Any]:
        """Return AutoTune's result file: times in microseconds, the bank's status as booleans. The
        totals are sums over the operators. The layout of the network follows the operators."""
        totals = {
            "before_tune": sum(result.before_us for result in self.results),
            "after_tune": sum(result.after.us for result in self.results),
        }
        operators = [_make_operator(result) for result in self.results]
        if self.timed_layout is not None:
            operators.append(self.timed_layout.to_operator())
        return {"result_data": totals, "operators": operators}


def choose_lowerings(
    problems: Iterable[Problem], device: jax.Device, tuning: Tuning, watch: ProgressClock
) -> LoweringChoice:
    """Choose a lowering for every problem. `watch` is entered around the tuning of each problem.

    Results of tuning are added to the user's bank. Without tuning, the rule's choices for problems
    in no bank are added. They have no time, so tuning doesn't treat them as results.

    Raises RunError for a file that isn't a bank, and for a fixed lowering that can't be computed.
    """
    requested = tuple(problems)
    if tuning.fixed is not None:
        return _check_fixed(tuning.fixed, requested, device, tuning.folder)
    if tuning.mode == "off" or not get_platform(device.platform).chooses_lowerings:
        return LoweringChoice()
    banks = Banks(tuning.folder / "lowerings.json", BUILT_IN, check_lowering_entry)
    scopes = list_scopes(device)
    entries = _find_entries(banks.read(), requested, scopes, tuning.mode)
    # The probe of oneDNN is a process of almost a second.
    needs_engines = tuning.mode != "bank" or any(
        is_worth_a_call(problem) or (entry is not None and _parse_best(entry).engine == "onednn")
        for problem, entry in entries.items()
    )
    engines = _find_engines(requested, device, tuning.folder) if needs_engines else {}
    results = []
    ruled = []
    defaults: dict[str, Entry] = {}
    for problem, entry in entries.items():
        key = f"{problem} on {scopes[0]}"
        available = engines.get(problem.dtype, frozenset(("xla",)))
        result = _tune_problem(problem, entry, available, device, tuning, watch)
        if result is None:
            lowering = _choose_untimed(problem, entry, available)
            ruled.append((str(problem), lowering))
            if entry is None:
                defaults[key] = {UNTIMED: str(lowering)}
            continue
        results.append(result)
        if result.status != "bank_hit":
            # Stored at once: a large network takes minutes, and the run may be stopped.
            banks.add({key: _make_entry(result)})
    if defaults:
        # A run doesn't need to write: the next one makes the same choices by the rule.
        with suppress(RunError):
            banks.add(defaults)
    return _make_choice(tuple(results), tuple(ruled))


def _find_entries(
    bank: Mapping[str, Entry], problems: Sequence[Problem], scopes: Sequence[str], mode: Mode
) -> dict[Problem, Entry | None]:
    """Return the entry of each problem; without tuning, perhaps of a slower instruction set.
    An entry without a time is returned only if no entry has a time. On a processor whose AMX can't
    be used, entries of AVX-512 are 5 to 10 % faster in ResNet-18 than the rule's choices."""
    scopes = scopes if mode == "bank" else scopes[:1]
    entries: dict[Problem, Entry | None] = {}
    for problem in problems:
        keys = (f"{problem} on {scope}" for scope in scopes)
        candidates = (bank[key] for key in keys if key in bank)
        entries[problem] = min(candidates, key=lambda entry: UNTIMED in entry, default=None)
    return entries


def _find_engines(
    problems: Sequence[Problem], device: jax.Device, folder: Path
) -> Mapping[str, frozenset[Engine]]:
    """Return the usable engines by dtype."""
    dtypes = dict.fromkeys(problem.dtype for problem in problems)
    return {dtype: find_engines(device, dtype, folder) for dtype in dtypes}


def _check_fixed(
    lowerings: Lowerings, problems: Sequence[Problem], device: jax.Device, folder: Path
) -> LoweringChoice:
    """Return the choice before the run was resumed. Raises RunError if it can't be computed."""
    by_text = {str(problem): problem for problem in problems}
    requested = [
        (by_text[text], lowering) for text, lowering in lowerings.chosen if text in by_text
    ]
    wants_onednn = any(lowering.engine == "onednn" for _, lowering in requested)
    engines = _find_engines(problems, device, folder) if wants_onednn else {}
    chooses = get_platform(device.platform).chooses_lowerings
    for problem, lowering in requested:
        available = engines.get(problem.dtype, frozenset(("xla",)))
        can_be_computed = chooses and can_compute(problem, lowering, available)
        if lowering != DEFAULT and not can_be_computed:
            raise RunError(f"{lowering} can't compute {problem} here, as this run did before")
    return LoweringChoice(lowerings)


def _tune_problem(
    problem: Problem,
    entry: Entry | None,
    engines: frozenset[Engine],
    device: jax.Device,
    tuning: Tuning,
    watch: ProgressClock,
) -> TunedProblem | None:
    """Return the bank's result, else the result of a search. If the search is repeated, return the
    faster one. None if the mode is `bank`, and the bank has no result for this machine."""
    banked = _read_entry(problem, entry, engines)
    if banked is None and tuning.mode == "bank":
        return None

    def search_candidates() -> TunedProblem:
        with watch(str(problem)):
            return _search(problem, list_candidates(problem, engines), device, tuning.strategy)

    tuned = reuse_or_search(banked, search_candidates, repeat=tuning.mode == "repeat")
    rounds = tuned.searched.rounds if tuned.searched is not None else ()
    is_replaced = entry is not None and UNTIMED in entry
    status: Status = "bank_update" if is_replaced else tuned.status
    return replace(tuned.best, status=status, rounds=rounds)


def _search(
    problem: Problem, lowerings: tuple[Lowering, ...], device: jax.Device, strategy: Strategy
) -> TunedProblem:
    """Time a problem's lowerings, the default first, and return the result of the search."""
    seed = zlib.crc32(str(problem).encode())
    result = search(lowerings, Stopwatch(problem, device), strategy, seed)
    best = result.best()
    plain = result.best(lambda lowering: lowering.engine == "xla")
    return TunedProblem(
        problem,
        before_us=result.times_us[lowerings[0]],
        after=TimedLowering(best, result.times_us[best]),
        plain=TimedLowering(plain, result.times_us[plain]),
        status="bank_append",
        rounds=result.rounds,
    )


def _parse_best(entry: Entry) -> Lowering:
    return Lowering.parse(entry[UNTIMED] if UNTIMED in entry else entry["after"]["lowering"])


def _choose_untimed(problem: Problem, entry: Entry | None, engines: frozenset[Engine]) -> Lowering:
    """Return the bank's choice without a time, else the rule's. The rule decides again if oneDNN,
    which is worth a call, wasn't available before."""
    if entry is None or UNTIMED not in entry:
        return choose_by_rule(problem, engines)
    lowering = _parse_best(entry)
    may_call = "onednn" in engines and is_worth_a_call(problem)
    is_usable = can_compute(problem, lowering, engines)
    is_usable &= lowering.engine == "onednn" or not may_call
    return lowering if is_usable else choose_by_rule(problem, engines)


def _read_entry(
    problem: Problem, entry: Entry | None, engines: frozenset[Engine]
) -> TunedProblem | None:
    """Return the result of a bank; None without a time, and if this machine can't compute it."""
    if entry is None or UNTIMED in entry:
        return None
    after = TimedLowering(_parse_best(entry), entry["after"]["us"])
    plain = TimedLowering(Lowering.parse(entry["plain"]["lowering"]), entry["plain"]["us"])
    if not all(can_compute(problem, timed.lowering, engines) for timed in (after, plain)):
        return None
    return TunedProblem(problem, entry["before_us"], after, plain, "bank_hit")


def _make_choice(
    results: tuple[TunedProblem, ...], ruled: tuple[tuple[str, Lowering], ...]
) -> LoweringChoice:
    """Choose the best of each problem, without oneDNN if it saves less than its compilation."""
    saved_us = sum(result.plain.us - result.after.us for result in results)
    total_us = sum(result.plain.us for result in results)
    is_worth_it = saved_us > max(WORTH_US, WORTH_SHARE * total_us)
    is_worth_it |= any(lowering.engine == "onednn" for _, lowering in ruled)
    if not is_worth_it:
        results = tuple(replace(result, after=result.plain) for result in results)
    best = ((str(result.problem), result.after.lowering) for result in results)
    return LoweringChoice(Lowerings((*best, *ruled)), results, len(ruled))


def _make_entry(result: TunedProblem) -> Entry:
    after, plain = (
        {"lowering": str(timed.lowering), "us": timed.us} for timed in (result.after, result.plain)
    )
    return {"before_us": result.before_us, "after": after, "plain": plain}


def check_lowering_entry(entry: Entry) -> Entry:
    """Return the entry. Raises ValueError if its lowerings or its times are invalid."""
    if UNTIMED in entry:
        return {UNTIMED: str(Lowering.parse(entry[UNTIMED]))}
    valid_entry: dict[str, Any] = {"before_us": float(entry["before_us"])}
    for name in ("after", "plain"):
        Lowering.parse(entry[name]["lowering"])
        valid_entry[name] = {"lowering": entry[name]["lowering"], "us": float(entry[name]["us"])}
    times_us = [valid_entry["before_us"], valid_entry["after"]["us"], valid_entry["plain"]["us"]]
    if not all(0 < us < float("inf") for us in times_us):
        raise ValueError(f"times {times_us} must be positive and finite")
    return valid_entry


def _make_operator(result: TunedProblem) -> Mapping[str, Any]:
    op = (result.problem.kind, to_file_name(result.problem.role))
    lowering = result.after.lowering
    return {
        **make_operator_record(op, str(result.problem), result.before_us, result.us, result.status),
        "lowering": {**asdict(lowering), "family": to_file_name(lowering.family)},
        "ticks_best": list(map(str, result.rounds)),
    }
