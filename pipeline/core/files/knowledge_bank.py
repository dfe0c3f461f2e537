"""Files of search results (A-01..A-03): knowledge banks and results of tuning."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.folder_lock import locked
from pipeline.core.files.ownership import make_private

BANK_VERSION = 1
Status = Literal["bank_append", "bank_hit", "bank_reserved", "bank_update"]
"""Stored for the first time; used from the bank; in the bank and still the best after tuning
again; replaced by a better result."""

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Round:
    """The best time known at the end of one round of a search, in microseconds."""

    best_us: float
    ended: datetime = field(default_factory=datetime.now, compare=False)

    def __str__(self) -> str:
        return f"[{self.best_us:g}, {self.ended:%Y-%m-%d %H:%M:%S}]"


def ticks_best(rounds: Sequence[Round]) -> list[str]:
    """Rounds in the format of a result file."""
    return [str(each) for each in rounds]


def read_bank(path: Path, checked: Callable[[Entry], Entry]) -> dict[str, Entry]:
    """Entries of a knowledge bank by key; empty where there is no file.

    `checked` returns a validated entry, and raises for an invalid one. Raises RunError where the
    file can't be read or is not a bank: without its entries the losses would differ.
    """
    try:
        document = read_json(path)
        if document["version"] != BANK_VERSION:
            raise ValueError(f"version {document['version']}, this program reads {BANK_VERSION}")
        return {str(key): checked(entry) for key, entry in document["entries"].items()}
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


def add_to_bank(
    path: Path, entries: Mapping[str, Entry], checked: Callable[[Entry], Entry]
) -> None:
    """Add entries to a bank, keeping those that other processes have added meanwhile.

    Raises RunError where the file is not a bank, and where it can't be written.
    """
    try:
        with locked(path.parent):
            write_bank(path, {**read_bank(path, checked), **entries})
    except OSError as error:
        raise _unwritable(path, error) from error


def write_bank(path: Path, entries: Mapping[str, Entry]) -> None:
    """Write the bank atomically: a reader sees the old file or the new one.

    Raises RunError where it can't be written.
    """
    document = {"version": BANK_VERSION, "entries": dict(sorted(entries.items()))}
    try:
        make_private(path.parent)
        write_whole(path, json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(f"{path}: the knowledge bank can't be written: {error.strerror or error}")


def write_result(result: Mapping[str, Any], folder: Path, now: datetime) -> Path:
    """Write a result as JSON; its name is CANN's, `tune_result_pid{pid}_{YYYYMMDD_HHMMSSmmm}`."""
    stamp = f"{now:%Y%m%d_%H%M%S}{now.microsecond // 1000:03}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tune_result_pid{os.getpid()}_{stamp}.json"
    write_whole(path, json.dumps(result, indent=1) + "\n")
    return path
