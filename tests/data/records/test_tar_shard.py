"""Tars of samples: what webdataset wrote is read, and nothing that is damaged."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.data.image_file import open_image, read_pixels
from pipeline.data.records.tar_shard import MAX_MEMBER_BYTES, TarShard, index_tar, scan_tar
from pipeline.data.records.tfrecord_file import Feature
from tests.conftest import ROOT

GOLDEN = ROOT / "tests/golden/webdataset"
FORMATS = {"gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "ustar": tarfile.USTAR_FORMAT}
Files = Mapping[str, bytes]


def write_tar(path: Path, files: Files, kind: str = "ustar") -> Path:
    with tarfile.open(path, "w", format=FORMATS[kind]) as tar:
        for name, content in files.items():
            add(tar, name, content)
    return path


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", **fields: Any) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.mtime = 0.5
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(content))


def read(path: Path, labels: Mapping[str, int] | None = None) -> list[Mapping[str, Feature]]:
    seen: list[Mapping[str, Feature]] = []
    shard = index_tar(path, lambda record, features: seen.append({**features}), labels or {})
    for record, features in enumerate(seen):
        again = shard.read_example(record)
        assert list(again) == list(features)
        assert len(again) == len(features)
    return seen


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=" ") as error:
        read(path)
    return str(error.value)


def test_samples_match_webdataset_golden() -> None:
    """Golden values of tests/golden/make_webdataset.py."""
    expected = json.loads((GOLDEN / "read.json").read_text())["samples"]
    found = [sample for number in range(2) for sample in read(GOLDEN / f"train-00{number}.tar")]
    assert len(found) == len(expected)
    for features, values in zip(found, expected, strict=True):
        with open_image(features["image"][0], ["PNG"]) as image:
            assert read_pixels(image, 5, 4).tolist() == values["png"]
        np.testing.assert_array_equal(features["npy"], np.float32(values["npy"]))
        assert np.asarray(features["label"]).tolist() == [values["cls"]]
        assert np.asarray(features["score"]).tolist() == [values["json"]["score"]]
        assert np.asarray(features["box"]).tolist() == values["json"]["box"]
        assert features["txt"] == (values["txt"].encode(),)


@pytest.mark.parametrize("kind", FORMATS)
def test_members_match_tarfile(kind: str, tmp_path: Path) -> None:
    """Also names and times that need further headers."""
    files = {
        "./a/0.png": b"x" * 511,
        "a/0.cls": b"1",
        "b/" + "long" * 40 + "/é.png" if kind != "ustar" else "b.png": b"",
        "c.txt": b"y" * 1025,
    }
    path = write_tar(tmp_path / "x.tar", files, kind)
    with tarfile.open(path) as tar:
        expected = [(m.name.removeprefix("./"), m.offset_data, m.size) for m in tar]
    found = [(member.name, member.offset_data, member.size) for member in scan_tar(path)]
    assert [(name.removeprefix("./"), start, size) for name, start, size in found] == expected


def test_members_are_grouped_by_key(tmp_path: Path) -> None:
    """In any order; with folders, hidden files and files without an extension beside them."""
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        add(tar, "d", type=tarfile.DIRTYPE)
        for name in ("d/b.PNG", "d/a.cls", "d/.hidden.png", "README", "d/a.seg.png", "./d/b.cls"):
            add(tar, name, name[-5:].encode())
    samples = read(path)
    assert [set(sample) for sample in samples] == [
        {"png", "image", "cls", "label"},
        {"cls", "seg.png", "label"},
    ]


def test_label_is_a_number_a_field_or_a_name(tmp_path: Path) -> None:
    files = {
        "a.json": b'{"label": 3, "cls": 9, "png": 1, "score": [0.5, 1], "extra": {"x": null}}',
        "a.png": b"image",
        "b.json": b"2.5",
        "c.txt": b" cat\n",
        "d.txt": b"a caption",
        "e.cls": b"7\n",
        "e.json": b'{"label": 3}',
        "e.txt": b"dog",
    }
    a, b, c, d, e = read(write_tar(tmp_path / "x.tar", files), {"cat": 5, "dog": 6})
    assert a["png"] == (b"image",)
    assert np.asarray(a["score"]).tolist() == [0.5, 1]
    assert [np.asarray(x["label"]).tolist() for x in (a, b, c, e)] == [[3], [2.5], [5], [7]]
    assert d["label"] == (b"a caption",)


def test_damaged_tars_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    write_tar(path, {"a.png": b"x" * 600, "b.png": b"y"})
    whole = path.read_bytes()
    for content, message in {
        b"": "is truncated: it lacks the zeros at the end of a tar",
        b"no tar" * 100: "isn't a tar: ",
        whole[:1100]: "is truncated: a.png has 600 bytes, the file 1,100",
        whole[: 3 * 512]: "is truncated: it lacks the zeros",
        whole[: 3 * 512 + 100]: "is truncated: it lacks the zeros",
        whole[: 3 * 512] + b"z" + whole[3 * 512 + 1 :]: "the header at byte 1,536 is damaged: bad",
        whole + whole: "goes on after its end, at byte 2,560; it is several tars",
        gzip.compress(whole): "is compressed; decompress it with gzip -d",
        bz2.compress(whole): "is compressed; decompress it with bzip2 -d",
        lzma.compress(whole): "is compressed; decompress it with xz -d",
        b"\x28\xb5\x2f\xfd" + whole: "is compressed; decompress it with zstd -d",
    }.items():
        path.write_bytes(content)
        assert refusal(path).startswith(message)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("../a.png", {}, "../a.png leads out of the tar"),
        ("a/../../b.png", {}, "leads out of the tar"),
        ("/etc/a.png", {}, "/etc/a.png leads out of the tar"),
        ("a.png", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "a.png is a link to /etc"),
        (
            "a.png",
            {"type": tarfile.LNKTYPE, "linkname": "b.png"},
            "is a link to b.png; tar --deref",
        ),
        ("a.png", {"type": tarfile.FIFOTYPE}, "a.png must be a plain file, not of type b'6'"),
        ("a.png", {"pax_headers": {"GNU.sparse.major": "1"}}, "has a sparse file at byte "),
        ("a.png", {"pax_headers": {"size": "-5"}}, "the pax header before byte .* is damaged"),
        ("a.png", {"pax_headers": {"size": "9" * 17}}, "is truncated: a.png has 99,999,999"),
        ("a.png", {"pax_headers": {"comment": "x" * 2**21}}, "has a header of 2,097,"),
    ],
)
def test_special_members_are_refused(
    name: str, fields: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, name, **fields)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_negative_size_is_refused(tmp_path: Path) -> None:
    """Python's tarfile reads such a tar without end."""
    path = write_tar(tmp_path / "x.tar", {"a.png": b""}, "gnu")
    block = bytearray(path.read_bytes())
    block[124:136] = b"\xff" * 11 + b"\x00"
    block[148:156] = b"%06o\0 " % sum(block[:148] + b" " * 8 + block[156:512])
    path.write_bytes(block)
    assert refusal(path).startswith("is truncated: a.png has -256 bytes")


