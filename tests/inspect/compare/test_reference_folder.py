"""Folders of another framework's tensors: names, order, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.inspect.compare.reference_folder import read_reference
from pipeline.inspect.dumps.tensor_names import TensorName

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


def save(folder: Path, *names: str) -> Path:
    for name in names:
        np.save(folder / name, ARRAY)
    return folder


def test_names_of_all_frameworks_are_parsed(tmp_path: Path) -> None:
    save(
        tmp_path,
        "conv1_Relu.0.1600000000000002.npy",
        "conv1_Relu.1.1600000000000003.npy",
        "Conv2D.Conv2D-op107.2.5.1600000000000001.output.0.DefaultFormat.npy",
        "Conv2D.Conv2D-op107.2.5.1600000000000001.input.1.NCHW.npy",
        "stage_0_conv_1.output_gradient.0.1600000000000004.npy",
        "stage_0_conv_1.gradient.kernel.1600000000000004.npy",
        "v1.5.net.0.1600000000000005.npy",
    )
    side = read_reference(tmp_path)
    assert list(map(str, side.names)) == [
        "Conv2D-op107:input:1",
        "Conv2D-op107:output:0",
        "conv1_Relu:output:0",
        "conv1_Relu:output:1",
        "stage_0_conv_1:output_gradient:0",
        "stage_0_conv_1:gradient:kernel",
        "v1.5.net:output:0",
    ]
    array = side.read(TensorName("conv1_Relu", "output"))
    assert array is not None
    assert array.tobytes() == ARRAY.tobytes()


def test_execution_order_file_sets_the_layer_order(tmp_path: Path) -> None:
    save(tmp_path, "a.0.3.npy", "net_b.0.1.npy", "Add.Add-op2.1.1.9.output.0.X.npy", "late.0.0.npy")
    order = "Default/net/Add-op2,x,y\nnet/b\na, 1\nnot/dumped\n"
    (tmp_path / "ms_execution_order_graph_0.csv").write_text(order)
    assert list(read_reference(tmp_path).layers) == ["Add-op2", "net_b", "a", "late"]


def test_subfolders_are_read_and_links_are_skipped(tmp_path: Path) -> None:
    inner = tmp_path / "time" / "0"
    inner.mkdir(parents=True)
    save(inner, "a.0.1.npy")
    (tmp_path / "b.0.2.npy").symlink_to(inner / "a.0.1.npy")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "c.0.3.npy")  # reading it would never end
    assert list(read_reference(tmp_path).layers) == ["a"]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ((), "must hold 1 to 100,000 .npy files of one step, it has 0"),
        (("weights.npy",), "must be named OP.OUTPUT.MICROSECONDS.npy"),
        (("a.0.1.npy", "a.0.2.npy"), "a:output:0 is in a.0.1.npy and a.0.2.npy; must be of one"),
    ],
)
def test_invalid_folders_are_refused(names: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=problem):
        read_reference(save(tmp_path, *names))


def test_several_execution_orders_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "a.0.1.npy")
    for number in range(2):
        (tmp_path / f"ms_execution_order_graph_{number}.csv").write_text("a\n")
    with pytest.raises(DataError, match="must have one execution order"):
        read_reference(tmp_path)


def test_damaged_and_hostile_files_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "a.0.1.npy")
    (tmp_path / "b.0.1.npy").write_bytes(b"\x93NUMPY")
    np.save(tmp_path / "c.0.1.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "d.0.1.npy", np.array(["text"]))
    side = read_reference(tmp_path)
    for op, problem in {"b": "can't be read", "c": "holds objects", "d": "must have num"}.items():
        with pytest.raises(DataError, match=problem):
            side.read(TensorName(op, "output"))
