"""The flow of A-01 with made-up times: what is looked up, tuned, kept and taken."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from pipeline.core.errors import RunError
from pipeline.core.files.knowledge_bank import read_bank
from pipeline.models.lowerings.candidates import FORMULAS, list_candidates
from pipeline.models.lowerings.problem import (
    CODE_NAMES,
    DEFAULT,
    DEFAULTS,
    Engine,
    Lowering,
    Lowerings,
    Problem,
)
from pipeline.models.lowerings.tune import tuner
from pipeline.models.lowerings.tune.machine import describe_device
from pipeline.models.lowerings.tune.tuner import LoweringChoice, Mode, Tuning, choose_lowerings
from tests.models.lowerings.problems import parse_problem
from tests.models.lowerings.tune.made_up import (
    BOTH,
    ONEDNN,
    PLAIN,
    THREE,
    XLA,
    MadeUpStopwatch,
    Times,
    Watched,
    broken_stopwatch,
    by_engine,
    by_name,
    convolution,
)

DEVICE = jax.devices("cpu")[0]
LARGE = convolution("forward", channels=64, size=32, batch=32)
"""Wide and heavy enough for the rule to take oneDNN."""


class Bench:
    """The tuner with a stopwatch, engines and a folder that a test may change."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.built_in = folder / "built_in.json"
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(tuner, "BUILT_IN", self.built_in)
        monkeypatch.setattr(tuner, "Stopwatch", broken_stopwatch)
        self.have(BOTH)

    def have(self, engines: frozenset[Engine]) -> None:
        """Let these be the engines of the machine."""
        self._monkeypatch.setattr(tuner, "find_engines", lambda *_: engines)

    def time_by(self, times: Times) -> MadeUpStopwatch:
        """Let timing be allowed, with these for results."""
        stopwatch = MadeUpStopwatch(times)
        self._monkeypatch.setattr(tuner, "Stopwatch", stopwatch)
        return stopwatch

    def choose(
        self, mode: Mode, problems: Sequence[Problem] = THREE, **changes: Any
    ) -> LoweringChoice:
        """The tuner's choice, by default on the CPU."""
        tuning = Tuning(mode, changes.get("strategy", "exhaustive"), self.folder / "autotune")
        watch = changes.get("watch", Watched())
        return choose_lowerings(problems, changes.get("device", DEVICE), tuning, watch)

    @property
    def bank(self) -> Path:
        return self.folder / "autotune" / "lowerings.json"

    @property
    def entries(self) -> dict[str, Any]:
        """Entries of the user's bank, without the device in the keys."""
        entries = json.loads(self.bank.read_text())["entries"]
        end = f" on {describe_device(DEVICE)}"
        assert all(key.endswith(end) for key in entries)
        return {key.removesuffix(end): entry for key, entry in entries.items()}


def write(path: Path, problem: Problem, after: str, after_us: Any, plain: str, us: Any) -> None:
    """A bank of one entry, whose default takes as long as the best of XLA's."""
    entry = {
        "before_us": us,
        "after": {"lowering": after, "us": after_us},
        "plain": {"lowering": plain, "us": us},
    }
    path.parent.mkdir(exist_ok=True)
    key = f"{problem} on {describe_device(DEVICE)}"
    path.write_text(json.dumps({"version": 1, "entries": {key: entry}}))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def taken(chosen: LoweringChoice, problems: Sequence[Problem] = THREE) -> list[str]:
    return [str(chosen.lowerings.choose(problem)) for problem in problems]


