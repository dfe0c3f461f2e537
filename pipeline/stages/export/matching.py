"""Matching of a weight file's entries to a network's arrays, and the table of the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pipeline.config.renames import RenameSpec
from pipeline.core.errors import DataError
from pipeline.core.files.name_text import show_name
from pipeline.core.files.value_text import align_columns
from pipeline.models.weights.files.named_arrays import BFLOAT16, Arrays
from pipeline.models.weights.rules.syntax import Framework
from pipeline.stages.export.naming import NamedEntry, guess_framework, name_entries
from pipeline.stages.export.network import NetworkArrays, convert_layout

Rules = Literal["auto", "none", "torch", "mindspore", "tensorflow"]
Status = Literal["matched", "missing", "extra", "misshapen", "skipped", "added", "tied"]
"""missing: an array without an entry; extra: an entry without an array; misshapen: of another shape
or type; skipped: by a rule; added: summed with an earlier entry; tied: equal to an earlier entry,
and for the same array."""
PROBLEMS: tuple[Status, ...] = ("missing", "extra", "misshapen")
HARMLESS: tuple[Status, ...] = ("skipped", "added", "tied")
MAX_ROWS = 60
"""Most rows of the table in a message."""


@dataclass(frozen=True)
class MatchRow:
    """A row of the table: an entry of the file and the array of the network that it matches."""

    status: Status
    source: str
    """The name in the file; empty for a missing entry."""
    shape: tuple[int, ...] | None
    """The shape in the file."""
    target: str
    """The network's name; empty for an entry without an array."""
    target_shape: tuple[int, ...] | None
    note: str = ""


@dataclass(frozen=True)
class Matching:
    """The arrays of a file with the names and the layout of a network."""

    file: str
    rules: Framework | None
    """The framework whose names the file has; None for this package's."""
    rows: tuple[MatchRow, ...]
    arrays: Arrays
    """The matched arrays, float32."""
    is_guessed: bool = False
    """Whether the framework was guessed from the names."""
    inputs: str = ""
    """As in `NetworkArrays`."""

    def require(self, *, partial: bool) -> None:
        """Raise DataError with a table of the problems, unless `partial` and some arrays match."""
        problems = [row for row in self.rows if row.status in PROBLEMS]
        if not problems or (partial and self.arrays):
            return
        hint = (
            "nothing is loaded; rename entries with checkpoint.renames, or load the matching ones "
            "with checkpoint.partial=true"
        )
        if self.is_guessed and self.rules is not None and 2 * len(self.arrays) < len(self.rows):
            hint += (
                f"; names are taken for {self.rules}'s, or with checkpoint.rules=none for those of "
                "the network"
            )
        if self.inputs and any(row.status == "misshapen" for row in problems):
            hint += f"; the network reads {self.inputs} after the map ops"
        raise DataError(f"{self.file}: {self.format_counts()}; {hint}\n{format_table(problems)}")

    def format_counts(self) -> str:
        """Return the number of rows by status: `62 of 62 arrays matched (own names), 1 skipped`."""
        counts = Counter(row.status for row in self.rows)
        num_arrays = counts["matched"] + counts["missing"] + counts["misshapen"]
        parts = [
            f"{counts['matched']} of {num_arrays} arrays matched ({self.rules or 'own'} names)"
        ]
        statuses = [status for status in (*PROBLEMS, *HARMLESS) if counts[status]]
        parts += [f"{counts[status]} {status}" for status in statuses]
        return ", ".join(parts)


def match_weights(
    file: str,
    arrays: Arrays,
    network: NetworkArrays,
    renames: Sequence[RenameSpec] = (),
    rules: Rules = "auto",
) -> Matching:
    """Match the entries of a file to the network's arrays, after the user's `renames`.

    Raises DataError for a rename without an entry, and if a network's weights can't be converted.
    """
    renamed = _rename_entries(file, arrays, renames)
    if rules == "auto":
        # A renamed entry has a name of the user's, which says nothing of a framework.
        names = [name for name, _ in renamed.values() if name is not None]
        framework = guess_framework(file, names, network)
    else:
        framework = None if rules == "none" else rules
    # TensorFlow has the network's order of flattened values.
    if framework not in (None, "tensorflow") and network.unconverted:
        raise DataError(
            f"{file}: has names of {framework}, and its weights can't be converted for model "
            f"{network.model}: {network.unconverted}"
        )
    rows: list[MatchRow] = []
    matched: Arrays = {}
    origins: dict[str, str] = {}
    entries = list(name_entries(file, renamed, network, framework))
    # Entries that are added to arrays come last.
    for entry in sorted(entries, key=lambda entry: entry.added):
        row, array = _match_entry(entry, network, framework, matched, origins)
        rows.append(row)
        if array is not None:
            matched[row.target] = array
            origins[row.target] = row.source
    reached = {row.target for row in rows if row.status in ("matched", "misshapen")}
    missing = [name for name in network.shapes if name not in reached]
    rows += [MatchRow("missing", "", None, name, network.shapes[name]) for name in missing]
    is_guessed = rules == "auto"
    return Matching(file, framework, tuple(rows), matched, is_guessed, network.inputs)


