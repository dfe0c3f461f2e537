"""The content of a record, and the detection of damage."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numbers

from pipeline.core.errors import DataError
from pipeline.core.files.bounded_read import MAX_BYTES
from pipeline.data.records.record_format import (
    DESCRIPTION,
    decode,
    decode_into,
    encode,
    read_description,
)

DTYPES = ("bool", "u1", "i2", "i4", ">i4", "u8", "f2", "f4", ">f8")
ARRAYS = numbers.arrays(st.sampled_from(DTYPES), numbers.array_shapes(max_dims=4, max_side=4))
FIRST = st.integers(0, 2**32 - 1)


@pytest.mark.slow
@given(values=ARRAYS, first=FIRST, number=st.integers(0, 2**40))
def test_values_round_trip_exactly(values: np.ndarray, first: int, number: int) -> None:
    record = encode(values, first, number)
    assert len(record) == 4 + values.nbytes
    back = decode(record, values.dtype.newbyteorder("="), values.shape, first, number)
    assert back.dtype == values.dtype.newbyteorder("=")
    assert back.tobytes() == values.astype(back.dtype).tobytes()


def test_record_bytes_match_the_documented_format() -> None:
    """Little-endian, checksum first: what another program would write."""
    values = np.array([[1, -2], [3, 2**30]], np.int32)
    body = b"".join(int(v).to_bytes(4, "little", signed=True) for v in (1, -2, 3, 2**30))
    assert encode(values, 77, 5) == zlib.crc32(body, 82).to_bytes(4, "little") + body


@pytest.mark.slow
@given(values=ARRAYS, first=FIRST, number=st.integers(0, 1000), data=st.data())
def test_changed_byte_is_detected(
    values: np.ndarray, first: int, number: int, data: st.DataObject
) -> None:
    record = bytearray(encode(values, first, number))
    place = data.draw(st.integers(0, len(record) - 1))
    record[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match="its checksum is wrong"):
        decode(bytes(record), values.dtype, values.shape, first, number)


@pytest.mark.slow
@given(values=ARRAYS, first=FIRST, number=st.integers(0, 1000), shifted=st.integers(1, 1000))
def test_moved_record_is_detected(
    values: np.ndarray, first: int, number: int, shifted: int
) -> None:
    with pytest.raises(ValueError, match="its checksum is wrong"):
        decode(encode(values, first, number), values.dtype, values.shape, first, number + shifted)


@pytest.mark.parametrize("shape", [(3, 3), (2,), ()])
def test_record_of_wrong_length_is_detected(shape: tuple[int, ...]) -> None:
    record = encode(np.zeros((2, 3), np.float32), 0, 0)
    right = 4 + 4 * int(np.prod(shape))
    with pytest.raises(ValueError, match=rf"^has 28 bytes instead of {right}$"):
        decode(record, np.float32, shape, 0, 0)


def column(**changed: Any) -> dict[str, Any]:
    file = {"name": "a.array_record", "samples": 3, "size_bytes": 9, "first_crc32": 1}
    return {"dtype": "uint8", "shape": [2], "samples_per_record": 1, "files": [file], **changed}


def description(**changed: Any) -> dict[str, Any]:
    split = {"samples": 3, "columns": {"image": column(), "label": column()}}
    good = {"format": "pipeline.records", "version": 1, "source": "mine", "classes": ["a"]}
    return {**good, "train": split, "eval": split, **changed}


def split_with(samples: int = 3, **columns: Any) -> dict[str, Any]:
    return {"samples": samples, "columns": {"image": column(), "label": column(), **columns}}


def test_description_is_parsed(tmp_path: Path) -> None:
    (tmp_path / DESCRIPTION).write_text(json.dumps(description()))
    spec = read_description(tmp_path)
    assert (spec.source, spec.train.samples, spec.classes) == ("mine", 3, ("a",))
    assert spec.train.columns["image"].shape == (2,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(description())[:-9], r"can't be read as JSON: "),
        (" " * (MAX_BYTES + 1), r"can't be read as JSON: has more than"),
        (
            json.dumps(description(train=split_with(image=column(sizes=column(shape=[]))))),
            r"shape \[2\] has 0 nulls, sizes are \(\)",
        ),
        ("[1, 2]", r"isn't a file of this program; its format must be pipeline\.records"),
        (json.dumps({"format": "tfds"}), r"isn't a file of this program"),
        (json.dumps(description(version=2)), r"version = 2: must be 1"),
        (json.dumps(description(classes=[])), r"classes"),
        (json.dumps(description(extra=1)), r"extra = 1: there is no such key"),
        (json.dumps(description(train={"samples": 3, "columns": {}})), r"must be the same"),
        (
            json.dumps(description(train=split_with(samples=4))),
            r"train: column image has 3 samples, the split 4",
        ),
        (
            json.dumps(description(train=split_with(image=column(shape=[3])))),
            r"train has the columns .*\(3,\).*; must be the same",
        ),
        (
            json.dumps(description(eval=split_with(image=column(dtype="object")))),
            r"eval\.columns\.image\.dtype = object: must match",
        ),
        (
            json.dumps(
                description(
                    train=split_with(
                        image=column(
                            files=[{**column()["files"][0], "name": "../../etc/a.array_record"}]
                        )
                    )
                )
            ),
            r"name = \.\./\.\./etc/a\.array_record: ",
        ),
    ],
)
def test_wrong_description_error_has_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / DESCRIPTION).write_text(text)
    with pytest.raises(DataError, match=rf"records\.json: .*{message}") as caught:
        read_description(tmp_path)
    assert "\n" not in str(caught.value)


def test_folder_without_a_description_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"records\.json: can't be read: .*convert records"):
        read_description(tmp_path)


def test_batch_decoding_equals_single_decoding() -> None:
    values = np.arange(3 * 4, dtype=np.float32).reshape(3, 2, 2)
    first = 2**32 - 2
    records = [encode(value[np.newaxis], first, number) for number, value in enumerate(values)]
    decoded = np.empty_like(values)
    decode_into(records, [first, first + 1, first + 2], decoded)
    np.testing.assert_array_equal(decoded, values)
    for number, record in enumerate(records):
        alone = decode(record, np.float32, (1, 2, 2), first, number)
        np.testing.assert_array_equal(alone[0], decoded[number])


@pytest.mark.parametrize(
    ("change", "message"), [(lambda r: r[:-1], "size"), (lambda r: r[:-1] + b"x", "checksum")]
)
def test_changed_record_in_a_batch_is_detected(
    change: Callable[[bytes], bytes], message: str
) -> None:
    records = [encode(np.full((1, 2), n, np.uint8), 7, n) for n in range(3)]
    records[1] = change(records[1])
    with pytest.raises(ValueError, match=message):
        decode_into(records, [7, 8, 9], np.empty((3, 2), np.uint8))
