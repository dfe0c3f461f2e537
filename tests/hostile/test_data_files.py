"""Data of strangers: archives, arrays, images and records that are not what they say."""

from __future__ import annotations

import ast
import gzip
import io
import lzma
import os
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pipeline.core.errors import DataError
from pipeline.data.image_file import MAX_PIXELS
from pipeline.data.sources.cifar import Release, unpack
from pipeline.data.sources.example_files import Records
from pipeline.data.sources.idx import read_idx
from pipeline.data.sources.image_columns import decode
from pipeline.data.sources.image_folder import ImageFolder
from pipeline.data.sources.npz import NumpyArchive
from tests.conftest import ROOT
from tests.data.section import section
from tests.data.sources.test_example_files_records import write

SMALL = Release("small", "small", {"a.bin": 1}, {"t.bin": 1}, label_bytes=1, classes=10)
FEW_BYTES = 200 * 2**20
"""What no refusal takes, whatever a file claims to hold."""


def refusal(act: Callable[[], Any]) -> str:
    """The message of the DataError that an act ends in, which is one line and takes no memory."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as caught:
            act()
        assert tracemalloc.get_traced_memory()[1] < FEW_BYTES
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.isprintable()
    return message


def folder_of(root: Path, **fields: Any) -> ImageFolder:
    given = {"image_size": None, "follow_links": False, **fields}
    return ImageFolder(**section(root=root, **given))


def png(side: int = 4) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


def lay_images(root: Path) -> Path:
    """A folder with two images of one class in either split."""
    for split in ("train", "eval"):
        (root / split / "ant").mkdir(parents=True)
        for number in range(2):
            (root / split / "ant" / f"{number}.png").write_bytes(png())
    return root


@pytest.mark.slow
def test_gzip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    bomb = tmp_path / "x-ubyte.gz"
    head = b"\0\0\x08\x01" + (4).to_bytes(4, "big")
    bomb.write_bytes(gzip.compress(head + bytes(64 * 2**20)))
    message = refusal(lambda: read_idx(bomb, (4,)))
    assert "has more bytes than the 4 values it announces" in message


@pytest.mark.slow
@pytest.mark.parametrize("pax", [False, True])
@pytest.mark.parametrize(("suffix", "packed"), [(".tar.gz", gzip), (".tar.xz", lzma)])
def test_archive_bomb_is_not_unpacked(suffix: str, packed: Any, pax: bool, tmp_path: Path) -> None:
    """A member, or the header of one, of far more than the files that are wanted."""
    member = tarfile.TarInfo("readme")
    member.size = 40 * 2**20
    if pax:
        member.type = tarfile.XHDTYPE
    path = tmp_path / f"small{suffix}"
    path.write_bytes(packed.compress(member.tobuf() + bytes(member.size)))
    message = refusal(lambda: unpack(path, SMALL, tmp_path / "cache"))
    assert "it unpacks to more than 16,783,362 bytes" in message
    assert os.listdir(tmp_path / "cache") == [".lock"]


def test_oversized_archive_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "small.tar"
    with path.open("wb") as file:
        file.truncate(10**12)
    message = refusal(lambda: unpack(path, SMALL, tmp_path / "cache"))
    assert "has 1,000,000,000,000 bytes; it can't be small" in message


def npy(descr: str, shape: str) -> bytes:
    """The head of an array in numpy's format, version 1.0."""
    head = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "message"),
    [
        (npy("'|u1'", "(10**12,)"), "malformed node or string"),
        (
            npy("'|u1'", "(1000000000000,)"),
            "has shape (1000000000000,), which doesn't match the file",
        ),
        (npy("'|u1'", "(-1,)"), "has an impossible shape"),
        (
            npy("'|V0'", "(1000000000000,)"),
            "has shape (1000000000000,), which doesn't match the file",
        ),
        (npy("'|O'", "(1,)"), "holds objects; must be plain numbers"),
        (npy("[('a', '|O')]", "(1,)"), "holds objects; must be plain numbers"),
        (npy("'<f4'", "(" + "(" * 150 + ")" * 150 + ",)"), "x_train can't be read: "),
        (npy("'<f4'", "-" * 5000 + "1"), "x_train can't be read: "),
        (npy("__import__('os').mkdir('pwned')", "(1,)"), "malformed node or string"),
        (b"\x93NUMPY\x03\x00" + bytes(60), "must be in version 1.0 or 2.0 of .npy"),
        (b"cos\nmkdir\n(S'pwned'\ntR.", "magic string is not correct"),
        (b"", "x_train can't be read: "),
    ],
)
def test_hostile_array_headers_are_refused(
    head: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("d.npz", "w") as archive:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            archive.writestr(f"{name}.npy", head)
    archive = NumpyArchive(**section(root=Path("d.npz"), classes=None))
    assert message in refusal(lambda: archive.read(tmp_path))
    assert os.listdir() == ["d.npz"]


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_unknown_npz_compression_is_refused(method: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "d.npz", "w", method) as archive:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            archive.writestr(f"{name}.npy", npy("'|u1'", "(1,)") + b"1")
    archive = NumpyArchive(**section(root=tmp_path / "d.npz", classes=None))
    assert "must be stored or deflated" in refusal(lambda: archive.read(tmp_path))


def test_array_larger_than_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.core.host.memory.read_available_bytes", lambda: 10**9)
    with zipfile.ZipFile(tmp_path / "d.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            archive.writestr(f"{name}.npy", npy("'|u1'", "(1,)") + b"1")
    content = bytearray((tmp_path / "d.npz").read_bytes())
    at = content.index(b"PK\x01\x02")  # the directory's entry of x_train: its size
    content[at + 24 : at + 28] = struct.pack("<I", 2 * 10**9)
    (tmp_path / "d.npz").write_bytes(content)
    archive = NumpyArchive(**section(root=tmp_path / "d.npz", classes=None))
    message = refusal(lambda: archive.read(tmp_path))
    assert "x_train would take 2.0 GB of memory, 1.0 GB are available here" in message


def test_image_bomb_is_not_decoded(tmp_path: Path) -> None:
    root = lay_images(tmp_path / "data")
    side = 60_000
    content = bytearray(png())
    content[16:24] = struct.pack(">II", side, side)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    bomb = root / "train" / "ant" / "bomb.png"
    bomb.write_bytes(png())
    spec = folder_of(root, image_size=[4, 4])
    images = spec.read(tmp_path).train.columns["image"]
    bomb.write_bytes(content)
    assert "can't be read as an image: " in refusal(lambda: images[:])
    assert "can't be read as an image: " in refusal(lambda: spec.read(tmp_path))
    side = int(MAX_PIXELS**0.5) + 1
    content[16:24] = struct.pack(">II", side, side)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    bomb.write_bytes(content)
    assert f"it has {side:,} x {side:,} pixels; at most" in refusal(lambda: images[:])


def test_jpeg_with_too_many_scans_is_not_decoded(tmp_path: Path) -> None:
    root = lay_images(tmp_path / "data")
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "JPEG", progressive=True)
    content = buffer.getvalue()
    first = content.index(b"\xff\xda")
    content = content[:first] + content[first:-2] * 100 + content[-2:]
    path = root / "train" / "ant" / "0.jpg"
    path.write_bytes(content)
    spec = folder_of(root, image_size=[4, 4])
    assert "it has more than 200 scans" in refusal(lambda: spec.read(tmp_path))
    assert "it has more than 200 scans" in refusal(lambda: decode(str(path), 4, 4))


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    root, secret = lay_images(tmp_path / "data"), tmp_path / "secret.png"
    secret.write_bytes(png())
    link = root / "train" / "ant" / "9.png"
    link.symlink_to(secret)
    assert f"{link}: leads out of {root}, to {secret}" in refusal(
        lambda: folder_of(root).read(tmp_path)
    )
    assert len(folder_of(root, follow_links=True).read(tmp_path).train) == 3
    link.unlink()
    link.symlink_to("0.png")
    assert len(folder_of(root).read(tmp_path).train) == 3
    (tmp_path / "classes").mkdir()
    (tmp_path / "classes" / "0.png").write_bytes(png())
    for split in ("train", "eval"):
        (root / split / "bee").symlink_to(tmp_path / "classes")
    message = refusal(lambda: folder_of(root).read(tmp_path))
    assert f"{root / 'train' / 'bee'}: leads out of {root}" in message
    assert "dataset.follow_links=true on the command line" in message


def test_pipe_among_images_is_ignored(tmp_path: Path) -> None:
    root = lay_images(tmp_path / "data")
    os.mkfifo(root / "train" / "ant" / "pipe.png")
    assert len(folder_of(root).read(tmp_path).train) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "is nested too deeply"),
        ('{"format": "pipeline.records", "version": 1}', "missing; it needs a value"),
        ('{"a": ' + "9" * 5000 + "}", "can't be read as JSON: "),
        ("null", "isn't a file of this program"),
    ],
)
def test_invalid_records_description_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "records.json").write_text(text)
    assert message in refusal(lambda: Records(**section(root=tmp_path)).read(tmp_path))