def format_table(rows: Iterable[MatchRow], limit: int | None = MAX_ROWS) -> str:
    """Return the rows as text in columns; only the first `limit` rows, unless it is None."""
    cells = [
        (
            row.status,
            show_name(row.source) or "-",
            _format_shape(row.shape),
            show_name(row.target) or "-",
            _format_shape(row.target_shape),
            row.note,
        )
        for row in rows
    ]
    head = ("", "in the file", "shape", "in the network", "shape", "")
    lines = list(align_columns([head, *cells[:limit]]))
    if limit is not None and len(cells) > limit:
        lines.append(f"... and {len(cells) - limit} more")
    return "\n".join(lines)


def _rename_entries(
    file: str, arrays: Arrays, renames: Sequence[RenameSpec]
) -> dict[str, tuple[str | None, np.ndarray]]:
    """Return each entry's new name, None if skipped, and its array, by the name in the file."""
    used: set[int] = set()
    renamed: dict[str, tuple[str | None, np.ndarray]] = {}
    for name, array in arrays.items():
        fitting = (index for index, rule in enumerate(renames) if rule.pattern.fullmatch(name))
        index = next(fitting, None)
        if index is not None:
            used.add(index)
        renamed[name] = (name if index is None else renames[index].apply(name), array)
    for index, rename in enumerate(renames):
        if index not in used:
            examples = ", ".join(show_name(name) for name in list(arrays)[:3])
            raise DataError(
                f"checkpoint.renames.{index}.match = {rename.match}: must match one of the "
                f"{len(arrays):,} entries of {file}, such as {examples}"
            )
    return renamed


def _match_entry(
    entry: NamedEntry,
    network: NetworkArrays,
    framework: Framework | None,
    matched: Arrays,
    origins: Mapping[str, str],
) -> tuple[MatchRow, np.ndarray | None]:
    """Return the row of an entry, and its array in the network's layout if it matches.

    `matched` has the arrays of earlier entries by the network's names, `origins` their file names.
    """
    array = entry.array
    target = entry.target
    shape = array.shape
    if target is None:
        return MatchRow("skipped", entry.source, shape, "", None), None
    target_shape = network.shapes.get(target)
    if target_shape is None:
        note = "" if target == entry.source else f"would be {show_name(target)}"
        return MatchRow("extra", entry.source, shape, "", None, note), None
    row = MatchRow("matched", entry.source, shape, target, target_shape)
    if array.dtype.kind != "f" and array.dtype != BFLOAT16:
        note = f"is {array.dtype}; must be floating point"
        return replace(row, status="misshapen", note=note), None
    array = array if framework is None else convert_layout(array, target, network, framework)
    converted = _convert_type(array, np.dtype(np.float32))
    if converted is None:
        return replace(row, status="misshapen", note="has values beyond float32"), None
    array = converted
    earlier = matched.get(target)
    if entry.added:
        if earlier is None:
            return replace(row, status="extra", note="nothing to add it to"), None
        if array.ndim != earlier.ndim or array.shape[1:] != earlier.shape[1:] or not len(array):
            return replace(row, status="misshapen", note="its rows have another shape"), None
        row = replace(row, status="added", note="its first row, to every row")
        return row, earlier + array[:1]
    if earlier is not None:
        # A file may hold an array twice if two layers share it.
        origin = show_name(origins[target])
        if np.array_equal(array, earlier):
            return replace(row, status="tied", note=f"the same values as {origin}"), None
        return replace(row, status="extra", note=f"{origin} has that name already"), None
    if array.shape != target_shape:
        note = f"{_format_shape(shape)} in the file" if array.shape != shape else ""
        return replace(row, status="misshapen", shape=array.shape, note=note), None
    return row, array


def _convert_type(array: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    """Return an array in a type; None if the type can't hold one of its finite values."""
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    overflows = np.isinf(converted) & np.isfinite(array)
    return None if overflows.any() else converted


def _format_shape(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "-"
    return "x".join(map(str, shape)) or "scalar"


def convert_to_foreign_names(
    file: str, entries: Arrays, arrays: Mapping[str, np.ndarray], network: NetworkArrays
) -> Arrays:
    """Return a network's `arrays` with the names, order, layout and dtypes of a foreign `file`.

    `entries` are the file's entries by name. To invert the rules that read a file, they are applied
    to arrays of indices: the result has, for each value of the network, its index in the file.
    Entries that aren't weights, such as counters, keep the file's values. Entries that are added to
    another array become 0. Raises DataError for a file of another network, for an entry that
    `arrays` lacks, and for values that the file's type can't hold.
    """
    matching = match_weights(file, entries, network)
    matching.require(partial=False)
    positions = {
        name: (name, np.arange(array.size).reshape(array.shape)) for name, array in entries.items()
    }
    result = {name: np.array(array) for name, array in entries.items()}
    for entry in name_entries(file, positions, network, matching.rules):
        if entry.target is None:
            continue
        if entry.target not in arrays:
            raise DataError(
                f"{file}: has {show_name(entry.source)}, and the network has no such weights"
            )
        if entry.added:
            result[entry.source][...] = 0
            continue
        indices = entry.array
        if matching.rules is not None:
            indices = convert_layout(indices, entry.target, network, matching.rules)
        dtype = result[entry.source].dtype
        values = _convert_type(arrays[entry.target], dtype)
        if values is None:
            raise DataError(
                f"{file}: has {show_name(entry.source)} as {dtype}, which can't hold the largest "
                f"values of {show_name(entry.target)}"
            )
        result[entry.source].flat[indices.reshape(-1)] = values.reshape(-1)
    return result
