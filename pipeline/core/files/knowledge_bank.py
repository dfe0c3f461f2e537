"""Knowledge banks: files of tuned results, which tuners look up before they search."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import lock_folder, write_whole
from pipeline.core.files.bounded_read import read_json

BANK_VERSION = 1
Status = Literal["bank_append", "bank_hit", "bank_reserved", "bank_update"]
"""Relation of a result to the bank.

bank_append: stored for the first time. bank_hit: used from the bank. bank_reserved: in the bank,
and still the best after a new search. bank_update: in the bank, and replaced by a better result.
"""

Entry = Mapping[str, Any]
"""A tuned result, as JSON."""
UNTIMED = "default"
"""Key of an entry that was stored without timing: a default."""


@dataclass(frozen=True)
class Round:
    """The best time and the end of one round of a search; its text is in result files."""

    best_us: float
    """Shortest time that the search has found so far."""
    ended: datetime = field(default_factory=datetime.now, compare=False)

    def __str__(self) -> str:
        return f"[{self.best_us:g}, {self.ended:%Y-%m-%d %H:%M:%S}]"


def read_bank(path: Path, check_entry: Callable[[Entry], Entry]) -> dict[str, Entry]:
    """Return the entries of a knowledge bank by key; empty if the file is missing.

    `check_entry` returns a validated entry, and raises ValueError, LookupError or TypeError for an
    invalid entry. Raises RunError if the file can't be read or isn't a bank: without its entries,
    the run would use other lowerings and have other losses.
    """
    try:
        document = read_json(path)
        if document["version"] != BANK_VERSION:
            raise ValueError(f"version {document['version']}; must be {BANK_VERSION}")
        return {str(key): check_entry(entry) for key, entry in document["entries"].items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"{path}: the knowledge bank can't be read: {reason}") from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise RunError(
            f"{path}: not a knowledge bank of AutoTune ({type(error).__name__}: {error}); "
            "delete it or name another file"
        ) from error


def write_result(result: Mapping[str, Any], folder: Path, now: datetime) -> Path:
    """Write a result as JSON into the folder, and return the path. Raises OSError.

    The file is named as by CANN: `tune_result_pid{pid}_{YYYYMMDD_HHMMSSmmm}.json`.
    """
    stamp = f"{now:%Y%m%d_%H%M%S}{now.microsecond // 1000:03}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tune_result_pid{os.getpid()}_{stamp}.json"
    write_whole(path, json.dumps(result, indent=1) + "\n")
    return path


@dataclass(frozen=True)
class Banks:
    """Paths of the user's and the built-in knowledge bank; None for an absent bank.

    `check_entry` is as for `read_bank`.
    """

    custom: Path | None
    built_in: Path | None
    check_entry: Callable[[Entry], Entry]

    def read(self) -> dict[str, Entry]:
        """Return the entries of both banks by key.

        Entries of the user's bank replace built-in ones, except entries without timing. Raises
        RunError for a file that can't be read or isn't a bank.
        """
        entries: dict[str, Entry] = {}
        for path in (self.built_in, self.custom):
            bank = {} if path is None else read_bank(path, self.check_entry)
            entries |= {
                key: entry
                for key, entry in bank.items()
                if key not in entries or UNTIMED not in entry
            }
        return entries

    def add(self, entries: Mapping[str, Entry]) -> None:
        """Add entries to the user's bank, if there is one, beside those that other processes have
        added. Raises RunError if it can't be read or written, or isn't a bank."""
        path = self.custom
        if path is None:
            return
        try:
            with lock_folder(path.parent):
                bank = {**read_bank(path, self.check_entry), **entries}
                document = {"version": BANK_VERSION, "entries": dict(sorted(bank.items()))}
                write_whole(path, json.dumps(document, indent=1) + "\n")
        except OSError as error:
            reason = error.strerror or error
            raise RunError(f"{path}: the knowledge bank can't be written: {reason}") from error


class TimedResult(Protocol):
    """A result of a bank or a search."""

    @property
    def us(self) -> float:
        """Time of the tuned computation in microseconds."""


R = TypeVar("R", bound=TimedResult)


@dataclass(frozen=True)
class Tuned(Generic[R]):
    """The result to use, its status in the bank, and the result of the search, if there was one."""

    best: R
    status: Status
    searched: R | None = None


def reuse_or_search(banked: R | None, search: Callable[[], R], *, repeat: bool) -> Tuned[R]:
    """Return the bank's result, or search if the bank has none or `repeat` is true.

    After a repeated search, the faster of the two results is returned.
    """
    if banked is not None and not repeat:
        return Tuned(banked, "bank_hit")
    searched = search()
    if banked is None:
        return Tuned(searched, "bank_append", searched)
    if banked.us <= searched.us:
        return Tuned(banked, "bank_reserved", searched)
    return Tuned(searched, "bank_update", searched)


def make_operator_record(
    op: Sequence[str], key: str, before_us: float, after_us: float, status: Status
) -> dict[str, Any]:
    """Return the entry of one operator in a result file.

    Times are in microseconds; the status is a boolean for each name of `Status`. `bank_hit` is true
    for every result that was in a bank, also if it was searched again.
    """
    names: tuple[Status, ...] = get_args(Status)
    true_names = {status} if status == "bank_append" else {status, "bank_hit"}
    return {
        "op": list(op),
        "key": key,
        "result_data": {"before_tune": before_us, "after_tune": after_us},
        "status_data": {name: name in true_names for name in names},
    }
