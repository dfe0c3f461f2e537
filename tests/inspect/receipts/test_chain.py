"""Chains of digests: the formats, by hand, and what breaks a chain."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.order import SampleOrder
from pipeline.engine.monitors.log_lines import parse_line
from pipeline.inspect.receipts.chain import (
    ChainRecord,
    Numbers,
    digest_arrays,
    digest_rows,
    extend_chain,
    find_broken,
    format_records,
    parse_record,
    read_chain,
)
from pipeline.training.telemetry import Telemetry

DIGEST = "a" * 64


def make_chain(links: int) -> list[ChainRecord]:
    records = [extend_chain([], {"kind": "origin", "step": 0})]
    for step in range(links):
        body = {"kind": "link", "step": step, "state": "s", "rows": "r", "numbers": "n"}
        records.append(extend_chain(records, body))
    return records


def test_digest_of_a_record_covers_the_one_before() -> None:
    first, second = make_chain(1)
    text = "0" * 64 + '{"kind":"origin","step":0}'
    assert first.digest == hashlib.sha256(text.encode()).hexdigest()
    body = '{"kind":"link","numbers":"n","rows":"r","state":"s","step":0}'
    assert second.digest == hashlib.sha256((first.digest + body).encode()).hexdigest()


@pytest.mark.parametrize("position", range(4))
def test_changed_record_breaks_the_chain_there(position: int) -> None:
    records = make_chain(3)
    assert find_broken(records) is None
    changed = {**records[position].body, "step": 7}
    records[position] = ChainRecord(changed, records[position].digest)
    assert find_broken(records) == position


def test_removed_and_swapped_records_break_the_chain() -> None:
    records = make_chain(3)
    assert find_broken([*records[:2], records[3]]) == 2
    assert find_broken([records[0], records[2], records[1], records[3]]) == 1


def test_chain_is_read_without_a_line_that_a_kill_cut(tmp_path: Path) -> None:
    file = tmp_path / "receipt.jsonl"
    records = make_chain(3)
    file.write_text(format_records(records)[:-5])
    assert read_chain(file) == records[:-1]


def test_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "receipt.jsonl"
    file.write_text(f"{format_records(make_chain(1))}other\n")
    with pytest.raises(DataError, match=r"receipt.jsonl, line 3: can't be read: "):
        read_chain(file)


@pytest.mark.parametrize(
    "document",
    [
        1,
        {"body": {"kind": "origin", "step": 0}},
        {"body": {"kind": "other", "step": 0}, "digest": DIGEST},
        {"body": {"kind": "origin", "step": True}, "digest": DIGEST},
        {"body": {"kind": "origin", "step": -1}, "digest": DIGEST},
        {"body": {"kind": "link", "step": 0, "state": "s"}, "digest": DIGEST},
        {"body": {"kind": "origin", "step": 0, "x": float("nan")}, "digest": DIGEST},
        {"body": {"kind": "origin", "step": 0}, "digest": "A" * 64},
    ],
)
def test_other_documents_are_no_records(document: object) -> None:
    with pytest.raises(DataError, match=r"^here: .* isn't a record of a chain"):
        parse_record(document, "here")


def test_digest_of_arrays_is_of_paths_types_shapes_and_values() -> None:
    arrays = {"b": np.array([[1, 2]], np.int32), "a": np.float32(1.5)}
    expected = b"a\0float32\0()\0" + struct.pack("<f", 1.5)
    expected += b"b\0int32\0(1, 2)\0" + struct.pack("<ii", 1, 2)
    assert digest_arrays(arrays) == hashlib.sha256(expected).hexdigest()
    assert digest_arrays({**arrays, "b": arrays["b"].T}) != digest_arrays(arrays)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 5), (2, 7)])
def test_digest_of_rows_is_of_the_batches_in_order(
    start: int, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.inspect.receipts.chain.ROWS_AT_ONCE", 8)
    order = SampleOrder(
        samples=10, batch_size=4, drop_remainder=False, repeat=1,
        seed=3, shuffle=True, buffer_size=None,
    )  # fmt: skip
    expected = []
    for step in range(start, stop):
        batch = order.batches(step, 1)
        expected += [*batch.rows[0][: batch.counts[0]], *[-1] * (4 - batch.counts[0])]
    digest = hashlib.sha256(np.array(expected, "<i8").tobytes()).hexdigest()
    assert digest_rows(order, start, stop) == digest


def test_numbers_are_the_same_in_parts_and_from_the_log() -> None:
    columns = {
        "loss": np.array([1.5, np.nan, 0.1], np.float32),
        "learning_rate": np.array([0.1, 0.2, 0.3], np.float32),
        "grad_norm": np.array([1, np.inf, 3], np.float32),
        "loss_scale": np.ones(3, np.float32),
        "skipped": np.array([False, True, False]),
        "speed": np.array([1, 2, 3], np.float32),
    }
    whole = Numbers()
    whole.add(Telemetry(10, columns))
    parts = Numbers()
    for step in range(3):
        cut = {name: column[step : step + 1] for name, column in columns.items()}
        parts.add(Telemetry(10 + step, cut))
    logged = Numbers()
    for step in range(3):
        fields: dict[str, Any] = {"step": 11 + step}
        for name, column in columns.items():
            if name != "skipped" or column[step]:
                value = column[step].item()
                fields[name] = value if np.isfinite(value) else None
        logged.add_line(parse_line(json.dumps(fields).encode(), "here"))
    expected = b"".join(
        struct.pack("<5f", *row)
        for row in [(1.5, 0.1, 1, 1, 0), (np.nan, 0.2, np.nan, 1, 1), (0.1, 0.3, 3, 1, 0)]
    )
    digest = hashlib.sha256(expected).hexdigest()
    assert {whole.finish(), parts.finish(), logged.finish()} == {digest}


def test_line_without_a_column_is_refused() -> None:
    for text in (b'{"step": 1}', b'{"step": 1, "loss": 1.5, "learning_rate": 0.1, "grad_norm": 1}'):
        with pytest.raises(DataError, match=r"here: lacks .*loss_scale; isn't the line of a step"):
            Numbers().add_line(parse_line(text, "here"))
