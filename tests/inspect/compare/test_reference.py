"""A step compared with another framework's files: V-03, V-05, V-07, and the first step of G-05."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from pipeline import run
from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.checkpoint.restore import read_checkpoint
from pipeline.core.errors import DataError, RecipeError, UsageError
from pipeline.inspect.compare.reference import pair_reference, read_reference
from pipeline.inspect.compare.tensor_rows import TensorSide, compare_arrays
from pipeline.inspect.dumps.dump_files import TensorName, find_dump, read_dump
from tests.command_line import compare as main
from tests.command_line import dump
from tests.conftest import TINY, compose_tiny
from tests.inspect.dumps.test_dump_step import MLP

OTHER = (
    "model.layers=[flatten,{name: dense, features: 20},relu,{name: dense, features: '$classes'}]"
)
OPS = ("Placeholder", "conv1_Conv2D", "conv1_Relu", "Reshape", "fc_MatMul", "fc_BiasAdd")


@pytest.fixture(scope="module")
def plain(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "run"
    assert run(compose_tiny(cache, *MLP), folder).status == "done"
    return folder


def compute_outputs(run_dir: Path, dumps: Path) -> dict[str, np.ndarray]:
    """Compute the network of a run in numpy, with channels first as PyTorch and MindSpore do.

    The batch is the only tensor of the run's dump that is read; weights are the checkpoint's.
    """
    dumps.mkdir(exist_ok=True)
    assert dump([str(run_dir), "--step=12", f"--out={dumps}"]) == 0
    folder = find_dump(dumps)
    assert folder is not None
    record = read_dump(folder)
    batch = record.read(TensorName("dataset.train.ops", "output"))
    assert batch is not None
    arrays = read_checkpoint(make_checkpoint_path(run_dir / "checkpoints", 12)).arrays
    weights = {path.partition("params/")[2]: array for path, array in arrays.items()}
    kernel = np.float64(weights["conv_0/kernel"])
    images = np.pad(np.float64(batch), ((0, 0), *_same_padding(batch.shape[1:3]), (0, 0)))
    size = (images.shape[1] - 3) // 4 + 1
    windows = [
        [
            np.tensordot(images[:, 4 * i : 4 * i + 3, 4 * j : 4 * j + 3], kernel, 3)
            for j in range(size)
        ]
        for i in range(size)
    ]
    conv = np.array(windows).transpose(2, 3, 0, 1)
    active = np.maximum(conv, 0)
    # The dense layer's rows are in the order of channels last.
    flat = active.reshape(len(active), -1)
    rows = active.transpose(0, 2, 3, 1).reshape(flat.shape)
    products = rows @ np.float64(weights["dense_0/kernel"])
    logits = products + np.float64(weights["dense_0/bias"])
    tensors = (batch.transpose(0, 3, 1, 2), conv, active, flat, products, logits)
    return dict(zip(OPS, map(np.float32, tensors), strict=True))


def _same_padding(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    totals = [max((-(-size // 4) - 1) * 4 + 3 - size, 0) for size in sizes]
    return [(total // 2, total - total // 2) for total in totals]


def write_files(folder: Path, outputs: Mapping[str, np.ndarray]) -> Path:
    folder.mkdir()
    for place, (op, array) in enumerate(outputs.items()):
        np.save(folder / f"{op}.0.{1_700_000_000_000_000 + place}.npy", array)
    return folder


@pytest.fixture(scope="module")
def outputs(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return compute_outputs(plain, tmp_path_factory.mktemp("dumps"))


def read_rows(args: list[str], tmp_path: Path) -> tuple[int, list[dict[str, str]]]:
    file = tmp_path / "rows.csv"
    status = main([*args, f"--out={file}"])
    return status, list(csv.DictReader(io.StringIO(file.read_text())))


@pytest.mark.medium
def test_run_is_compared_with_files_of_another_framework(
    plain: Path,
    outputs: dict[str, np.ndarray],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_files(tmp_path / "reference", outputs)
    status, rows = read_rows([str(plain), f"--reference={folder}"], tmp_path)
    text = capsys.readouterr().out
    assert status == 0, text
    assert "paired with layers by order and shape" in text
    assert "channels first" in text
    pairs = {row["LeftOp"]: row["RightOp"] for row in rows if row["TensorIndex"] == "output:0"}
    assert pairs == {
        "dataset.train.ops": "Placeholder",
        "conv_0": "conv1_Conv2D",
        "relu_0": "conv1_Relu",
        "flatten_0": "Reshape",
        "dense_0": "fc_BiasAdd",
        "train.loss": "*",
        "*": "fc_MatMul",
    }
    compared = [
        row for row in rows if row["LeftOp"] in ("conv_0", "relu_0", "flatten_0", "dense_0")
    ]
    distances = [
        float(row["RelativeEuclideanDistance"])
        for row in compared
        if row["TensorIndex"] == "output:0"
    ]
    assert max(distances) < 1e-5
    assert len(distances) == 4


@pytest.mark.medium
def test_error_is_marked_at_its_operator(
    plain: Path, outputs: dict[str, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {**outputs, "conv1_Relu": 1.5 * outputs["conv1_Relu"]}
    folder = write_files(tmp_path / "reference", wrong)
    assert main([str(plain), f"--reference={folder}"]) == 1
    assert "the first is relu_0:output:0" in capsys.readouterr().out


@pytest.mark.slow
def test_layer_maps_to_several_operators(
    plain: Path, outputs: dict[str, np.ndarray], tmp_path: Path
) -> None:
    folder = write_files(tmp_path / "reference", outputs)
    names = "dense_0:fc_MatMul+fc_BiasAdd"
    args = [str(plain), f"--reference={folder}", f"--map={names}", "--layers=dense_*"]
    _, rows = read_rows(args, tmp_path)
    output_rows = [row for row in rows if row["TensorIndex"] == "output:0"]
    pairs = [(row["LeftOp"], row["RightOp"]) for row in output_rows]
    assert pairs == [("dense_0", "fc_MatMul"), ("dense_0", "fc_BiasAdd")]


@pytest.mark.slow
def test_dump_is_compared_by_its_files(
    plain: Path, outputs: dict[str, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_files(tmp_path / "reference", outputs)
    (tmp_path / "dump").mkdir()
    assert dump([str(plain), "--step=12", f"--out={tmp_path / 'dump'}"]) == 0
    assert main([str(tmp_path / "dump"), f"--reference={folder}"]) == 0
    assert "0 of " in capsys.readouterr().out


@pytest.mark.slow
def test_recipe_is_compared_with_dump_files_by_name(
    plain: Path, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "dump").mkdir()
    assert dump([str(plain), "--step=0", f"--out={tmp_path / 'dump'}"]) == 0
    folder = tmp_path / "reference"
    folder.mkdir()
    for file in (tmp_path / "dump").glob("**/*.npy"):
        file.rename(folder / file.name)
    words = ["+recipe=lenet5_digits", *TINY, f"cache.root={cache}", *MLP]
    status, rows = read_rows([*words, f"--reference={folder}", "--what=all"], tmp_path)
    assert status == 0
    distances = [row["RelativeEuclideanDistance"] for row in rows if row["RightOp"] != "*"]
    assert len(distances) > 15
    assert set(distances) == {"0"}


@pytest.mark.slow
def test_reference_of_another_network_is_refused(
    plain: Path, outputs: dict[str, np.ndarray], cache: Path, tmp_path: Path
) -> None:
    folder = write_files(tmp_path / "reference", outputs)
    assert run(compose_tiny(cache, MLP[0], OTHER, *MLP[2:]), tmp_path / "other").status == "done"
    with pytest.raises(DataError, match="different networks or batches, 1 of 4 layers") as caught:
        main([str(tmp_path / "other"), f"--reference={folder}"])
    assert caught.value.exit_status == 2


@pytest.mark.slow
def test_reference_of_another_batch_size_names_both_shapes(
    plain: Path, outputs: dict[str, np.ndarray], tmp_path: Path
) -> None:
    names = {"conv1_Conv2D": "conv_0", "conv1_Relu": "relu_0", "fc_BiasAdd": "dense_0"}
    halves = {names.get(op, op): array[:8] for op, array in outputs.items()}
    folder = write_files(tmp_path / "reference", halves)
    with pytest.raises(DataError, match=r"conv_0 has shape \(16, .*conv_0 has \(8, "):
        main([str(plain), f"--reference={folder}"])


def test_pairing_prefers_names_to_order(tmp_path: Path) -> None:
    shape = np.ones((2, 3), np.float32)
    folder = write_files(tmp_path / "reference", {"b": shape, "a_x": 2 * shape})
    arrays = {TensorName(path, "output"): shape for path in ("a/x", "b")}
    left = TensorSide("left", "", {"a/x": "relu", "b": "relu"}, list(arrays), arrays.get)
    _, reference, pairs = pair_reference(left, read_reference(folder), {})
    assert pairs == {"b": ("b",), "a/x": ("a_x",)}
    assert reference.about == "2 tensors of 2 operators"


def test_empty_array_is_compared_by_shape(tmp_path: Path) -> None:
    arrays = {"a": np.ones((2, 3), np.float32), "b": np.ones((0, 3), np.float32)}
    folder = write_files(tmp_path / "reference", arrays)
    sides = {TensorName(name, "output"): array for name, array in arrays.items()}
    left = TensorSide("left", "", {"a": "relu", "b": "relu"}, list(sides), sides.get)
    assert pair_reference(left, read_reference(folder), {})[2] == {"a": ("a",), "b": ("b",)}
    named = {TensorName(f"layer_{name}", "output"): array for name, array in arrays.items()}
    layers = {name.layer: "relu" for name in named}
    left = TensorSide("left", "", layers, list(named), named.get)
    pairs = pair_reference(left, read_reference(folder), {})[2]
    assert pairs == {"layer_a": ("a",), "layer_b": ("b",)}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("args", "error", "problem"),
    [
        (["RUN", "--reference=FOLDER", "--against=seed=2"], UsageError, "exclude each other"),
        (["RUN", "RUN", "--reference=FOLDER"], UsageError, "compare takes A B"),
        (["RUN", "--reference=nowhere"], DataError, "1 to 100,000 .npy files of one step, it has"),
        (["nowhere", "--reference=FOLDER"], DataError, "nowhere: there is no such run"),
        (["RUN", "--reference=FOLDER", "--map=conv_0:fc_MatMull"], RecipeError, "did you mean"),
        (["RUN", "--reference=FOLDER", "--layers=dens"], RecipeError, "did you mean dense_0"),
        (["RUN", "--reference=FOLDER", "--step=99"], DataError, "must be from 0 to 12"),
    ],
)
def test_invalid_input_is_refused(
    args: list[str],
    error: type[Exception],
    problem: str,
    plain: Path,
    outputs: dict[str, np.ndarray],
    tmp_path: Path,
) -> None:
    folder = write_files(tmp_path / "reference", outputs)
    with pytest.raises(error, match=problem) as caught:
        main([arg.replace("RUN", str(plain)).replace("FOLDER", str(folder)) for arg in args])
    assert getattr(caught.value, "exit_status", None) == 2


@pytest.mark.medium
@given(st_numpy.arrays(np.float64, (2, 6), elements=st.sampled_from([0.0, 0.5, 1.0, 3.0])))
def test_divergence_is_infinite_if_scipys_is(sides: np.ndarray) -> None:
    left, right = sides
    if not (left.any() and right.any()):
        return
    divergence = compare_arrays(left, right).divergence
    assert np.isinf(divergence) == np.isinf(scipy.stats.entropy(left, right))


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
