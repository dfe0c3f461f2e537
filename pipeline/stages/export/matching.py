"""Matching of a weight file's entries with a network's arrays, and a table of the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.error_text import shown
from pipeline.core.files.value_text import align_columns
from pipeline.models.weights.files.named_arrays import BFLOAT16, Arrays
from pipeline.models.weights.rules.syntax import Framework
from pipeline.stages.export.axis_order import to_own_layout
from pipeline.stages.export.naming import NamedEntry, framework_of, name_entries
from pipeline.stages.export.network import NetworkArrays

Rules = Literal["auto", "none", "torch", "mindspore"]
Status = Literal["matched", "missing", "extra", "misshapen", "skipped", "added", "tied"]
PROBLEMS: tuple[Status, ...] = ("missing", "extra", "misshapen")
HARMLESS: tuple[Status, ...] = ("skipped", "added", "tied")
MAX_ROWS = 60


class Rename(Protocol):
    """A rule of the user's that renames entries of a file."""

    @property
    def match(self) -> str:
        """The pattern as the user wrote it."""

    @property
    def pattern(self) -> Any:
        """The compiled pattern, to be matched against entire names."""

    def apply(self, name: str) -> str | None:
        """The new name of an entry that `pattern` matches; None if it is skipped."""


@dataclass(frozen=True)
class MatchRow:
    """One row of the table: an entry of the file, an array of the network, or a match."""

    status: Status
    source: str
    """The name in the file; empty for a missing entry."""
    found: tuple[int, ...] | None
    target: str
    """The network's name; empty for an entry without an array."""
    needed: tuple[int, ...] | None
    note: str = ""


@dataclass(frozen=True)
class Matching:
    """The arrays of a file under the names, and in the layout, of a network."""

    file: str
    rules: Framework | None
    """The framework whose names the file has; None for the network's own."""
    rows: tuple[MatchRow, ...]
    arrays: Arrays
    """The matched arrays, float32."""

    def require(self, *, partial: bool) -> None:
        """Raise DataError with a table of the problems, unless `partial` allows them.

        Where no array matches, it is always raised.
        """
        problems = [row for row in self.rows if row.status in PROBLEMS]
        if not problems or (partial and self.arrays):
            return
        hint = (
            "nothing is loaded; rename entries with checkpoint.renames, "
            "or load what matches with checkpoint.partial=true"
        )
        raise DataError(f"{self.file}: {self.counts()}; {hint}\n{table(problems)}")

    def counts(self) -> str:
        """`62 of 62 arrays matched, 1 skipped`."""
        found = Counter(row.status for row in self.rows)
        needed = found["matched"] + found["missing"] + found["misshapen"]
        others = (*PROBLEMS, *HARMLESS)
        rest = [f"{found[status]} {status}" for status in others if found[status]]
        whose = self.rules or "own"
        matched = f"{found['matched']} of {needed} arrays matched ({whose} names)"
        return ", ".join([matched, *rest])


@dataclass(frozen=True)
class MatchedSoFar:
    """The network's arrays that earlier entries matched, and the names of those entries."""

    arrays: Arrays
    origins: Mapping[str, str]

    def add(self, row: MatchRow, array: np.ndarray) -> tuple[MatchRow, np.ndarray | None]:
        """Add the first row of an array to every row of the matched one of the same target."""
        rows = self.arrays.get(row.target)
        if rows is None:
            return replace(row, status="extra", note="nothing to add it to"), None
        if array.ndim != rows.ndim or array.shape[1:] != rows.shape[1:] or not len(array):
            return replace(row, status="misshapen", note="has other rows"), None
        return row, rows + array[:1]

    def compare(self, row: MatchRow, array: np.ndarray) -> MatchRow:
        """Compare a second entry of a target: equal values are one array that is used twice."""
        origin = shown(self.origins[row.target])
        if np.array_equal(array, self.arrays[row.target]):
            return replace(row, note=f"the same values as {origin}")
        return replace(row, status="extra", note=f"{origin} is that already")


