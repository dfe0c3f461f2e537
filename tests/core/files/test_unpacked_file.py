"""Compressed files read as what they hold: damaged ones, several members, too much of it."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import pytest

from pipeline.core.files import unpacked_file
from pipeline.core.files.unpacked_file import open_unpacked

CONTENT = b"a,b\n1,2\n" * 100


def unpack(path: Path) -> bytes:
    with open_unpacked(path) as file:
        return file.read()


def pack(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, CONTENT)
    return path


def test_compression_is_detected_by_content(tmp_path: Path) -> None:
    (tmp_path / "plain.gz").write_bytes(CONTENT)
    (tmp_path / "packed.csv").write_bytes(gzip.compress(CONTENT))
    zipped = pack(tmp_path / "zipped.csv", "folder/", "rows.csv", "__MACOSX/._rows.csv", ".hidden")
    for path in (tmp_path / "plain.gz", tmp_path / "packed.csv", zipped):
        assert unpack(path) == CONTENT


@pytest.mark.parametrize(
    ("names", "message"),
    [((), "holds 0 files"), (("a.csv", "b.csv"), r"holds 2 files \('a.csv', 'b.csv'\)")],
)
def test_zip_must_hold_one_file(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    path = pack(tmp_path / "data.zip", *names, ".hidden")
    with pytest.raises(ValueError, match=message):
        unpack(path)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.csv.gz"
    path.write_bytes(gzip.compress(CONTENT)[:-10])
    with pytest.raises(ValueError, match="can't be unpacked: "):
        unpack(path)


def test_unpacked_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacked_file, "MOST_UNPACKED_BYTES", 1000)
    path = tmp_path / "zeros.gz"
    path.write_bytes(gzip.compress(bytes(10_000_000)))
    with pytest.raises(ValueError, match=r"unpacks to more than .* bytes, over 100 times"):
        unpack(path)
