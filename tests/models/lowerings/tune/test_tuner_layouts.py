"""Layouts of networks with made-up times: what is looked up, timed, kept and taken (A-01)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.core.errors import RunError
from pipeline.core.files.knowledge_bank import BANK_VERSION, read_bank
from pipeline.models.lowerings.problem import Layout
from pipeline.models.lowerings.tune import tuner
from pipeline.models.lowerings.tune.tuner import TimedLayout, find_layout

KEY = "network 0123 4x8x8x1 float32 on some cpu"
TIMES: dict[Layout, float] = {"nhwc": 3.0, "chwn": 2.0}


class Clock:
    """Tells what a test wants, and takes down what was asked."""

    def __init__(self, times_us: dict[Layout, float]) -> None:
        self._times_us = times_us
        self.asked: list[Layout] = []

    def __call__(self, layout: Layout) -> float:
        self.asked.append(layout)
        return self._times_us[layout]


@pytest.fixture(autouse=True)
def nothing_built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "BUILT_IN_LAYOUTS", tmp_path / "none.json")


def test_empty_bank_returns_no_layout(tmp_path: Path) -> None:
    clock = Clock(TIMES)
    assert find_layout(KEY, "bank", tmp_path, clock) is None
    assert (clock.asked, list(tmp_path.iterdir())) == ([], [])


def test_tuning_times_every_layout_once_and_stores_the_times(tmp_path: Path) -> None:
    clock = Clock(TIMES)
    found = find_layout(KEY, "tune", tmp_path, clock)
    assert found == TimedLayout(KEY, TIMES, "bank_append")
    assert found.best == "chwn"
    assert sorted(clock.asked) == ["chwn", "nhwc"]
    bank = json.loads((tmp_path / "layouts.json").read_text())
    assert bank == {"version": BANK_VERSION, "entries": {KEY: TIMES}}
    for mode in ("bank", "tune"):
        again = find_layout(KEY, mode, tmp_path, Clock({}))
        assert again == TimedLayout(KEY, TIMES, "bank_hit")


def test_repeated_tuning_replaces_the_layout_if_faster(tmp_path: Path) -> None:
    find_layout(KEY, "tune", tmp_path, Clock(TIMES))
    found = find_layout(KEY, "repeat", tmp_path, Clock({"nhwc": 1.0, "chwn": 2.0}))
    assert found is not None
    assert (found.best, found.status) == ("nhwc", "bank_update")
    kept = find_layout(KEY, "bank", tmp_path, Clock({}))
    assert kept is not None
    assert kept.best == "nhwc"


def test_repeated_tuning_keeps_the_faster_layout(tmp_path: Path) -> None:
    find_layout(KEY, "tune", tmp_path, Clock(TIMES))
    slower = {layout: 2 * us for layout, us in TIMES.items()}
    found = find_layout(KEY, "repeat", tmp_path, Clock(slower))
    assert found == TimedLayout(KEY, TIMES, "bank_reserved")
    assert find_layout(KEY, "bank", tmp_path, Clock({})) == TimedLayout(KEY, TIMES, "bank_hit")


def test_user_bank_has_precedence_over_the_built_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_in = tmp_path / "built_in.json"
    entries = {KEY: {"nhwc": 1.0, "chwn": 2.0}}
    built_in.write_text(json.dumps({"version": BANK_VERSION, "entries": entries}))
    monkeypatch.setattr(tuner, "BUILT_IN_LAYOUTS", built_in)
    folder = tmp_path / "user"
    found = find_layout(KEY, "bank", folder, Clock({}))
    assert found is not None
    assert found.best == "nhwc"
    find_layout(KEY, "repeat", folder, Clock({"nhwc": 1.0, "chwn": 0.5}))
    found = find_layout(KEY, "bank", folder, Clock({}))
    assert found is not None
    assert found.best == "chwn"


def test_result_file_has_the_gain_over_nhwc() -> None:
    operator = TimedLayout(KEY, TIMES, "bank_append").to_operator()
    assert operator["op"] == ["network", "layout"]
    assert operator["result_data"] == {"before_tune": 3.0, "after_tune": 2.0}
    assert [name for name, is_so in operator["status_data"].items() if is_so] == ["bank_append"]
    assert (operator["key"], operator["layout"]) == (KEY, "chwn")


@pytest.mark.parametrize("entry", [{}, {"nhwc": 1.0}, {"nhwc": 0, "chwn": 1}, {"nhwc": "a"}, 7])
def test_invalid_bank_is_reported(entry: object, tmp_path: Path) -> None:
    file = tmp_path / "layouts.json"
    file.write_text(json.dumps({"version": BANK_VERSION, "entries": {KEY: entry}}))
    with pytest.raises(RunError, match=r"layouts\.json: not a knowledge bank"):
        find_layout(KEY, "bank", tmp_path, Clock(TIMES))


def test_built_in_layout_bank_is_valid() -> None:
    entries = read_bank(
        Path(tuner.__file__).parent / "built_in_layouts.json", tuner.check_layout_entry
    )
    assert all(key.startswith("network ") and " on cpu " in key for key in entries)
