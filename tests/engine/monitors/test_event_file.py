from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from pipeline.engine.monitors.event_file import VERSION, EventFile, encode_scalars, masked_crc


def by_protobuf(
    tags: Sequence[str], steps: np.ndarray, wall_times: np.ndarray, values: np.ndarray
) -> bytes:
    """The same records one by one: protobuf encodes, tensorboardX sums up."""
    records = b""
    for step, time, row in zip(steps.tolist(), wall_times.tolist(), values.tolist(), strict=True):
        scalars = [Summary.Value(tag=t, simple_value=v) for t, v in zip(tags, row, strict=True)]
        event = Event(wall_time=time, step=step, summary=Summary(value=scalars))
        data = event.SerializeToString()
        head = struct.pack("<Q", len(data))
        for part in (head, data):
            records += part + struct.pack("<I", masked_crc32c(part))
    return records


float32 = st.floats(width=32, allow_nan=False)


@pytest.mark.slow
@settings(deadline=None)
@given(
    tags=st.lists(st.text(min_size=1, max_size=200), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 2**62), min_size=1, max_size=9),
    data=st.data(),
)
def test_records_equal_protobuf_records(
    tags: list[str], steps: list[int], data: st.DataObject
) -> None:
    """Byte for byte, for tags and steps of all lengths, in any order."""
    row = st.lists(float32, min_size=len(tags), max_size=len(tags))
    values = np.array([data.draw(row) for _ in steps], np.float32)
    columns = tags, np.array(steps), np.linspace(1.5e9, 2e9, len(steps)), values
    assert encode_scalars(*columns) == by_protobuf(*columns)


def test_records_of_many_tags_equal_protobuf_records() -> None:
    """Such as a callback's, of all parameters; some tags have lengths of two bytes."""
    tags = [f"callback/{number}/{'x' * number}" for number in range(200)]
    values = np.arange(400, dtype=np.float32).reshape(2, 200)
    columns = tags, np.array([1, 300]), np.ones(2), values
    assert encode_scalars(*columns) == by_protobuf(*columns)


def test_zero_steps_write_no_records() -> None:
    assert encode_scalars(["a"], np.zeros(0, int), np.zeros(0), np.zeros((0, 1))) == b""


def test_non_finite_numbers_are_stored() -> None:
    values = np.array([[np.nan], [np.inf], [-np.inf]], np.float32)
    columns = ["loss"], np.arange(1, 4), np.ones(3), values
    assert encode_scalars(*columns) == by_protobuf(*columns)


@given(st.binary(max_size=60))
def test_checksum_matches_the_library(data: bytes) -> None:
    rows = np.frombuffer(data * 2, np.uint8).reshape(2, len(data))
    assert masked_crc(rows).tolist() == 2 * [masked_crc32c(data)]


def test_events_are_read_by_tensorboard_in_order(tmp_path: Path) -> None:
    (tmp_path / "board").mkdir()
    file = EventFile(tmp_path / "board", ".7")
    file.add_scalars(["a", "b"], np.array([126, 127, 128]), np.full(3, 9.5), np.eye(3, 2))
    file.add(Event(wall_time=10.0, step=129, summary=Summary()))
    file.close()
    (written,) = (tmp_path / "board").iterdir()
    assert written.name.startswith("events.out.tfevents.")
    assert written.name.endswith(".7")
    first, *events = EventFileLoader(str(written)).Load()
    assert first.file_version == VERSION
    assert [event.step for event in events] == [126, 127, 128, 129]
    assert [event.wall_time for event in events] == [9.5, 9.5, 9.5, 10.0]
    assert [value.tag for value in events[0].summary.value] == ["a", "b"]


def test_flushed_events_are_in_the_file(tmp_path: Path) -> None:
    file = EventFile(tmp_path, "")
    file.add_scalars(["a"], np.array([1]), np.ones(1), np.ones((1, 1)))
    file.flush()
    (written,) = tmp_path.iterdir()
    assert len(list(EventFileLoader(str(written)).Load())) == 2
    file.close()


def test_folder_that_cannot_be_created_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        EventFile(tmp_path / "file" / "board", "")


def test_file_stamps_increase_if_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none is written over that was made in the same second."""
    for now in (2e9, 2e9, 1e9, 3e9):
        monkeypatch.setattr("pipeline.engine.monitors.event_file.time.time", lambda now=now: now)
        EventFile(tmp_path, ".0").close()
    stamps = sorted(int(file.name.split(".")[3]) for file in tmp_path.iterdir())
    assert stamps == [2_000_000_000, 2_000_000_001, 2_000_000_002, 3_000_000_000]


def test_missing_folder_is_not_created(tmp_path: Path) -> None:
    """A run whose directory was removed ends, and leaves nothing in its place."""
    with pytest.raises(FileNotFoundError):
        EventFile(tmp_path / "gone", "")
    assert list(tmp_path.iterdir()) == []
