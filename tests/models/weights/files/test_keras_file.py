"""Keras's files: their arrays and names, and what a hostile one is refused with."""

from __future__ import annotations

import builtins
import contextlib
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.core.errors import DataError
from pipeline.core.host import memory
from pipeline.models.weights.files.weight_files import read_weights
from tests.conftest import ROOT

h5py = pytest.importorskip("h5py")
FOLDER = ROOT / "tests" / "golden" / "weights" / "tensorflow"


def test_keras_formats_have_the_same_weights() -> None:
    weights = [
        {array.tobytes() for array in read_weights(FOLDER / name).values()}
        for name in ("keras2.h5", "keras3.keras", "keras3.weights.h5")
    ]
    assert len(weights[0]) == 18
    assert weights[0] == weights[1] == weights[2]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("keras2.h5", "7.middle.kernel"),
        ("keras3.keras", "8.dense_1.kernel"),
        ("keras3.weights.h5", "dense.1.kernel"),
    ],
)
def test_weight_names_have_layer_numbers(name: str, expected: str) -> None:
    assert read_weights(FOLDER / name)[expected].shape == (5, 5)


def link_outside(file: Any) -> None:
    file["layer"] = h5py.ExternalLink("/etc/passwd", "x")


def link_weights_outside(file: Any) -> None:
    file["model_weights"] = h5py.ExternalLink("other.h5", "/")


def link_softly(file: Any) -> None:
    file["layer"] = h5py.SoftLink("/nowhere")


def store_outside(file: Any) -> None:
    file.create_dataset("a/b", (4,), "f4", external=[("other.bin", 0, 16)])


def link_in_a_circle(file: Any) -> None:
    group = file.create_group("a")
    group["b"] = group
    group["c"] = group


def write_text(file: Any) -> None:
    file["a/b"] = "text"


def claim_memory(file: Any) -> None:
    file.create_dataset("a/b", (2**20, 2**20, 2**8), "f4", chunks=(1, 1, 1))


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (link_outside, "layer isn't an array or a new group of this file"),
        (link_weights_outside, "model_weights isn't an array"),
        (link_softly, "layer isn't an array"),
        (store_outside, "a/b isn't an array"),
        (link_in_a_circle, "isn't an array or a new group"),
        (write_text, "a/b is object, which isn't read"),
        (claim_memory, "would take 1,125,899.9 GB of memory"),
        (lambda file: None, "it holds no arrays"),
    ],
)
def test_malicious_file_is_refused(
    write: Callable[[Any], None], problem: str, tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "net.h5", "w") as file:
        write(file)
    with pytest.raises(DataError, match=problem):
        read_weights(tmp_path / "net.h5")


def test_non_text_layer_name_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "net.h5", "w") as file:
        file.create_group(b"layer\xff")
    with pytest.raises(DataError, match="can't read these weights: it is damaged"):
        read_weights(tmp_path / "net.h5")


def test_layer_names_attribute_must_be_a_list(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "net.h5", "w") as file:
        file["dense/kernel"] = np.ones((2, 3), np.float32)
        file.attrs["layer_names"] = 3
    with pytest.raises(DataError, match="can't read these weights: it is damaged"):
        read_weights(tmp_path / "net.h5")


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**13), st.sampled_from((0, 1, 128, 255)))
@example(place=0, byte=0)
def test_file_with_a_changed_byte_is_read_or_refused(place: int, byte: int) -> None:
    """Without another error."""
    content = bytearray((FOLDER / "keras3.weights.h5").read_bytes())
    content[place % len(content)] = byte
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "net.weights.h5"
        file.write_bytes(content)
        with contextlib.suppress(DataError):
            read_weights(file)


def test_archive_beyond_available_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "net.keras"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.weights.h5", bytes(2**20))
        archive.writestr("config.json", "{}")
    monkeypatch.setattr(memory, "read_available_bytes", lambda: 2**19)
    with pytest.raises(DataError, match="reading it would take"):
        read_weights(file)


@pytest.mark.parametrize("name", ["net.h5", "net.keras"])
def test_file_of_another_kind_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04 not this")
    with pytest.raises(DataError, match="can't read these weights"):
        read_weights(tmp_path / name)


def test_archive_without_weights_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "net.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    with pytest.raises(DataError, match=r"its part model\.weights\.h5 is missing"):
        read_weights(tmp_path / "net.keras")


def test_deeply_nested_config_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "net.keras", "w") as archive:
        archive.writestr("model.weights.h5", (FOLDER / "keras3.weights.h5").read_bytes())
        archive.writestr("config.json", "[" * 100_000)
    with pytest.raises(DataError, match=r"config\.json is nested too deeply"):
        read_weights(tmp_path / "net.keras")


def test_missing_h5py_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def fail(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "h5py":
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(DataError, match=r"needs h5py; pip install 'recipe-pipeline\[h5\]'"):
        read_weights(FOLDER / "keras2.h5")


def test_half_precision_is_preserved(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "net.h5", "w") as file:
        file["dense/kernel"] = np.ones((2, 3), np.float16)
    assert read_weights(tmp_path / "net.h5")["dense.0.kernel"].dtype == np.float16


@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        ([(2, 4), (2, 4), (4,)], ["kernel", "1", "bias"]),  # an LSTM
        ([(3, 2, 4), (2, 4)], ["kernel", "bias"]),  # a projection of attention
        ([(2, 4), (4,), (4,)], ["kernel", "bias", "2"]),
    ],
)
def test_bias_has_fewer_axes_than_the_kernel(
    shapes: list[tuple[int, ...]], names: list[str], tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "net.weights.h5", "w") as file:
        for number, shape in enumerate(shapes):
            file[f"layers/cell/vars/{number}"] = np.zeros(shape, np.float32)
    arrays = read_weights(tmp_path / "net.weights.h5")
    assert list(arrays) == [f"cell.0.{name}" for name in names]
