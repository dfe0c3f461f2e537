"""Chain of a run's receipt: digests of its states, of the rows read and of its numbers.

A record is a body, as JSON, and a digest: SHA-256 of the digest before it, in hexadecimal (64 zeros
before the first), and the body in canonical JSON (sorted keys, no spaces, ASCII). Bodies are

* an origin: recipe, length, environment and data. It is repeated if a resumed run has others.
* a link: the state after a step, and the rows, numbers and evaluations since the link before.
* the end: final metrics.

Digests depend on what the bits of a run depend on: not on sinks and resumes, and with
`parallel.reproducible = exact` not on the number of devices.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.bounded_read import parse_json, read_text
from pipeline.core.files.value_text import show
from pipeline.core.host.tree_paths import list_leaf_paths
from pipeline.data.order import SampleOrder
from pipeline.engine.monitors.log_lines import LogLine
from pipeline.training.state import COLUMNS, TrainState
from pipeline.training.telemetry import Telemetry

START = "0" * 64
"""Digest before the first record."""
MAX_BYTES = 256 * 2**20
"""Most bytes of a chain that are read."""
IS_LITTLE_ENDIAN = sys.byteorder == "little"
ROWS_AT_ONCE = 2**20
"""Samples whose order is computed at once."""
Kind = Literal["origin", "link", "end"]
_DIGEST = re.compile("[0-9a-f]{64}")


def format_canonical(value: Any) -> bytes:
    """Return a value in canonical JSON. Raises ValueError for numbers that aren't finite."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def digest_json(value: Any) -> str:
    """Return the SHA-256 of a value in canonical JSON."""
    return hashlib.sha256(format_canonical(value)).hexdigest()


@dataclass(frozen=True)
class ChainRecord:
    """A record of a chain. Its digest may be wrong if it was read from a file."""

    body: Mapping[str, Any]
    digest: str

    @property
    def kind(self) -> str:
        return str(self.body["kind"])

    @property
    def step(self) -> int:
        """Steps done at the record."""
        return int(self.body["step"])

    def to_dict(self) -> dict[str, Any]:
        return {"body": dict(self.body), "digest": self.digest}


def extend_chain(records: Sequence[ChainRecord], body: Mapping[str, Any]) -> ChainRecord:
    """Return the record of a body after other records."""
    before = records[-1].digest if records else START
    digest = hashlib.sha256(before.encode("ascii") + format_canonical(body)).hexdigest()
    return ChainRecord(body, digest)


def find_broken(records: Sequence[ChainRecord]) -> int | None:
    """Return the position of the first record whose digest isn't that of the record before and its
    body; None if the chain is whole."""
    before: list[ChainRecord] = []
    for position, record in enumerate(records):
        if extend_chain(before, record.body).digest != record.digest:
            return position
        before = [record]
    return None


def parse_record(document: Any, where: str) -> ChainRecord:
    """Return the record of a JSON document. Raises DataError with `where` if it isn't a record."""
    match document:
        case {"body": {"kind": str(kind), "step": int(step), **rest}, "digest": str(digest)}:
            has_digests = kind != "link" or all(
                isinstance(rest.get(name), str) for name in ("state", "rows", "numbers")
            )
            is_step = type(step) is int and 0 <= step < 2**63
            is_whole = is_step and has_digests and _are_results(rest)
            if kind in get_args(Kind) and is_whole and _DIGEST.fullmatch(digest):
                # A number such as NaN has no canonical form.
                with suppress(ValueError):
                    format_canonical(document["body"])
                    return ChainRecord(document["body"], digest)
    raise DataError(f"{where}: {show(document):.80}: isn't a record of a chain")


def _are_results(fields: Mapping[Any, Any]) -> bool:
    """Return whether `evaluations` of a record are pairs of a step and a digest, and `metrics`
    numbers or None by name. A record without them is right too."""
    evaluations, metrics = fields.get("evaluations", []), fields.get("metrics", {})
    return (
        isinstance(evaluations, list)
        and all(
            isinstance(pair, list) and [type(value) for value in pair] == [int, str]
            for pair in evaluations
        )
        and isinstance(metrics, dict)
        and all(value is None or type(value) in (int, float) for value in metrics.values())
    )


