from __future__ import annotations

import gzip
import shutil
import struct
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import DataError
from pipeline.data.sources.idx import FashionMnist, Mnist, read_idx, read_split
from tests.data.section import section

REAL = Path(__file__).parents[4] / "shared" / "data" / "mnist"
needs_real_files = pytest.mark.skipif(not REAL.is_dir(), reason="the MNIST files are not here")


def idx(values: np.ndarray, magic: int | None = None) -> bytes:
    """Values as an IDX file, written from the format's description."""
    content = struct.pack(">i", 0x0800 + values.ndim if magic is None else magic)
    for size in values.shape:
        content += struct.pack(">i", size)
    return content + bytes(int(value) for value in values.ravel())


def pixels(count: int) -> np.ndarray:
    return (np.arange(count * 28 * 28) * 7 % 256).reshape(count, 28, 28).astype(np.uint8)


def write_split(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    (folder / "train-images-idx3-ubyte").write_bytes(idx(images))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))


@pytest.mark.slow
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), zipped=st.booleans())
def test_read_idx_returns_written_values(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], zipped: bool
) -> None:
    values = np.arange(np.prod(shape)).reshape(shape) % 256
    path = tmp_path_factory.mktemp("idx") / ("values.gz" if zipped else "values")
    path.write_bytes(gzip.compress(idx(values)) if zipped else idx(values))

    np.testing.assert_array_equal(read_idx(path, tuple(shape)), values)


def test_read_split_accepts_unpacked_and_gzipped_files(tmp_path: Path) -> None:
    write_split(tmp_path, pixels(3), np.array([5, 0, 9]))

    split = read_split(tmp_path, "train", 3)

    np.testing.assert_array_equal(split.columns["image"][:], pixels(3)[:, :, :, None])
    assert split.columns["label"][:].tolist() == [5, 0, 9]
    assert split.columns["label"].dtype == np.int32
    assert len(split) == 3


def test_labels_above_nine_are_refused(tmp_path: Path) -> None:
    write_split(tmp_path, pixels(3), np.array([1, 10, 2]))

    with pytest.raises(DataError, match=r"train-labels.*label 10 of sample 1 must be 0 to 9"):
        read_split(tmp_path, "train", 3)


VALUES = np.arange(6).reshape(2, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0\x08", "3 bytes are too short for an IDX header"),
        (idx(VALUES, magic=0x0D02), "begins with 00000d02; must begin with 00000802"),
        (idx(VALUES, magic=0x0803), "begins with 00000803; must begin with 00000802"),
        (idx(VALUES.T), r"has shape \(3, 2\) instead of \(2, 3\)"),
        (idx(VALUES)[:-1], "has fewer bytes than the 6 values it announces"),
        (idx(VALUES) + b"\0", "has more bytes than the 6 values it announces"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_of_wrong_structure_are_refused(
    tmp_path: Path, content: bytes, message: str, suffix: str
) -> None:
    path = tmp_path / f"values{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)

    with pytest.raises(DataError, match=rf"{path.name}: {message}"):
        read_idx(path, (2, 3))


@pytest.mark.parametrize(
    "damage",
    [
        lambda zipped: b"not gzip",
        lambda zipped: zipped[:-9],
        lambda zipped: zipped[:12] + b"\xff\xff" + zipped[14:],
    ],
)
def test_damaged_gzip_is_named(tmp_path: Path, damage) -> None:
    path = tmp_path / "values.gz"
    path.write_bytes(damage(gzip.compress(idx(VALUES))))

    with pytest.raises(DataError, match=r"values.gz: can't be read"):
        read_idx(path, (2, 3))


@pytest.mark.parametrize("source", [Mnist, FashionMnist])
def test_missing_files_are_named(tmp_path: Path, source: type[Mnist]) -> None:
    (tmp_path / "train-images-idx3-ubyte").touch()
    (tmp_path / "t10k-labels-idx1-ubyte.gz").touch()

    with pytest.raises(DataError) as caught:
        source(**section(root=tmp_path)).read(tmp_path / "cache")

    message = str(caught.value)
    lacking = "train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz (with or without .gz)"
    assert message.startswith(f"{tmp_path} lacks {lacking}; dataset.root must be the folder")


def test_failed_download_names_the_files_and_the_twin(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        FashionMnist(**section()).read(tmp_path)

    message = str(caught.value)
    for file in FashionMnist.files:
        assert file.name in message
    assert f"into {tmp_path / 'fashion_mnist'}" in message
    assert "dataset.like=fashion_mnist" in message


@pytest.mark.slow
@needs_real_files
def test_changed_downloaded_file_is_named(tmp_path: Path) -> None:
    """A whole file of the right shape, which would be trained on; the user's own may be any."""
    folder = tmp_path / "mnist"
    shutil.copytree(REAL, folder)
    folder.chmod(0o700)
    assert len(Mnist(**section()).read(tmp_path).train) == 60_000
    path = folder / "t10k-labels-idx1-ubyte.gz"
    content = gzip.decompress(path.read_bytes())
    path.chmod(0o600)
    path.write_bytes(gzip.compress(content[:-1] + bytes([1])))
    with pytest.raises(DataError, match=rf"^{path}: isn't the published file: md5 .*"):
        Mnist(**section()).read(tmp_path)
    assert len(Mnist(**section(root=folder)).read(tmp_path).eval) == 10_000


def test_class_names_match_number_of_classes() -> None:
    for source in (Mnist, FashionMnist):
        facts = source(**section()).facts()
        assert len(set(source.class_names)) == facts.classes
        assert (facts.image, facts.train_size, facts.eval_size) == ((28, 28, 1), 60_000, 10_000)


@pytest.mark.slow
@needs_real_files
def test_real_mnist_is_read(tmp_path: Path) -> None:
    data = Mnist(**section(root=REAL)).read(tmp_path)

    assert data.train.columns["image"].shape == (60_000, 28, 28, 1)
    assert data.eval.columns["image"].shape == (10_000, 28, 28, 1)
    assert data.train.columns["label"][:5].tolist() == [5, 0, 4, 1, 9]
    # The class counts of both label files, as commonly published.
    assert np.bincount(data.train.columns["label"][:]).tolist() == [
        *(5923, 6742, 5958, 6131, 5842),
        *(5421, 5918, 6265, 5851, 5949),
    ]
    assert np.bincount(data.eval.columns["label"][:]).tolist() == [
        *(980, 1135, 1032, 1010, 982),
        *(892, 958, 1028, 974, 1009),
    ]
    # D-06: mean and deviation of the training images, scaled to 0..1.
    scaled = data.train.columns["image"][:] / np.float32(255)
    assert (round(float(scaled.mean()), 4), round(float(scaled.std()), 4)) == (0.1307, 0.3081)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@needs_real_files
def test_real_mnist_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    handler = partial(SimpleHTTPRequestHandler, directory=str(REAL))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        mirror = f"http://127.0.0.1:{server.server_port}"
        source = Mnist(**section(mirrors=[mirror]))
        downloaded = source.read(tmp_path)
        server.shutdown()
        thread.join()

    assert {path.name for path in (tmp_path / "mnist").glob("*.gz")} == {
        file.name for file in Mnist.files
    }
    again = source.read(tmp_path)
    np.testing.assert_array_equal(
        again.eval.columns["label"][:], downloaded.eval.columns["label"][:]
    )