def test_wrong_samples_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    write_tar(path, {"a.json": b"{"})
    assert refusal(path).startswith("sample a: EOF while parsing")
    write_tar(path, {"a.npy": b"x"})
    assert refusal(path).startswith("sample a: ")
    with tarfile.open(path, "w") as tar:
        add(tar, "a.png")
        add(tar, "./a.PNG")
    assert refusal(path) == "has two members a.PNG"
    write_tar(path, {f"a.{n}": b"" for n in range(65)})
    assert refusal(path).startswith("has more than 64 extensions, such as 64; an extension begins")
    with path.open("wb") as file:
        file.truncate(MAX_MEMBER_BYTES + 5000)
    spans = np.array([[[512, 4], [512, MAX_MEMBER_BYTES + 1]]])
    features = TarShard(path, ("png", "mp4"), spans, {}).read_example(0)
    # A member that isn't used may have any size.
    assert features["png"] == features["image"] == (bytes(4),)
    assert "mp4" in features
    with pytest.raises(ValueError, match="mp4 has 67,108,865 bytes; at most 67,108,864 are read"):
        features["mp4"]


@pytest.mark.medium
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    """Any error but ValueError fails, and so does a record that a second reading changes."""
    content = bytearray((GOLDEN / "train-000.tar").read_bytes()[: 12 * 512] + bytes(1024))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.tar"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with suppress(ValueError):
        read(path)
