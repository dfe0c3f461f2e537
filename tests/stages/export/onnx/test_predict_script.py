"""The script of an export to ONNX: its arguments, and what becomes of its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.stages.export.onnx import graph_builder

onnx = pytest.importorskip("onnx", reason="not installed: pip install '.[onnx]'")
pytest.importorskip(
    "onnxruntime", reason="not installed: pip install '.[onnx]'", exc_type=ImportError
)

SCRIPT = Path(graph_builder.__file__).with_name("predict_script.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export whose logits are its samples, three numbers."""
    folder = tmp_path_factory.mktemp("exported")
    kind = onnx.TensorProto.FLOAT
    values = [
        [onnx.helper.make_tensor_value_info(name, kind, ["batch", 3])]
        for name in ("features", "logits")
    ]
    node = onnx.helper.make_node("Identity", ["features"], ["logits"])
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "network", *values),
        opset_imports=[onnx.helper.make_opsetid("", graph_builder.OPSET)],
        ir_version=graph_builder.IR_VERSION,
    )
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    description = {
        "onnx": {"program": "model.onnx", "input": "features", "output": "logits"},
        "columns": {"features": {"shape": [3], "dtype": "float32"}},
        "classes": ["a", "b", "c"],
        "targets": {"task": "classification", "mean": [], "std": []},
    }
    (folder / "model.json").write_text(json.dumps(description))
    (folder / "predict.py").write_text(SCRIPT.read_text())
    np.save(folder / "samples.npy", np.log(np.float32([[1, 2, 7], [5, 3, 2]])))
    return folder