def read_chain(file: Path) -> list[ChainRecord]:
    """Read the chain of a run; a last line that was cut by a kill is left out.

    Raises DataError if the file can't be read, or has a line that isn't a record.
    """
    try:
        text = read_text(file, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: can't be read: {error}") from error
    records = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        where = f"{file}, line {number}"
        try:
            document = parse_json(line)
        except ValueError as error:
            raise DataError(f"{where}: can't be read: {error}") from error
        records.append(parse_record(document, where))
    return records


def list_evaluations(records: Iterable[ChainRecord]) -> dict[int, str]:
    """Return the digests of the evaluations of a chain by step."""
    pairs = [pair for record in records for pair in record.body.get("evaluations", ())]
    return {int(step): str(digest) for step, digest in pairs}


def format_records(records: Iterable[ChainRecord]) -> str:
    """Return records as lines of JSON."""
    return "".join(f"{json.dumps(record.to_dict(), sort_keys=True)}\n" for record in records)


def digest_arrays(arrays: Mapping[str, Any]) -> str:
    """Return the SHA-256 of arrays by path: of each, in the order of paths, the path, the type, the
    shape and the values in C order, little-endian."""
    digest = hashlib.sha256()
    for path in sorted(arrays):
        values = np.asarray(arrays[path])
        digest.update(f"{path}\0{values.dtype.name}\0{values.shape}\0".encode())
        if not (IS_LITTLE_ENDIAN and values.dtype.isnative):
            values = values.astype(values.dtype.newbyteorder("<"), copy=False)
        # Types such as bfloat16 have no buffer.
        digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def digest_state(state: TrainState, select: Callable[[TrainState], TrainState]) -> str:
    """Return the digest of the part of a state that checkpoints have, which `select` returns."""
    leaves, structure = jax.tree.flatten(select(state))
    return digest_arrays(dict(zip(_list_paths(structure), leaves, strict=True)))


@lru_cache(maxsize=8)
def _list_paths(structure: Any) -> list[str]:
    """Return the path of each leaf of a tree with this structure, which all links of a run have."""
    return list_leaf_paths(jax.tree.unflatten(structure, range(structure.num_leaves)))


def digest_rows(order: SampleOrder, start: int, stop: int) -> str:
    """Return the digest of the rows of the steps start + 1 to stop: int64, little-endian, a batch
    after the other, with -1 in the place of padding."""
    digest = hashlib.sha256()
    size = max(1, ROWS_AT_ONCE // order.batch_size)
    for first in range(start, stop, size):
        batches = order.batches(first, min(size, stop - first))
        is_valid = np.arange(order.batch_size) < batches.counts[:, None]
        digest.update(np.where(is_valid, batches.rows, -1).astype("<i8").tobytes())
    return digest.hexdigest()


@dataclass
class Numbers:
    """Digest of the numbers of steps: for each step the columns that every run has (`COLUMNS`) as
    float32, little-endian. All numbers that aren't finite become the same NaN."""

    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, telemetry: Telemetry) -> None:
        """Add the steps of telemetry."""
        rows = np.stack([telemetry.columns[name] for name in COLUMNS], 1)
        self.digest.update(np.where(np.isfinite(rows), rows, np.nan).astype("<f4").tobytes())

    def add_line(self, line: LogLine) -> None:
        """Add the step of a line of metrics.jsonl. Raises DataError if it isn't one."""
        numbers = {"skipped": 0.0, **line.numbers()}
        if missing := [name for name in COLUMNS if name not in numbers]:
            raise DataError(f"{line.where}: lacks {', '.join(missing)}; isn't the line of a step")
        values = [numbers[name] for name in COLUMNS]
        row = np.array([np.nan if value is None else value for value in values], "<f4")
        self.digest.update(row.tobytes())

    def finish(self) -> str:
        """Return the digest."""
        return str(self.digest.hexdigest())
