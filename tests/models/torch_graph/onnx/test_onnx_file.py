"""ONNX files: what is wrong with one is refused in a line, and nothing outside of it is read."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from pipeline.models.torch_graph.onnx.onnx_file import OnnxModel, read_onnx
from tests.models.torch_graph.onnx.golden_onnx import FOLDER, encode, model, node, tensor

ARRAY = np.arange(6, dtype=np.float32)
ADD = [node("Add", ["x", "w"], "y")]


def read(folder: Path, content: bytes) -> OnnxModel:
    """Read the content of a file."""
    file = folder / "net.onnx"
    file.write_bytes(content)
    return read_onnx(file)


def place(location: str, offset: int | str = 0) -> list[bytes]:
    """The place of external data."""
    return [
        encode({1: "location", 2: location}),
        encode({1: "offset", 2: str(offset)}),
        encode({1: "length", 2: str(ARRAY.nbytes)}),
    ]


def external(location: str, offset: int | str = 0) -> bytes:
    """A model whose weight is in another file."""
    fields = {"external_data": place(location, offset), "location": 1, "raw_data": []}
    return model(ADD, [tensor("w", ARRAY, **fields)])


def test_external_data_is_read(tmp_path: Path) -> None:
    (tmp_path / "net.data").write_bytes(bytes(8) + ARRAY.tobytes())
    array = read(tmp_path, external("net.data", 8)).initializers["w"]
    np.testing.assert_array_equal(array, ARRAY)


@pytest.mark.parametrize("location", ["../net.data", "/etc/passwd", "link"])
def test_external_data_outside_of_the_folder_is_refused(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "net.data").write_bytes(ARRAY.tobytes())
    (folder / "link").symlink_to(tmp_path / "net.data")
    with pytest.raises(ValueError, match="which is outside of the file's folder"):
        read(folder, external(location))


def test_short_external_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.data").write_bytes(ARRAY.tobytes()[:-1])
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("net.data", "loop"):
        with pytest.raises(ValueError, match=f"{name} is missing or too short"):
            read(tmp_path, external(name))


@pytest.mark.parametrize(
    ("location", "offset"),
    [("net\0.data", 0), ("net.data", "z"), ("net.data", "-1"), ("net.data", "9" * 5000)],
)
def test_place_of_external_data_that_is_none_is_refused(
    location: str, offset: int | str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="external data of tensor w has no valid location, offset"):
        read(tmp_path, external(location, offset))


def leak(attribute: bytes) -> bytes:
    return model([node("LeakyRelu", ["x"], "y", attribute=[attribute])])


FLOAT = b"\x15" + np.float32(0.3).tobytes()
"""Field 2 of an attribute, a float32."""


def test_attribute_without_a_type_has_that_of_its_value(tmp_path: Path) -> None:
    """As in the first files, which other programs still read."""
    (found,) = read(tmp_path, leak(encode({1: "alpha"}) + FLOAT)).nodes
    assert found.attributes == {"alpha": 0.3}
    (found,) = read(tmp_path, leak(encode({1: "alpha", 8: [1, 2]}))).nodes
    assert found.attributes == {"alpha": (1, 2)}
    (found,) = read(tmp_path, leak(encode({1: "alpha", 20: 1}))).nodes
    assert found.attributes == {"alpha": 0.0}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (leak(encode({1: "alpha", 2: b"abc", 20: 1})), "it ends in the middle of a number"),
        (leak(encode({1: "alpha"})), "attribute alpha has no type and no value"),
        (b"", "it is not an ONNX file"),
        (b"\x00" * 40, "it is not an ONNX file|has 0 nodes"),
        (b"{}", "it ends in the middle|it is not an ONNX file"),
        (model([]), "has 0 nodes"),
        (
            model(ADD, [tensor("w", ARRAY, dims=[2**40])]),
            "tensor w has 24 bytes for 4,398,046,511,104",
        ),
        (model(ADD, [tensor("w", ARRAY, data_type=8)]), "tensor w is of type 8 of ONNX"),
        (model(ADD, output=[]), "has no output"),
    ],
)
def test_damaged_file_is_refused(content: bytes, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"net\.onnx: .*({problem})"):
        read(tmp_path, content)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"net\.onnx: can't be read"):
        read_onnx(tmp_path / "net.onnx")


def test_randomly_damaged_file_is_refused_or_read(tmp_path: Path) -> None:
    """No other exception, and no endless loop, whatever bytes change."""
    content = (FOLDER / "residual.onnx").read_bytes()
    generator = random.Random(0)
    outcomes = set()
    for _ in range(60):
        damaged = bytearray(content[: generator.randrange(1, len(content))])
        for _ in range(generator.randrange(4)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        try:
            read(tmp_path, bytes(damaged))
            outcomes.add("read")
        except ValueError:
            outcomes.add("refused")
    assert "refused" in outcomes