def match_weights(
    file: str,
    arrays: Arrays,
    network: NetworkArrays,
    renames: Sequence[Rename] = (),
    rules: Rules = "auto",
) -> Matching:
    """Match the entries of a file with the network's arrays. The user's rules come first.

    Raises DataError for a rule of the user's that matches no entry, and for a network whose weights
    can't be converted.
    """
    if rules == "auto":
        framework = framework_of(file, arrays, network)
    else:
        framework = None if rules == "none" else rules
    if framework is not None and network.unconverted:
        raise DataError(
            f"{file}: has names of {framework}, and its weights can't be converted for model "
            f"{network.model}: {network.unconverted}"
        )
    renamed = _rename(file, arrays, renames)
    rows: list[MatchRow] = []
    found: Arrays = {}
    origins: dict[str, str] = {}
    entries = list(name_entries(file, renamed, network, framework))
    for entry in sorted(entries, key=lambda entry: entry.added):
        row, array = _match(entry, network, framework, MatchedSoFar(found, origins))
        rows.append(row)
        if array is not None:
            found[row.target] = array
            origins[row.target] = row.source
    reached = {row.target for row in rows if row.status in ("matched", "misshapen")}
    missing = [name for name in network.shapes if name not in reached]
    rows += [MatchRow("missing", "", None, name, network.shapes[name]) for name in missing]
    return Matching(file, framework, tuple(rows), found)


def table(rows: Iterable[MatchRow], limit: int | None = MAX_ROWS) -> str:
    """The rows as text in columns, one line each, at most `limit`."""
    cells = [
        (
            row.status,
            shown(row.source) or "-",
            _shape(row.found),
            shown(row.target) or "-",
            _shape(row.needed),
            row.note,
        )
        for row in rows
    ]
    left = len(cells) - (limit or len(cells))
    head = ("", "in the file", "shape", "in the network", "shape", "")
    texts = align_columns([head, *cells[:limit]])
    return "\n".join([*texts, *([f"... and {left} more"] if left > 0 else [])])


def _rename(
    file: str, arrays: Arrays, renames: Sequence[Rename]
) -> dict[str, tuple[str | None, np.ndarray]]:
    """The entries with the new names of the user's rules; the first matching rule applies."""
    used: set[int] = set()
    renamed: dict[str, tuple[str | None, np.ndarray]] = {}
    for name, array in arrays.items():
        rule = next((i for i, r in enumerate(renames) if r.pattern.fullmatch(name)), None)
        if rule is not None:
            used.add(rule)
        renamed[name] = (name if rule is None else renames[rule].apply(name), array)
    for index, rename in enumerate(renames):
        if index not in used:
            some = ", ".join(shown(name) for name in list(arrays)[:3])
            raise DataError(
                f"checkpoint.renames.{index}.match = {rename.match}: takes none of the "
                f"{len(arrays):,} entries of {file}, such as {some}; each rule must rename one"
            )
    return renamed


def _match(
    entry: NamedEntry, network: NetworkArrays, framework: Framework | None, so_far: MatchedSoFar
) -> tuple[MatchRow, np.ndarray | None]:
    """The row of one entry, and its array where it matches."""
    shape = entry.array.shape
    if entry.target is None:
        return MatchRow("skipped", entry.source, shape, "", None), None
    needed = network.shapes.get(entry.target)
    if needed is None:
        note = "" if entry.target == entry.source else f"would be {shown(entry.target)}"
        return MatchRow("extra", entry.source, shape, "", None, note), None
    row = MatchRow("matched", entry.source, shape, entry.target, needed)
    array = entry.array
    if array.dtype.kind != "f" and array.dtype != BFLOAT16:
        note = f"is {array.dtype}, no floating point"
        return replace(row, status="misshapen", note=note), None
    array = array if framework is None else to_own_layout(array, entry.target, network)
    array = array.astype(np.float32)
    if entry.added:
        note = "its first row, to every row"
        return so_far.add(replace(row, status="added", note=note), array)
    if entry.target in so_far.origins:
        return so_far.compare(replace(row, status="tied"), array), None
    if array.shape != needed:
        note = f"{_shape(shape)} in the file" if array.shape != shape else ""
        return replace(row, status="misshapen", found=array.shape, note=note), None
    return row, array


def _shape(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "-"
    return "x".join(map(str, shape)) or "scalar"
