from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig
from tensorboard.plugins.projector.projector_plugin import _read_tensor_tsv_file
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from pipeline.engine.monitors.live_status import BOARD_CONFIG
from pipeline.engine.monitors.tensorboard_files import (
    VERSION,
    EventFile,
    encode_scalars,
    masked_crc,
    write_embeddings,
)


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
        monkeypatch.setattr(
            "pipeline.engine.monitors.tensorboard_files.time.time", lambda now=now: now
        )
        EventFile(tmp_path, ".0").close()
    stamps = sorted(int(file.name.split(".")[3]) for file in tmp_path.iterdir())
    assert stamps == [2_000_000_000, 2_000_000_001, 2_000_000_002, 3_000_000_000]


def test_missing_folder_is_not_created(tmp_path: Path) -> None:
    """A run whose directory was removed ends, and leaves nothing in its place."""
    with pytest.raises(FileNotFoundError):
        EventFile(tmp_path / "gone", "")
    assert list(tmp_path.iterdir()) == []


def config_of(board: Path) -> ProjectorConfig:
    return text_format.Parse((board / BOARD_CONFIG).read_text(), ProjectorConfig())


def test_tensorboard_reads_vectors_labels_and_pictures(tmp_path: Path) -> None:
    vectors = np.arange(15, dtype=np.float32).reshape(5, 3) / 7
    images = np.arange(5 * 4 * 6).reshape(5, 4, 6, 1)
    write_embeddings(tmp_path, vectors, ["a", "b\tc", "", "d\n", "e"], images)
    (embedding,) = config_of(tmp_path).embeddings
    read = _read_tensor_tsv_file(str(tmp_path / embedding.tensor_path))
    assert np.allclose(read, vectors, rtol=1e-6)
    labels = (tmp_path / embedding.metadata_path).read_text().split("\n")
    assert labels == ["a", "b\\tc", "-", "d\\n", "e", ""]
    assert list(embedding.sprite.single_image_dim) == [6, 4]
    with Image.open(tmp_path / embedding.sprite.image_path) as picture:
        sheet = np.asarray(picture)
    assert sheet.shape == (3 * 4, 3 * 6)
    assert sheet[4, 0] == 0
    assert sheet[7, 11] == 255


def test_non_image_samples_have_no_sprite(tmp_path: Path) -> None:
    write_embeddings(tmp_path, np.ones((2, 2), np.float32), ["a", "b"], None)
    (embedding,) = config_of(tmp_path).embeddings
    assert not embedding.HasField("sprite")


@pytest.mark.slow
def test_sprite_of_many_large_images_is_bounded(tmp_path: Path) -> None:
    write_embeddings(
        tmp_path, np.ones((400, 1), np.float32), ["x"] * 400, np.zeros((400, 224, 224, 3), np.uint8)
    )
    (embedding,) = config_of(tmp_path).embeddings
    assert list(embedding.sprite.single_image_dim) == [56, 56]
    with Image.open(tmp_path / embedding.sprite.image_path) as sheet:
        assert sheet.size == (1120, 1120)
