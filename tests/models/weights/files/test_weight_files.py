from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from pipeline.core.errors import DataError, RunError
from pipeline.models.weights.files.weight_files import read_weights, write_weights
from tests.conftest import ROOT

GOLDEN = ROOT / "tests" / "golden" / "weights"
SUFFIXES = [".safetensors", ".ckpt", ".npz"]
DTYPES = ["float32", "float64", "float16", "int8", "int32", "int64", "uint8", "bool"]


def as_numbers(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def complaint(path: Path) -> str | None:
    """The message with which a file is refused; None where it is read."""
    try:
        read_weights(path)
    except DataError as error:
        return str(error)
    return None


def rejected(path: Path) -> str:
    """The message that reading a file ends in, without its path."""
    with pytest.raises(DataError) as error:
        read_weights(path)
    lines = str(error.value).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"{path}: ")
    return lines[0].removeprefix(f"{path}: ")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_written_weights_are_read_unchanged(
    suffix: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    arrays = data.draw(
        st.dictionaries(
            st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1),
            st.sampled_from(DTYPES).flatmap(
                lambda dtype: st_numpy.arrays(dtype, st_numpy.array_shapes(min_dims=1))
            ),
            min_size=1,
            max_size=4,
        )
    )
    path = tmp_path_factory.mktemp("weights") / f"weights{suffix}"
    write_weights(path, arrays)
    read = read_weights(path)
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_scalar_and_empty_array_keep_their_shapes(suffix: str, tmp_path: Path) -> None:
    arrays = {"scalar": np.array(2.5, np.float32), "empty": np.zeros((2, 0), np.float32)}
    write_weights(tmp_path / f"w{suffix}", arrays)
    read = read_weights(tmp_path / f"w{suffix}")
    assert {name: array.shape for name, array in read.items()} == {"scalar": (), "empty": (2, 0)}
    assert read["scalar"] == 2.5