def predict(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "predict.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


@pytest.mark.medium
def test_sequences_have_no_blanks_and_repetitions(folder: Path, tmp_path: Path) -> None:
    """Of paths of 4 classes, of which class 0 is the blank."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    description = json.loads((folder / "model.json").read_text())
    description["columns"]["features"]["shape"] = [6, 4]
    description["classes"] = ["-", "a", "b", "c"]
    description["targets"]["task"] = "sequence"
    (tmp_path / "model.json").write_text(json.dumps(description))
    kind = onnx.TensorProto.FLOAT
    model = onnx.load(tmp_path / "model.onnx")
    for value in (*model.graph.input, *model.graph.output):
        shaped = onnx.helper.make_tensor_value_info(value.name, kind, ["batch", 6, 4])
        value.CopyFrom(shaped)
    onnx.save(model, tmp_path / "model.onnx")
    paths = [[1, 1, 0, 1, 2, 2], [0, 0, 0, 0, 0, 0], [3, 0, 3, 3, 0, 1]]
    np.save(tmp_path / "samples.npy", np.eye(4, dtype=np.float32)[paths])
    assert predict(tmp_path, "samples.npy").stdout.splitlines() == [
        "samples.npy[0]: a a b",
        "samples.npy[1]: no symbol",
        "samples.npy[2]: c c a",
    ]


@pytest.mark.medium
@pytest.mark.parametrize("top", [["--top", "2"], ["--top=2"]])
def test_number_of_classes_is_typed_in_two_ways(top: list[str], folder: Path) -> None:
    result = predict(folder, "samples.npy", *top)
    assert result.stdout.splitlines() == [
        "samples.npy[0]: c 0.7000, b 0.2000",
        "samples.npy[1]: a 0.5000, b 0.3000",
    ]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["samples.npy", "--top"], "--top '': must be a whole number from 1"),
        (["--top", "none", "samples.npy"], "--top 'none': must be a whole number from 1"),
        (["--top=0", "samples.npy"], "--top '0': must be a whole number from 1"),
        (["--tops=2", "samples.npy"], "--tops=2: there is no such option; must be --int8, --we"),
        (["--int8", "--weights", "samples.npy"], "--int8 and --weights: must be one of them"),
        (["samples.npy", "gone.npy"], "gone.npy: there is no such file or folder"),
    ],
)
def test_argument_that_is_wrong_is_named(arguments: list[str], message: str, folder: Path) -> None:
    result = predict(folder, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(message)


@pytest.mark.medium
def test_program_is_chosen_by_an_option(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model = onnx.load(folder / "model.onnx")
    model.graph.node[0].op_type = "Neg"
    onnx.save(model, tmp_path / "model_weights.onnx")
    description = json.loads((tmp_path / "model.json").read_text())
    description["onnx"]["weights"] = "model_weights.onnx"
    (tmp_path / "model.json").write_text(json.dumps(description))
    lines = predict(tmp_path, "--weights", "samples.npy").stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["a", "c"]
    result = predict(folder, "--weights", "samples.npy")
    assert (result.returncode, result.stdout) == (1, "")
    message = "there is no model_weights.onnx here; export with --to onnx --weights"
    assert result.stderr.strip() == message


@pytest.mark.medium
def test_files_without_samples_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("a,b\n")
    result = predict(folder, str(tmp_path))
    assert (result.returncode, result.stdout) == (1, "")
    assert f"{tmp_path}: holds no file that ends in one of .png, " in result.stderr
    result = predict(folder, str(tmp_path / "texts.csv"))
    problem = "the network reads float32 of shape (3,): give a .npy"
    assert f"texts.csv: can't be read: {problem}" in result.stderr


@pytest.mark.medium
@pytest.mark.parametrize(
    ("shape", "dtype", "array", "problem"),
    [
        ((3,), "float32", np.zeros((3, 2)), "features has shape (3, 2); must be (3,) or (n, 3)"),
        ((3,), "float32", np.zeros((2, 2, 3)), "features has shape (2, 2, 3); must be (3,) or"),
        ((3,), "float32", np.zeros((0, 3)), "features has shape (0, 3); must be (3,) or (n, 3)"),
        ((2, 3, 1), "uint8", np.ones((1, 2, 3, 1)) / 2, "features has values that aren't uint8"),
        ((2, 3, 1), "int32", np.full((2, 3, 1), np.nan), "features has values that aren't int32"),
        ((3,), "float32", None, "can't be read: "),
    ],
)
def test_array_of_other_samples_is_refused(
    shape: tuple[int, ...],
    dtype: str,
    array: np.ndarray | None,
    problem: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    """None would be read in another order, or with other values."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    description = json.loads((folder / "model.json").read_text())
    description["columns"]["features"] = {"shape": shape, "dtype": dtype}
    (tmp_path / "model.json").write_text(json.dumps(description))
    if array is None:
        (tmp_path / "new.npy").write_bytes(b"other")
    else:
        np.save(tmp_path / "new.npy", array)
    result = predict(tmp_path, "new.npy")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("new.npy: can't be read: ")
    assert problem in result.stderr


@pytest.mark.medium
def test_one_sample_needs_no_axis_of_samples(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.log([1, 2, 7]))
    result = predict(folder, str(tmp_path / "one.npy"))
    assert result.stdout == f"{tmp_path / 'one.npy'}: c 0.7000\n"


@pytest.mark.parametrize(
    ("shape", "given"),
    [((1,), (5,)), ((1,), ()), ((1, 1), (5, 1, 1)), ((2, 3, 1), (5, 2, 3)), ((2, 3, 1), (2, 3))],
)
def test_last_axis_of_one_value_may_be_left_out(
    shape: tuple[int, ...], given: tuple[int, ...]
) -> None:
    # It imports onnxruntime, which the tests above need too.
    from pipeline.stages.export.onnx import predict_script

    network = predict_script.OnnxNetwork.__new__(predict_script.OnnxNetwork)
    network.description = {"columns": {"x": {"shape": shape, "dtype": "float32"}}}
    count = 5 if 5 in given else 1
    assert network.fit(np.zeros(given), "x").shape == (count, *shape)


@pytest.mark.medium
def test_reader_may_close_the_pipe(folder: Path, tmp_path: Path) -> None:
    """As `| head` does: the script ends without a traceback, also with much left to print."""
    np.save(tmp_path / "many.npy", np.zeros((20_000, 3), np.float32))
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "predict.py", str(tmp_path)], cwd=folder, stdout=write,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(write)
    with os.fdopen(read) as lines:
        assert lines.readline().startswith(f"{tmp_path}/many.npy[0]: a 0.3333")
    assert process.communicate(timeout=60)[1] == ""