def test_records_description_with_outside_files_is_refused(tmp_path: Path) -> None:
    column = '{"dtype": "uint8", "shape": [1], "samples_per_record": 1, "files": [FILE]}'
    file = '{"name": "../x.array_record", "samples": 1, "size_bytes": 1, "first_crc32": 0}'
    split = f'{{"samples": 1, "columns": {{"image": {column.replace("FILE", file)}}}}}'
    (tmp_path / "records.json").write_text(
        '{"format": "pipeline.records", "version": 1, "source": "x", "classes": ["a"], '
        f'"train": {split}, "eval": {split}}}'
    )
    message = refusal(lambda: Records(**section(root=tmp_path)).read(tmp_path))
    assert "train.columns.image.files.0.name = ../x.array_record: " in message


def test_records_description_larger_than_its_files_is_refused(tmp_path: Path) -> None:
    """Memory is taken for what a description says before a record is read."""
    folder = write(tmp_path / "records")
    text = (folder / "records.json").read_text()
    (folder / "records.json").write_text(text.replace("6,", "6000000,"))
    assert "image" in refusal(
        lambda: Records(**section(root=folder)).read(tmp_path).train.columns["image"][:]
    )


CODE = frozenset({"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
"""Modules whose readers run what they read."""
RUN = frozenset({"eval", "exec", "compile", "__import__", "unsafe_load", "full_load"})


def names_in(file: Path) -> set[str]:
    """The modules that a file imports, the functions that it calls by their last name, and those
    of libraries whose reading takes memory for whatever a file says."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.add(node.func.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.add(f"{ast.unparse(node.func.value)}.{node.func.attr}")
            # `module.eval()`, with no text to run, is the mode of a network.
            found |= {node.func.attr} & RUN - {"compile"} if node.args else set()
    return found


@pytest.mark.slow
def test_package_has_no_pickle_or_code_readers() -> None:
    """No module of the package imports a reader of pickles, or runs a text; each kind of file is
    opened in one place, which has the bounds."""
    used = {file: names_in(file) for file in sorted((ROOT / "pipeline").rglob("*.py"))}
    assert [file for file, names in used.items() if names & (CODE | RUN)] == []
    # The script of an ONNX export runs by itself, on the images of its user.
    script = "predict_script.py"
    openers = {
        "np.load": {"digits.py", "learning_curves.py", script},
        "Image.open": {"image_file.py", script},
    }
    openers |= {"yaml.load": {"safe_yaml.py"}, "np.fromfile": {"array_database.py", "cifar.py"}}
    for opener, files in openers.items():
        assert {file.name for file, names in used.items() if opener in names} == files, opener


def test_error_without_a_message_is_reported_by_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError

    root = lay_images(tmp_path / "data")
    images = folder_of(root, image_size=[4, 4]).read(tmp_path).train.columns["image"]
    monkeypatch.setattr("pipeline.data.sources.image_columns.open_image", fail)
    assert refusal(lambda: images[:]).endswith(".png: can't be read as an image: ValueError")