@pytest.mark.parametrize("dtype", [np.complex64, ml_dtypes.float8_e4m3fn, np.longdouble])
def test_type_that_is_not_read_is_not_written(dtype: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with pytest.raises(
        DataError, match=r"can't be written: a is \w+, which couldn't be read again"
    ):
        write_weights(path, {"a": np.ones(2).astype(dtype)})
    assert not list(tmp_path.iterdir())


def test_big_endian_array_is_written(tmp_path: Path) -> None:
    write_weights(tmp_path / "w.safetensors", {"a": np.arange(3, dtype=">f4")})
    np.testing.assert_array_equal(read_weights(tmp_path / "w.safetensors")["a"], [0, 1, 2])


def test_files_of_the_safetensors_package_are_read(tmp_path: Path) -> None:
    arrays = {"b": np.arange(6.0).reshape(2, 3), "a": np.ones(2, np.int16)}
    safetensors.numpy.save_file(arrays, tmp_path / "w.safetensors")
    read = read_weights(tmp_path / "w.safetensors")
    assert list(read) == ["a", "b"]
    np.testing.assert_array_equal(read["b"], arrays["b"])


def test_bfloat16_is_read_from_safetensors(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    values = np.array([1.5, -3.0], ml_dtypes.bfloat16)
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    assert read_weights(path)["w"].astype(np.float32).tolist() == [1.5, -3.0]


@pytest.mark.parametrize("name", ["mindspore_tiny.ckpt", "mindspore_tiny_crc.ckpt"])
def test_golden_files_of_mindspore_are_read(name: str) -> None:
    read = read_weights(GOLDEN / name)
    with np.load(GOLDEN / "mindspore_tiny.npz") as expected:
        assert sorted(read) == sorted(expected)
        for entry in expected:
            assert read[entry].dtype == np.float32
            np.testing.assert_array_equal(read[entry], expected[entry])


def test_golden_dtypes_of_mindspore_are_read() -> None:
    read = read_weights(GOLDEN / "mindspore_dtypes.ckpt")
    assert read.pop("scalar") == np.float32(2.5)
    assert {name: array.dtype.name for name, array in read.items()} == {
        **{name: name for name in ("float16", "float64", "bfloat16", "int8", "int32", "int64")},
        "uint8": "uint8",
        "bool_": "bool",
    }
    for name, array in read.items():
        assert as_numbers(array).tolist() == [[1, 0, 1 if name == "bool_" else 3]]


def test_written_file_equals_the_golden_mindspore_file(tmp_path: Path) -> None:
    golden = GOLDEN / "mindspore_tiny.ckpt"
    write_weights(tmp_path / "w.ckpt", read_weights(golden))
    assert (tmp_path / "w.ckpt").read_bytes() == golden.read_bytes()


def test_large_array_is_written_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pipeline.models.weights.files.mindspore_file._PART_BYTES", 40)
    array = np.arange(60, dtype=np.float32).reshape(6, 10)
    write_weights(tmp_path / "w.ckpt", {"w": array})
    assert (tmp_path / "w.ckpt").read_bytes().count(b"Float32") == 6
    np.testing.assert_array_equal(read_weights(tmp_path / "w.ckpt")["w"], array)


def test_golden_tensors_of_torch_are_read() -> None:
    read = read_weights(GOLDEN / "torch_tiny.pth")
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(read.pop("whole"), base)
    np.testing.assert_array_equal(read.pop("transposed"), base.T)
    np.testing.assert_array_equal(read.pop("part"), base[1:, 2:])
    assert read.pop("parameter").tolist() == [0.5, -0.5]
    assert (read["scalar"].shape, read.pop("scalar")) == ((), 2.5)
    assert [(name, array.dtype.name) for name, array in read.items()] == [
        (name, name)
        for name in (
            *("float16", "float64", "bfloat16", "int8", "int16", "int32", "int64"),
            *("uint8", "bool"),
        )
    ]
    for name, array in read.items():
        assert as_numbers(array).tolist() == [[1, 0, 1 if name == "bool" else 3]]


def test_golden_torch_training_checkpoint_is_read_as_state_dict() -> None:
    read = read_weights(GOLDEN / "torch_training.pt")
    assert {name: array.shape for name, array in read.items()} == {
        "fc.weight": (3, 4),
        "fc.bias": (4,),
    }


def test_zip_file_with_ckpt_suffix_is_read_as_a_torch_file(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes((GOLDEN / "torch_training.pt").read_bytes())
    assert list(read_weights(tmp_path / "last.ckpt")) == ["fc.weight", "fc.bias"]


def test_old_torch_format_is_refused_with_a_hint(tmp_path: Path) -> None:
    magic = 0x1950A86A20F9469CFC6C  # what torch.save(..., _use_new_zipfile_serialization=False) has
    (tmp_path / "w.pth").write_bytes(pickle.dumps(magic, 2) + pickle.dumps(1001, 2))
    assert "in the format before torch 1.6; load and save it again" in rejected(tmp_path / "w.pth")


class Evil:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> object:
        return os.mkdir, (str(self._mark),)


def as_torch(path: Path, content: bytes, **parts: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w/data.pkl", content)
        for name, data in parts.items():
            archive.writestr(f"w/{name}", data)
    return path


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_code_in_a_pickle_is_not_executed(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    content = pickle.dumps({"w": Evil(mark)}, protocol)
    message = rejected(as_torch(tmp_path / "evil.pth", content))
    assert "it holds more than a dictionary of tensors; save only model.state_dict()" in message
    assert "mkdir" in message or "opcode" in message
    assert not mark.exists()


def storage(kind: str = "torch\nFloatStorage", count: int = 4, key: str = "0") -> bytes:
    """The opcodes of a storage as torch names it."""
    fields = (
        b"X\x07\x00\x00\x00storage",
        b"c" + kind.encode() + b"\n",
        b"V" + key.encode() + b"\n",
    )
    return b"(" + b"".join(fields) + b"Vcpu\nI%d\ntQ" % count


def one_tensor(
    of: bytes | None = None,
    offset: int = 0,
    shape: bytes = b"(I2\nI2\nt",
    strides: bytes = b"(I2\nI1\nt",
) -> bytes:
    """A pickle of one tensor `w`, 2x2 unless it says otherwise."""
    arguments = (of or storage()) + b"I%d\n" % offset + shape + strides + b"I00\n}"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"
    return b"\x80\x02}(Vw\n" + call + b"u."


FOUR = np.arange(4, dtype=np.float32).tobytes()


def test_hand_written_torch_tensor_is_read(tmp_path: Path) -> None:
    path = as_torch(tmp_path / "w.pt", one_tensor(), **{"data/0": FOUR, "byteorder": b"little"})
    assert read_weights(path)["w"].tolist() == [[0, 1], [2, 3]]


HUGE = b"(I1000000\nI1000000\nt"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (one_tensor(offset=1), "w does not fit into its storage"),
        (one_tensor(offset=-1), "w does not fit into its storage"),
        (one_tensor(strides=b"(I-2\nI1\nt"), "w does not fit into its storage"),
        (one_tensor(shape=HUGE, strides=b"(I0\nI0\nt"), "w does not fit into its storage"),
        (one_tensor(shape=b"(I-2\nI-2\nt"), "w has an impossible shape; the file is damaged"),
        (one_tensor(strides=b"(I1\nt"), "w isn't a tensor of numbers"),
        (one_tensor(storage(count=5)), "storage 0 doesn't have the size of its 5 values"),
        (one_tensor(storage(key="../../x")), "a tensor has no storage that can be read"),
        (one_tensor(storage(key="1")), "it lacks its part data/1"),
        (one_tensor(storage("torch\nQInt8Storage")), "it names torch.QInt8Storage"),
        (one_tensor(storage("builtins\neval")), "it names builtins.eval"),
        (b"\x80\x02}(Vw\nI1\nu.", "it holds a dictionary of w; must be a state dict, or have one"),
        (b"\x80\x02I1\n.", "it holds no dictionary of tensors"),
        (b"\x80\x02}(", "its table of contents is damaged"),
        (b"\x80\x02u.", "its table of contents is damaged"),
        (b"\x80\x02}}I1\ns.", "its table of contents is damaged"),
        (b"\x80\x02h\x05.", "its table of contents is damaged"),
        (b"\x80\x02ccollections\nOrderedDict\n(I1\ntR.", "its table of contents is damaged"),
        (b"\x80\x02(lI1\nb.", "it sets attributes of an object"),
    ],
)
def test_damaged_torch_file_is_refused_with_the_reason(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = as_torch(tmp_path / "w.pt", content, **{"data/0": FOUR})
    assert message in rejected(path)


def test_views_much_larger_than_the_torch_file_are_refused(tmp_path: Path) -> None:
    """A small file must not become much memory: many transposed views of one storage."""
    view = one_tensor(storage(count=10_000), shape=b"(I100\nI100\nt", strides=b"(I1\nI100\nt")
    call = view[len(b"\x80\x02}(Vw\n") : -len(b"u.")]
    names = b"".join(b"Vw%d\n" % index + call for index in range(40))
    path = as_torch(tmp_path / "w.pt", b"\x80\x02}(" + names + b"u.", **{"data/0": bytes(40_000)})
    assert "its tensors are more than 16 times its size" in rejected(path)


def test_overlapping_zip_parts_are_refused(tmp_path: Path) -> None:
    path = as_torch(tmp_path / "w.pt", one_tensor(), **{"data/0": FOUR})
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\x01\x02")  # the directory's entry of data/0: its sizes
    content[at + 20 : at + 28] = struct.pack("<II", 4000, 4000)
    path.write_bytes(content)
    assert "its parts overlap" in rejected(path)


def test_invalid_torch_archives_are_refused(tmp_path: Path) -> None:
    big = as_torch(tmp_path / "a.pt", one_tensor(), **{"data/0": FOUR, "byteorder": b"big"})
    assert "its bytes are in big-endian order" in rejected(big)
    with zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w/data.pkl", one_tensor())
    assert "its part data.pkl is compressed; torch stores without compression" in rejected(
        tmp_path / "b.pt"
    )
    with zipfile.ZipFile(tmp_path / "c.pt", "w") as archive:
        archive.writestr("readme", "")
    assert "it is a zip file, but torch.save didn't write it" in rejected(tmp_path / "c.pt")
    (tmp_path / "d.pth").write_bytes(b"hello")
    assert "it is not a file that torch.save wrote" in rejected(tmp_path / "d.pth")


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".pth"])
@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"\xff" * 64, b"hello, I am no weights"])
def test_garbage_error_has_one_line(suffix: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"w{suffix}"
    path.write_bytes(content)
    assert "can't read these weights: " in rejected(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["mindspore_tiny.ckpt", "mindspore_tiny_crc.ckpt", "torch_tiny.pth", "mindspore_tiny.npz"],
)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_file_is_refused_or_read(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is changed or truncated, nothing but DataError comes of it."""
    content = bytearray((GOLDEN / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(1, len(content)))]
    path = tmp_path_factory.mktemp("damaged") / name
    path.write_bytes(content)
    message = complaint(path)
    assert message is None or len(message.splitlines()) == 1


def test_crc_mismatch_is_reported(tmp_path: Path) -> None:
    content = bytearray((GOLDEN / "mindspore_tiny_crc.ckpt").read_bytes())
    content[60] ^= 1
    (tmp_path / "w.ckpt").write_bytes(content)
    assert "its CRC-32 doesn't match; the file is damaged" in rejected(tmp_path / "w.ckpt")


def entry(tag: bytes, tensor: bytes, field: int = 2) -> bytes:
    """A value of a MindSpore checkpoint."""
    value = b"\x0a" + bytes([len(tag)]) + tag + bytes([field << 3 | 2, len(tensor)]) + tensor
    return b"\x0a" + bytes([len(value)]) + value


FLOAT = b"\x08\x01\x12\x07Float32\x1a\x04\0\0\0\0"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            entry(b"w", b"\x08\x02" + FLOAT[2:]),
            "w has shape (2,) of float32, 8 bytes; the file has 4",
        ),
        (entry(b"w", b"\x08" + b"\xff" * 9 + b"\x01" + FLOAT[2:]), "w has an impossible shape"),
        (entry(b"w", FLOAT.replace(b"Float32", b"Qloat32")), "w is Qloat32; must be one of Bool,"),
        (entry(b"", FLOAT), "an entry has no name or no array"),
        (entry(b"w", FLOAT, field=3), "w is a map tensor; only plain arrays can be read"),
        (entry(b"w", FLOAT)[:-1], "it ends in the middle of an entry"),
        (entry(b"a\n\x1b[31m", b"\x08\x02" + FLOAT[2:]), r"a\n\x1b[31m has shape"),
        (b"\x12\x01a", "it is not a MindSpore checkpoint (or an encrypted one)"),
        (b"\x0b", "it is not a MindSpore checkpoint"),
    ],
)
def test_damaged_mindspore_file_is_refused_with_the_reason(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "w.ckpt").write_bytes(content)
    assert message in rejected(tmp_path / "w.ckpt")


def test_text_entry_of_a_mindspore_file_is_skipped(tmp_path: Path) -> None:
    text = entry(b"note", b"\x08\x01\x12\x03str\x1a\x04a\0\0\0")
    (tmp_path / "w.ckpt").write_bytes(text + entry(b"w", FLOAT))
    assert list(read_weights(tmp_path / "w.ckpt")) == ["w"]


def test_archive_must_have_the_size_of_its_headers(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", w=np.zeros(4))
    with zipfile.ZipFile(tmp_path / "w.npz") as archive:
        content = archive.read("w.npy")
    short, long = b"(4,), }     ", b"(400000,), }"
    assert short in content
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr("w.npy", content.replace(short, long.ljust(len(short))))
    problem = "w has shape (400000,), which doesn't match the file's size"
    assert problem in rejected(tmp_path / "w.npz")


def test_npz_with_objects_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", w=np.array([{}], object))
    assert "w holds objects; must be plain numbers" in rejected(tmp_path / "w.npz")


def test_npz_beyond_available_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pipeline.core.host.memory.read_available_bytes", lambda: 30_000)
    np.savez_compressed(tmp_path / "w.npz", w=np.zeros(10_000))
    assert "w would take 0.0 GB of memory, 0.0 GB are available" in rejected(tmp_path / "w.npz")


def test_file_beyond_available_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pipeline.core.host.memory.read_available_bytes", lambda: 2 * 10**9)
    with (tmp_path / "w.ckpt").open("wb") as file:
        file.truncate(3 * 10**9)
    assert "reading it would take 6.0 GB of memory, 2.0 GB are available here" in rejected(
        tmp_path / "w.ckpt"
    )


def test_invalid_weight_paths_are_refused(tmp_path: Path) -> None:
    assert rejected(tmp_path / "w.onnx") == (
        "isn't a weight file; must end in one of .safetensors, .ckpt, .pt, .pth, .npz, .index, "
        ".h5, .hdf5, .keras"
    )
    assert rejected(tmp_path / "w.npz") == "there is no such file"
    (tmp_path / "d.npz").mkdir()
    assert rejected(tmp_path / "d.npz") == "there is no such file"


def test_unwritable_weight_paths_are_refused(tmp_path: Path) -> None:
    arrays = {"w": np.zeros(1, np.float32)}
    with pytest.raises(DataError, match=r"w.pth: can't be written; .* PyTorch reads .safetensors"):
        write_weights(tmp_path / "w.pth", arrays)
    with pytest.raises(RunError, match=r"can't be written: [A-Z][a-z ]+$"):
        write_weights(tmp_path / "nowhere" / "w.npz", arrays)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("suffix", "name", "array", "reason"),
    [
        (".ckpt", "w", np.ones(2, np.complex64), "w is complex64, which a .ckpt can't hold"),
        (".ckpt", "w", np.array(["text"]), "w is <U4, which a .ckpt can't hold"),
        (".npz", "w", np.ones(2, ml_dtypes.bfloat16), "w is bfloat16, which a .npz can't hold"),
        (".safetensors", "__metadata__", np.ones(2), "can't hold an array called __metadata__"),
        (".npz", "half \ud800", np.ones(2), "surrogates not allowed"),
    ],
)
def test_arrays_that_a_format_cannot_hold_are_refused(
    suffix: str, name: str, array: np.ndarray, reason: str, tmp_path: Path
) -> None:
    """And nothing is left behind."""
    with pytest.raises(DataError, match=f"weights{suffix}: can't be written: .*{reason}"):
        write_weights(tmp_path / f"weights{suffix}", {name: array})
    assert not list(tmp_path.iterdir())


def test_zip_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    content = bytearray((GOLDEN / "torch_tiny.pth").read_bytes())
    at = content.index(np.arange(12, dtype=np.float32).tobytes())
    content[at + 1] ^= 0xFF
    (tmp_path / "w.pth").write_bytes(content)
    assert "Bad CRC-32" in rejected(tmp_path / "w.pth")


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.zeros(2, [("x", "f4"), ("y", "i4")]), r"\[\('x', '<f4'\), \('y', '<i4'\)\]"),
        (np.array(["text"]), "<U4"),
        (np.array(["2026-01-01"], "M8[D]"), r"datetime64\[D\]"),
        (np.zeros(2, "V4"), r"\|V4"),
    ],
)
def test_entries_that_are_not_numbers_are_refused(
    array: np.ndarray, dtype: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "w.npz", good=np.ones(2), bad=array)
    with pytest.raises(DataError, match=f"w.npz: can't read these weights: bad is {dtype}; must"):
        read_weights(tmp_path / "w.npz")


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("a" * 70_000, "float32", "an entry has no name of 1 to 1024 characters"),
        ("a" * 1025, "float32", "an entry has no name of 1 to 1024 characters"),
        ("a\0b", "float32", "has a zero byte"),
        ("a", "float8_e5m2", "a is float8_e5m2, which a .npz can't hold"),
    ],
)
def test_npz_that_could_not_be_read_again_is_not_written(
    name: str, dtype: str, reason: str, tmp_path: Path
) -> None:
    arrays = {"first": np.ones(2), name: np.zeros(2, np.dtype(dtype))}
    with pytest.raises(DataError, match=reason):
        write_weights(tmp_path / "a.npz", arrays)
    assert not list(tmp_path.iterdir())
