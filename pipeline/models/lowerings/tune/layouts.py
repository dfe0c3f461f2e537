"""The fastest layout of a network: from a bank, or timed and written into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pipeline.core.files.knowledge_bank import Entry, Status
from pipeline.core.files.tuning_flow import Banks, operator_record
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
        op = ("network", "layout")
        times_us = (self.times_us["nhwc"], self.times_us[self.best])
        return {**operator_record(op, self.key, *times_us, self.status), "layout": self.best}


def find_layout(
    key: str, mode: Mode, folder: Path, clock: Callable[[Layout], float]
) -> TimedLayout | None:
    """Look a network up in the banks, or time it by `clock` in each layout if the mode says so.

    Raises RunError for a file that isn't a bank.
    """
    banks = Banks(folder / "layouts.json", BUILT_IN, check_layout_entry)
    entry = banks.read().get(key)
    if mode != "repeat" and (entry is not None or mode == "bank"):
        if entry is None:
            return None
        return TimedLayout(key, {layout: entry[layout] for layout in LAYOUTS}, "bank_hit")
    times_us = {layout: clock(layout) for layout in LAYOUTS}
    banks.add({key: dict(times_us.items())})
    return TimedLayout(key, times_us, "bank_append" if entry is None else "bank_update")


def check_layout_entry(entry: Entry) -> Entry:
    """The entry. Raises ValueError unless it has a positive number for every layout."""
    times_us = {str(layout): float(entry[layout]) for layout in LAYOUTS}
    if not all(0 < us < float("inf") for us in times_us.values()):
        raise ValueError(f"times {times_us}")
    return times_us
