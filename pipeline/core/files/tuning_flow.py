"""The flow of every tuner (A-01): look in the banks, search if needed, keep the faster result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, get_args

from pipeline.core.files.knowledge_bank import Entry, Status, add_to_bank, read_bank


@dataclass(frozen=True)
class Banks:
    """The user's knowledge bank and the built-in one; None: there is none.

    `checked` returns an entry, and raises where it is not one.
    """

    custom: Path | None
    built_in: Path | None
    checked: Callable[[Entry], Entry]

    def read(self) -> dict[str, Entry]:
        """Entries of both by key; where both have a key, that of the user's bank.

        Raises RunError for a file that is not a bank.
        """
        paths = (path for path in (self.built_in, self.custom) if path is not None)
        return {
            key: entry for path in paths for key, entry in read_bank(path, self.checked).items()
        }

    def add(self, entries: Mapping[str, Entry]) -> None:
        """Write entries into the user's bank, if there is one. Raises RunError."""
        if self.custom is not None:
            add_to_bank(self.custom, entries, self.checked)


class TimedResult(Protocol):
    """A result of a bank or a search."""

    @property
    def us(self) -> float:
        """Its time in microseconds."""


R = TypeVar("R", bound=TimedResult)


@dataclass(frozen=True)
class Tuned(Generic[R]):
    """The result to use, its status in the bank, and that of the search, if there was one."""

    best: R
    status: Status
    searched: R | None = None


def reuse_or_search(banked: R | None, search: Callable[[], R], *, repeat: bool) -> Tuned[R]:
    """Use the bank's result, or search where it has none or `repeat` is true.

    Of a bank's result and that of a repeated search the faster one is used.
    """
    if banked is not None and not repeat:
        return Tuned(banked, "bank_hit")
    searched = search()
    if banked is None:
        return Tuned(searched, "bank_append", searched)
    if banked.us <= searched.us:
        return Tuned(banked, "bank_reserved", searched)
    return Tuned(searched, "bank_update", searched)


def operator_record(
    op: Sequence[str], key: str, before_us: float, after_us: float, status: Status
) -> dict[str, Any]:
    """One operator of a result file (A-03): times in microseconds, the status as booleans."""
    names: tuple[Status, ...] = get_args(Status)
    return {
        "op": list(op),
        "key": key,
        "result_data": {"before_tune": before_us, "after_tune": after_us},
        "status_data": {name: status == name for name in names},
    }