@pytest.mark.parametrize(
    ("mode", "device"),
    [("off", DEVICE), ("tune", SimpleNamespace(platform="gpu", device_kind="made up"))],
    ids=["off", "no processor"],
)
def test_bank_is_not_read_if_off_or_on_an_accelerator(
    mode: Mode, device: Any, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even in a bank that can't be read."""
    bench.bank.parent.mkdir()
    bench.bank.write_text("no bank")
    monkeypatch.setattr(tuner, "find_engines", lambda *_: pytest.fail("asked for engines"))
    chosen = bench.choose(mode, device=device)
    assert chosen == LoweringChoice(DEFAULTS, (), 0)
    assert taken(chosen) == ["default/xla"] * 3


def test_problems_without_an_entry_are_decided_by_the_rule(bench: Bench) -> None:
    chosen = bench.choose("bank", [*THREE, LARGE])
    assert taken(chosen, [*THREE, LARGE]) == ["default/xla"] * 3 + ["winograd4/onednn/4"]
    assert (chosen.results, chosen.num_by_rule, chosen.num_timed) == ((), 4, 0)


def test_defaults_are_stored_without_a_time(bench: Bench) -> None:
    """A-01: a miss without tuning stores the default, which is used ever after."""
    first = bench.choose("bank", [*THREE, LARGE])
    assert bench.entries == {
        **{str(problem): {"default": "default/xla"} for problem in THREE},
        str(LARGE): {"default": "winograd4/onednn/4"},
    }
    document = json.loads(bench.bank.read_text())
    key = f"{THREE[0]} on {describe_device(DEVICE)}"
    document["entries"][key] = {"default": "patches/xla"}
    bench.bank.write_text(json.dumps(document))
    written = bench.bank.read_bytes()
    again = bench.choose("bank", [*THREE, LARGE])
    assert taken(again, [*THREE, LARGE]) == ["patches/xla", *taken(first, [*THREE, LARGE])[1:]]
    assert (again.results, again.num_by_rule, again.num_timed) == ((), 4, 0)
    assert bench.bank.read_bytes() == written


@pytest.mark.parametrize("mode", ["tune", "repeat"])
def test_stored_default_is_tuned(mode: Mode, bench: Bench) -> None:
    bench.choose("bank")
    bench.time_by(by_engine(5000.0, 1000.0))
    chosen = bench.choose(mode)
    assert [result.status for result in chosen.results] == ["bank_update"] * 3
    assert {entry["after"]["us"] for entry in bench.entries.values()} == {1000.0}


def test_default_is_chosen_again_if_onednn_becomes_available(bench: Bench) -> None:
    bench.have(XLA)
    assert taken(bench.choose("bank", [LARGE]), [LARGE]) == ["default/xla"]
    bench.have(BOTH)
    assert taken(bench.choose("bank", [LARGE]), [LARGE]) == ["winograd4/onednn/4"]


def test_time_of_a_lesser_instruction_set_is_preferred_to_a_default(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.choose("bank", THREE[:1])
    scope = describe_device(DEVICE)
    monkeypatch.setattr(tuner, "list_scopes", lambda _: (scope, "cpu lesser"))
    entry = {name: {"lowering": "patches/xla", "us": 1.0} for name in ("after", "plain")}
    document = json.loads(bench.bank.read_text())
    document["entries"][f"{THREE[0]} on cpu lesser"] = {"before_us": 2.0, **entry}
    bench.bank.write_text(json.dumps(document))
    assert taken(bench.choose("bank", THREE[:1]))[0] == "patches/xla"


def test_unstorable_default_is_used(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RunError("disk full")

    monkeypatch.setattr(tuner.Banks, "add", fail)
    assert taken(bench.choose("bank")) == ["default/xla"] * 3


def test_rule_chooses_the_default_if_only_xla_is_available(bench: Bench) -> None:
    bench.have(XLA)
    chosen = bench.choose("bank", [LARGE])
    assert chosen.lowerings.choose(LARGE) == DEFAULT


@pytest.mark.parametrize("strategy", ["exhaustive", "ga"])
def test_tuned_entries_are_stored_and_reused(strategy: str, bench: Bench) -> None:
    stopwatch = bench.time_by(by_engine(5000.0, 1000.0))
    watch = Watched()
    first = bench.choose("tune", strategy=strategy, watch=watch)
    assert [found.status for found in first.results] == ["bank_append"] * 3
    assert (first.num_timed, first.num_by_rule) == (3, 0)
    assert stopwatch.problems == list(THREE)
    assert watch.names == [str(problem) for problem in THREE]
    assert set(bench.entries) == set(watch.names)

    written = bench.bank.read_bytes()
    bench.time_by(lambda *_: pytest.fail("timed again"))
    for mode in ("tune", "bank"):
        watch = Watched()
        again = bench.choose(mode, watch=watch)
        assert [found.status for found in again.results] == ["bank_hit"] * 3
        assert again.lowerings == first.lowerings
        assert (again.num_timed, again.num_by_rule, watch.names) == (0, 0, [])
    assert bench.bank.read_bytes() == written


def test_exhaustive_tuning_chooses_the_fastest_candidate(bench: Bench) -> None:
    fastest = {"forward": "patches/onednn", "input_grad": "convolution/onednn"}
    fastest["weight_grad"] = "positions/xla"

    def times(problem: Problem, how: Lowering) -> float:
        return 2000.0 if str(how) == fastest[problem.role] else 5000.0

    stopwatch = bench.time_by(times)
    chosen = bench.choose("tune")
    assert taken(chosen) == list(fastest.values())
    expected = [
        (problem, lowering) for problem in THREE for lowering in list_candidates(problem, BOTH)
    ]
    assert sorted(stopwatch.asked, key=str) == sorted(expected, key=str)


def test_bank_entry_has_the_default_the_best_and_the_best_of_xla(bench: Bench) -> None:
    times_us = {"convolution/xla": 900.0, "patches/xla": 800.0, "convolution/onednn": 300.0}
    bench.time_by(by_name(times_us))
    bench.choose("tune", THREE[:1])
    assert bench.entries == {
        str(THREE[0]): {
            "before_us": 900.0,
            "after": {"lowering": "convolution/onednn", "us": 300.0},
            "plain": {"lowering": "patches/xla", "us": 800.0},
        }
    }


def test_default_is_stored_if_it_is_the_fastest(bench: Bench) -> None:
    """A-01: so that the next run need not tune again."""
    bench.time_by(by_engine(100.0, 200.0))
    chosen = bench.choose("tune")
    assert taken(chosen) == ["convolution/xla"] * 3
    assert all(entry["after"]["us"] == entry["before_us"] for entry in bench.entries.values())


def test_tuning_adds_to_existing_entries(bench: Bench) -> None:
    bench.time_by(by_engine(5000.0, 1000.0))
    bench.choose("tune", THREE[:1])
    before = bench.entries
    stopwatch = bench.time_by(by_engine(4000.0, 1000.0))
    chosen = bench.choose("tune")
    assert [found.status for found in chosen.results] == ["bank_hit", "bank_append", "bank_append"]
    assert stopwatch.problems == list(THREE[1:])
    assert {**bench.entries, **before} == bench.entries
    assert len(bench.entries) == 3


def test_repeated_tuning_keeps_better_entries(bench: Bench) -> None:
    bench.time_by(by_engine(5000.0, 1000.0))
    bench.choose("tune")
    written = bench.bank.read_bytes()
    stopwatch = bench.time_by(by_engine(1500.0, 2000.0))
    chosen = bench.choose("repeat")
    assert [found.status for found in chosen.results] == ["bank_reserved"] * 3
    assert taken(chosen) == ["convolution/onednn"] * 3
    assert {found.after.us for found in chosen.results} == {1000.0}
    assert bench.bank.read_bytes() == written
    assert (stopwatch.problems, chosen.num_timed) == (list(THREE), 3)


def test_repeated_tuning_keeps_unchanged_entries(bench: Bench) -> None:
    bench.time_by(by_engine(5000.0, 1000.0))
    bench.choose("tune")
    again = bench.choose("repeat")
    assert [found.status for found in again.results] == ["bank_reserved"] * 3


def test_repeated_tuning_replaces_worse_entries(bench: Bench) -> None:
    bench.time_by(by_engine(5000.0, 1000.0))
    bench.choose("tune")
    bench.time_by(by_engine(300.0, 2000.0))
    chosen = bench.choose("repeat", THREE[:2])
    assert [found.status for found in chosen.results] == ["bank_update"] * 2
    assert taken(chosen) == ["convolution/xla"] * 2 + ["default/xla"]
    best_us = [bench.entries[str(problem)]["after"]["us"] for problem in THREE]
    assert best_us == [300.0, 300.0, 1000.0]


def test_repeated_tuning_stores_new_entries(bench: Bench) -> None:
    bench.time_by(by_engine(300.0, 2000.0))
    assert [found.status for found in bench.choose("repeat").results] == ["bank_append"] * 3
    assert len(bench.entries) == 3


def test_built_in_bank_is_used_and_not_changed(bench: Bench) -> None:
    write(bench.built_in, THREE[0], "patches/xla", 100.0, "patches/xla", 200.0)
    built_in = bench.built_in.read_bytes()
    assert taken(bench.choose("bank"))[0] == "patches/xla"
    bench.time_by(by_engine(10.0, 20.0))
    (found,) = bench.choose("repeat", THREE[:1]).results
    assert (found.status, found.before_us) == ("bank_update", 10.0)
    assert bench.built_in.read_bytes() == built_in
    assert bench.entries[str(THREE[0])]["before_us"] == 10.0


def test_user_bank_has_precedence_over_the_built_in_one(bench: Bench) -> None:
    write(bench.built_in, THREE[0], "patches/xla", 100.0, "patches/xla", 100.0)
    write(bench.bank, THREE[0], "convolution/xla", 200.0, "convolution/xla", 200.0)
    assert taken(bench.choose("bank"))[0] == "convolution/xla"


@pytest.mark.parametrize(
    ("after", "plain"),
    [
        ("convolution/onednn", "convolution/xla"),
        ("winograd/xla", "convolution/xla"),
        ("convolution/xla/3", "convolution/xla"),
        ("convolution/xla", "winograd/xla"),
    ],
    ids=["an engine that is gone", "a family that is gone", "a chunk", "without oneDNN"],
)
def test_uncomputable_entry_is_not_used(after: str, plain: str, bench: Bench) -> None:
    """As when another version of jaxlib has left oneDNN out."""
    bench.have(XLA)
    write(bench.bank, THREE[0], after, 10.0, plain, 20.0)
    chosen = bench.choose("bank", THREE[:1])
    assert (taken(chosen)[0], chosen.num_by_rule) == ("default/xla", 1)
    bench.time_by(by_engine(100.0, 50.0))
    (found,) = bench.choose("tune", THREE[:1]).results
    assert (found.status, str(found.after.lowering)) == ("bank_append", "convolution/xla")


def test_entry_of_another_device_is_not_used(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.time_by(by_engine(5000.0, 1000.0))
    bench.choose("tune")
    monkeypatch.setattr(tuner, "list_scopes", lambda _: ("cpu of another kind",))
    assert bench.choose("bank").num_by_rule == 3


def test_lesser_instruction_set_entries_are_used_until_retuned(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.time_by(by_engine(100.0, 5000.0))
    monkeypatch.setattr(tuner, "list_scopes", lambda _: ("cpu lesser",))
    bench.choose("tune", THREE[:2])
    monkeypatch.setattr(tuner, "list_scopes", lambda _: ("cpu better", "cpu lesser"))
    chosen = bench.choose("bank")
    assert chosen.num_by_rule == 1
    assert taken(chosen)[:2] == [str(PLAIN)] * 2
    bench.time_by(by_engine(5000.0, 100.0))
    found = bench.choose("tune").results
    assert [result.status for result in found] == ["bank_append", "bank_append", "bank_update"]
    assert taken(bench.choose("bank")) == [str(ONEDNN)] * 3


BROKEN = [
    "",
    "{",
    "[]",
    '{"version": 1}',
    '{"version": 2, "entries": {}}',
    '{"version": 1, "entries": {"a": {}}}',
    '{"version": 1, "entries": {"a": "patches/xla"}}',
]


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("mode", ["bank", "tune", "repeat"])
def test_broken_bank_is_reported_and_not_changed(mode: Mode, text: str, bench: Bench) -> None:
    bench.bank.parent.mkdir()
    bench.bank.write_text(text)
    with pytest.raises(RunError, match=r"lowerings\.json: not a knowledge bank .* delete it"):
        bench.choose(mode)
    assert bench.bank.read_text() == text


@pytest.mark.parametrize(
    ("lowering", "us"),
    [
        ("im2col", 1.0),
        ("patches/mkl", 1.0),
        ("patches/xla/some", 1.0),
        ("patches/xla", 0.0),
        ("patches/xla", -1.0),
        ("patches/xla", float("nan")),
        ("patches/xla", float("inf")),
        ("patches/xla", "soon"),
        ("patches/xla", None),
        (7, 1.0),
    ],
)
def test_invalid_entry_makes_the_bank_invalid(lowering: Any, us: Any, bench: Bench) -> None:
    write(bench.bank, THREE[0], lowering, us, "convolution/xla", 2.0)
    with pytest.raises(RunError, match=r"lowerings\.json: not a knowledge bank of AutoTune"):
        bench.choose("bank")


def test_entries_tuned_before_an_error_are_stored(bench: Bench) -> None:
    def times(problem: Problem, how: Lowering) -> float:
        if problem == THREE[2] and how != PLAIN:
            raise KeyboardInterrupt
        return 100.0

    bench.time_by(times)
    with pytest.raises(KeyboardInterrupt):
        bench.choose("tune")
    assert set(bench.entries) == {str(problem) for problem in THREE[:2]}
    stopwatch = bench.time_by(by_engine(100.0, 100.0))
    bench.choose("tune")
    assert stopwatch.problems == [THREE[2]]


@pytest.mark.parametrize(
    ("xla_us", "onednn_us", "engine"),
    [
        (2000.0, 1500.0, "onednn"),
        (400.0, 100.0, "xla"),
        (10_000.0, 9500.0, "xla"),
        (10_000.0, 8500.0, "onednn"),
    ],
    ids=["much of both", "only 0.9 ms a step", "only a twentieth", "a seventh"],
)
def test_onednn_is_used_only_if_it_saves_enough(
    xla_us: float, onednn_us: float, engine: Engine, bench: Bench
) -> None:
    """More than a millisecond a step and more than a tenth, of all three computations together."""
    bench.time_by(by_engine(xla_us, onednn_us))
    for _ in range(2):
        chosen = bench.choose("tune")
        assert taken(chosen) == [f"convolution/{engine}"] * 3
    assert {entry["after"]["lowering"] for entry in bench.entries.values()} == {str(ONEDNN)}


def test_best_xla_lowering_is_used_if_onednn_is_not_worthwhile(bench: Bench) -> None:
    bench.time_by(by_name({"convolution/onednn": 100.0, "patches/xla": 200.0, str(PLAIN): 500.0}))
    assert taken(bench.choose("tune", THREE[:1]))[0] == "patches/xla"


def test_onednn_is_used_everywhere_if_the_rule_uses_it_once(bench: Bench) -> None:
    """The program can't be kept then anyway."""
    bench.time_by(by_engine(400.0, 300.0))
    bench.choose("tune")
    assert taken(bench.choose("bank")) == ["convolution/xla"] * 3
    assert taken(bench.choose("bank", [*THREE, LARGE])) == ["convolution/onednn"] * 3


def test_result_has_times_before_and_after_and_bank_status(bench: Bench) -> None:
    bench.time_by(by_engine(5000.0, 1000.0))
    bench.choose("tune", THREE[:1])
    result = json.loads(json.dumps(bench.choose("tune").to_result()))
    assert result["result_data"] == {"before_tune": 15_000.0, "after_tune": 3000.0}
    assert [operator["key"] for operator in result["operators"]] == [str(p) for p in THREE]
    assert result["operators"][0]["status_data"] == {
        "bank_append": False,
        "bank_hit": True,
        "bank_reserved": False,
        "bank_update": False,
    }
    (tick,) = result["operators"][1].pop("ticks_best")
    assert re.fullmatch(r"\[1000, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]", tick)
    assert result["operators"][1] == {
        "op": ["conv2d", "images_gradient"],
        "key": str(THREE[1]),
        "result_data": {"before_tune": 5000.0, "after_tune": 1000.0},
        "status_data": {
            "bank_append": True,
            "bank_hit": False,
            "bank_reserved": False,
            "bank_update": False,
        },
        "lowering": {"family": "convolution", "engine": "onednn", "images": None},
    }


def test_repeated_tuning_result_has_the_stored_entry(bench: Bench) -> None:
    bench.time_by(by_engine(5000.0, 1000.0))
    bench.choose("tune")
    bench.time_by(by_engine(1500.0, 2000.0))
    result = bench.choose("repeat").to_result()
    assert len(result["operators"]) == len(THREE)
    for operator in result["operators"]:
        assert [name for name, is_so in operator["status_data"].items() if is_so] == [
            "bank_hit",
            "bank_reserved",
        ]
        assert operator["result_data"] == {"before_tune": 5000.0, "after_tune": 1000.0}
        assert [tick.split(",")[0] for tick in operator["ticks_best"]] == ["[1500"]


def test_network_without_convolutions_needs_no_choice(bench: Bench) -> None:
    assert bench.choose("tune", []).lowerings == Lowerings()


SHIPPED = json.loads(tuner.BUILT_IN.read_text())


def test_built_in_bank_is_valid() -> None:
    assert read_bank(tuner.BUILT_IN, tuner.check_lowering_entry) == SHIPPED["entries"]


def test_built_in_bank_entries_are_candidates() -> None:
    """Others would be looked up in vain."""
    for key, entry in SHIPPED["entries"].items():
        text, _, device = key.partition(" on ")
        kind, role, *_ = text.split()
        assert device.startswith("cpu ")
        assert entry["after"]["us"] <= entry["plain"]["us"] <= entry["before_us"], key
        for name, engines in (("after", BOTH), ("plain", XLA)):
            lowering = Lowering.parse(entry[name]["lowering"])
            family = FORMULAS[kind][CODE_NAMES.get(role, role)][lowering.family]
            assert lowering.engine in family.engines
            assert family.chunked or lowering.images is None
            if kind == "conv2d":
                problem = parse_problem(text)
                assert lowering in list_candidates(problem, engines), f"{name} of {key}"


def test_engines_are_probed_once_for_each_type(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def find(_: object, dtype: str, __: Path) -> frozenset[Engine]:
        asked.append(dtype)
        return XLA

    monkeypatch.setattr(tuner, "find_engines", find)
    bench.time_by(by_engine(2.0, 1.0))
    bench.choose("tune")
    assert asked == ["float32"]


def test_engines_are_not_probed_if_nothing_can_use_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe takes a process and most of a second."""
    monkeypatch.setattr(tuner, "find_engines", None)
    assert taken(bench.choose("bank")) == ["default/xla"] * len(THREE)
    write(bench.built_in, THREE[0], "patches/xla", 1.0, "patches/xla", 2.0)
    assert taken(bench.choose("bank")) == ["patches/xla"] + ["default/xla"] * (len(THREE) - 1)


def test_initial_lowerings_of_a_run_are_independent_of_the_bank(bench: Bench) -> None:
    kept = Lowerings(((str(LARGE), Lowering("convolution", "onednn")),))
    tuning = Tuning("repeat", "exhaustive", bench.folder, kept)
    assert choose_lowerings((LARGE,), DEVICE, tuning, Watched()).lowerings == kept


@pytest.mark.parametrize(
    "lowering", ["nonsense/xla", "convolution/xla/7", "pixels/xla", "phases/xla"]
)
def test_uncomputable_resumed_lowering_is_refused(lowering: str, bench: Bench) -> None:
    kept = Lowerings(((str(LARGE), Lowering.parse(lowering)),))
    with pytest.raises(
        RunError, match=f"{lowering} can't compute conv2d forward .* as this run did"
    ):
        choose_lowerings(
            (LARGE,), DEVICE, Tuning("bank", "exhaustive", bench.folder, kept), Watched()
        )


def test_resumed_lowering_of_a_missing_engine_is_refused(bench: Bench) -> None:
    bench.have(XLA)
    kept = Lowerings(((str(LARGE), Lowering("convolution", "onednn")),))
    with pytest.raises(RunError, match="convolution/onednn can't compute"):
        choose_lowerings(
            (LARGE,), DEVICE, Tuning("bank", "exhaustive", bench.folder, kept), Watched()
        )
