"""TensorFlow's checkpoints: their arrays and names, and what a damaged one is refused with."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import DataError
from pipeline.models.weights.files.protobuf_fields import Message
from pipeline.models.weights.files.weight_files import read_weights
from tests.conftest import ROOT

FOLDER = ROOT / "tests" / "golden" / "weights" / "tensorflow"
NAMES = ("keras2", "keras3", "names", "saved_model")


def copy_to(folder: Path, name: str) -> Path:
    """Copy a checkpoint, and return its index."""
    for file in FOLDER.glob(f"{name}.*"):
        if file.suffix == ".index" or ".data-" in file.name:
            shutil.copyfile(file, folder / file.name)
    return folder / f"{name}.index"


def test_checkpoint_kinds_have_the_same_weights() -> None:
    weights = [
        {a.tobytes() for n, a in read_weights(FOLDER / f"{name}.index").items() if "opt" not in n}
        for name in NAMES
    ]
    assert len(weights[2]) == 18
    assert all(weights[2] <= other for other in weights)


def test_weight_names_start_with_the_layer_number() -> None:
    names = list(read_weights(FOLDER / "saved_model.index"))
    assert names[:3] == [
        "0.sequential.stem.kernel",
        "0.sequential.stem.bias",
        "1.sequential.batch_normalization.gamma",
    ]
    assert "5.sequential.middle.kernel" in names


def test_names_of_checkpoints_without_objects_are_unchanged() -> None:
    arrays = read_weights(FOLDER / "names.index")
    assert arrays["wise.depthwise_kernel"].shape == (3, 3, 6, 1)
    assert [name for name in arrays if name.endswith("weights")] == [
        f"fc{number}.weights" for number in range(4)
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda index: index[:-1], "is not a TensorFlow checkpoint"),
        (lambda index: b"", "is not a TensorFlow checkpoint"),
        (lambda index: index[:-48] + b"\xff" * 40 + index[-8:], "is not a TensorFlow checkpoint"),
        (lambda index: index[-48:], "ends in the middle of a block"),
    ],
)
def test_damaged_index_is_refused(change, problem: str, tmp_path: Path) -> None:
    file = copy_to(tmp_path, "names")
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DataError, match=problem):
        read_weights(file)


def encode_varint(number: int) -> bytes:
    """Return a varint of two bytes, of a number below 2**14."""
    return bytes((number & 127 | 128, number >> 7))


def make_block(entries: list[tuple[bytes, bytes]]) -> bytes:
    """Return a block of a sorted table, of keys of fewer than 128 bytes, and its trailer."""
    parts = [
        bytes((0, len(key))) + encode_varint(len(value)) + key + value for key, value in entries
    ]
    return b"".join(parts) + bytes(4) + (1).to_bytes(4, "little") + bytes(5)


def write_index(folder: Path, data: bytes, keys: list[bytes]) -> Path:
    """Write an index with a block of data, which is listed under each key."""
    listing = make_block([(key, b"\0" + encode_varint(len(data) - 5)) for key in keys])
    footer = bytes(2) + encode_varint(len(data)) + encode_varint(len(listing) - 5)
    file = copy_to(folder, "names")
    magic = file.read_bytes()[-8:]
    file.write_bytes(data + listing + footer.ljust(40, b"\0") + magic)
    return file


def test_overlapping_blocks_are_refused(tmp_path: Path) -> None:
    """Values of many entries would be read from the same bytes, each as large as the file."""
    file = write_index(tmp_path, make_block([(b"a", bytes(100))]), [bytes((n,)) for n in range(50)])
    with pytest.raises(DataError, match="its blocks overlap"):
        read_weights(file)


def test_block_with_too_many_restarts_is_refused(tmp_path: Path) -> None:
    """Its entries would be left out."""
    block = make_block([(b"a", bytes(100))])
    file = write_index(tmp_path, block[:-9] + b"\xff\0\0\0" + block[-5:], [b"z"])
    with pytest.raises(DataError, match="a block has more restarts than bytes"):
        read_weights(file)


PACKED = b"\x0a\x64" + bytes([1]) * 100
"""Field 1 as 100 packed integers."""


def test_integers_are_bounded() -> None:
    """By their number, packed or not."""
    packed = Message(memoryview(PACKED), 200, "a file")
    single = Message(memoryview(b"\x08\x01" * 100), 200, "a file")
    for message in (packed, single):
        assert message.integers(1, 100) == [1] * 100
        with pytest.raises(ValueError, match="has no possible shape"):
            message.integers(1, 99)


@pytest.mark.parametrize(
    ("header", "entry", "problem"),
    [
        (PACKED, b"", "is not a TensorFlow checkpoint"),
        (b"\x08\x01", PACKED, "is not a TensorFlow checkpoint"),
        (b"\x08\x01", b"\x08\x01" + b"\x12\x00" * 64, "an entry of more than 64 fields"),
    ],
    ids=["packed_header", "packed_type", "many_shapes"],
)
def test_oversized_entry_is_refused(
    header: bytes, entry: bytes, problem: str, tmp_path: Path
) -> None:
    """Its numbers, of a byte or two each, would take many times the memory of the file."""
    file = write_index(tmp_path, make_block([(b"", header), (b"a", entry)]), [b"a"])
    with pytest.raises(DataError, match=problem):
        read_weights(file)


def test_missing_or_short_data_is_refused(tmp_path: Path) -> None:
    file = copy_to(tmp_path, "names")
    data = tmp_path / "names.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"in names\.data-00000-of-00001, which is missing or too"):
        read_weights(file)
    data.unlink()
    with pytest.raises(DataError, match="missing or too short"):
        read_weights(file)


CONTENT = {name: (FOLDER / f"{name}.index").read_bytes() for name in NAMES}


@pytest.mark.medium
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 2**16), st.integers(0, 255))
def test_file_with_a_changed_byte_is_read_or_refused(name: str, place: int, byte: int) -> None:
    """Without another error, and without arrays larger than the files."""
    content = bytearray(CONTENT[name])
    content[place % len(content)] = byte
    file = FOLDER / f"{name}.index"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda _: bytes(content))
        patch.setattr(f"{MODULE}.read_bytes", lambda *_: bytes(content))
        try:
            arrays = read_weights(file)
        except DataError:
            return
    assert sum(array.nbytes for array in arrays.values()) <= 2**16
    assert all(isinstance(array, np.ndarray) for array in arrays.values())


MODULE = "pipeline.models.weights.files.tensorflow_checkpoint"
