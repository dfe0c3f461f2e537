"""The layout that a network is fastest in: from a bank, or timed and kept in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pipeline.core.files.knowledge_bank import Banks, Entry, Status, operator_record
from pipeline.models.lowerings.problem.image_layout import Layout
from pipeline.models.lowerings.tune.search import Mode

BUILT_IN = Path(__file__).parent / "built_in_layouts.json"
"""Bank of the shipped recipes, on the devices that its keys name."""

LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True)
class TimedLayout:
    """Times of a network's step in every layout, in microseconds."""

    key: str
    times_us: Mapping[Layout, float]
    status: Status

    @property
    def best(self) -> Layout:
        """The fastest layout."""
        return min(LAYOUTS, key=self.times_us.__getitem__)

    def to_operator(self) -> Mapping[str, Any]:
        """Entry of AutoTune's result file; `before_tune` is NHWC."""
        before_us, after_us = self.times_us["nhwc"], self.times_us[self.best]
        op = ("network", "layout")
        record = operator_record(op, self.key, before_us, after_us, self.status)
        return {**record, "layout": self.best}


def find_layout(
    key: str, mode: Mode, folder: Path, clock: Callable[[Layout], float]
) -> TimedLayout | None:
    """Look a network up in the banks, or time it by `clock` in each layout where the mode says so.

    Raises RunError for a bank that is not one.
    """
    banks = Banks(folder / "layouts.json", BUILT_IN, _checked)
    entry = banks.read().get(key)
    if mode != "repeat" and (entry is not None or mode == "bank"):
        return TimedLayout(key, _times_us(entry), "bank_hit") if entry is not None else None
    times_us = {layout: clock(layout) for layout in LAYOUTS}
    banks.add({key: dict(times_us.items())})
    return TimedLayout(key, times_us, "bank_append" if entry is None else "bank_update")


def _checked(entry: Entry) -> Entry:
    """The entry. Raises ValueError unless it has a positive number for every layout."""
    times_us = _times_us(entry)
    if not all(0 < us < float("inf") for us in times_us.values()):
        raise ValueError(f"times {times_us}")
    return dict(times_us.items())


def _times_us(entry: Entry) -> dict[Layout, float]:
    return {layout: float(entry[layout]) for layout in LAYOUTS}
