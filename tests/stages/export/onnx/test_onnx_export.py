"""Networks in ONNX Runtime, against the same networks in JAX."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from pipeline import load_recipe
from pipeline.core.errors import RecipeError, RunError, UsageError
from pipeline.data.columns import ColumnSpec, Targets, Task
from pipeline.data.inputs import NetworkInput
from pipeline.data.table import FittedTable, TableFormat
from pipeline.data.transform import compute_column_specs
from pipeline.stages.build import build_network
from pipeline.stages.export.onnx import onnx_export
from pipeline.stages.export.prediction import make_ensemble, make_predict
from pipeline.stages.record.trained_run import Samples, TrainedRun
from tests.command_line import export, infer
from tests.conftest import compose_tiny
from tests.models.build import draw_variables, shapes
from tests.outcome import read_summary
from tests.slow_cases import mark_slow_except
from tests.whole_run import run

onnx = pytest.importorskip("onnx", reason="not installed: pip install '.[onnx]'")
ort = pytest.importorskip(
    "onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'"
)

NETWORKS: dict[str, list[str]] = {
    "lenet5": [],
    "mlp": [],
    "googlenet": ["width=0.25"],
    "layers": [],
    "mobilenet_v3_small": [],
    "repvgg_a0": ["stem=4", "blocks=[1,2]", "widths=[8,8]"],
    "resnet20": ["blocks=[1,2]", "widths=[4,8]"],
    "shufflenet_v2_x0_5": ["stem=4", "units=[2,3]", "widths=[8,16]", "last=8"],
    "squeezenet_residual": ["stem_features=8", "squeezes=[2,2,4]", "pool_after=[2]"],
    "unet": ["widths=[4,6,8]"],
}
"""Networks of different layers, and what is smaller; 15 others were within 1e-5 when they were
compared."""
SIZES = {"lenet5": 32, "mlp": 16, "resnet20": 32, "layers": 32}


def fresh(
    overrides: list[str],
    shape: tuple[int, int, int],
    *,
    ops: str = "",
    dtype: str = "float32",
) -> TrainedRun:
    """A run of fresh weights, and statistics and scales that are not those of the beginning."""
    data = ["dataset=numpy", "dataset.root=none.npz"]
    data += [f"dataset.{split}.ops=[{ops}]" for split in ("train", "eval")]
    recipe = load_recipe("lenet5_digits", [*data, *overrides])
    network = build_network(recipe, Targets(tuple("0123456789")))
    columns = {"image": ColumnSpec(shape, dtype)}
    mapped = compute_column_specs(recipe.dataset.eval.ops, columns)["image"]
    variables = draw_variables(shapes(network, NetworkInput("image", "image", mapped).shape))
    random = np.random.default_rng(0)
    arrays = {}
    for path, array in flatten_dict(variables, sep="/").items():
        value = np.asarray(array)
        if path.endswith(("/var", "/scale")):
            value = random.uniform(0.5, 1.5, value.shape).astype(np.float32)
        elif path.endswith(("/mean", "/bias")):
            value = random.normal(0, 0.2, value.shape).astype(np.float32)
        arrays[path] = value
    return TrainedRun(recipe, arrays, 0, Samples(columns, Targets(tuple("0123456789"))))


def difference(trained: TrainedRun, images: np.ndarray) -> float:
    """The greatest difference of the two programs, in units of the largest logit."""
    from pipeline.stages.export.onnx.onnx_export import make_onnx_model

    session = ort.InferenceSession(make_onnx_model(trained).SerializeToString())
    found = session.run(None, {"image": images})[0]
    expected = np.asarray(jax.jit(make_predict(trained))(trained.arrays, images))
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    assert expected.std() > 0
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


@pytest.mark.medium
@pytest.mark.parametrize("model", mark_slow_except(["lenet5"], NETWORKS))
def test_network_logits_match_onnx(model: str) -> None:
    size = SIZES.get(model, 64)
    shape = (size, size, 1 if model in ("lenet5", "mlp", "unet") else 3)
    changes = [f"model.{change}" for change in NETWORKS[model]]
    run = fresh([f"model={model}", *changes], shape)
    images = np.random.default_rng(1).normal(size=(3, *shape)).astype(np.float32)
    assert difference(run, images) < 1e-5


class ShiftedLogits:
    """A session whose logits are far from the run's."""

    def run(self, names: list[str], samples: Samples) -> list[np.ndarray]:
        return [np.full((len(samples["image"]), 10), 9.0, np.float32)]


def test_difference_is_refused_if_all_layers_are_in_float32(monkeypatch: Any) -> None:
    shape = (8, 8, 1)
    samples = {"image": np.ones((1, *shape), np.float32)}
    monkeypatch.setattr(onnx_export, "_read_samples", lambda *_: samples)
    dataset = SimpleNamespace(eval=None)
    tiny = ["model=mlp", "model.hidden=[2]"]
    with pytest.raises(RunError, match="logits differ from the run's by"):
        onnx_export._measure_difference(fresh(tiny, shape), ShiftedLogits(), dataset, ["image"])
    mixed = fresh([*tiny, "train.to_float=[{pattern: dense_0, dtype: bfloat16}]"], shape)
    assert onnx_export._measure_difference(mixed, ShiftedLogits(), dataset, ["image"]) > 1


TASKS = ["classification", "multi_label", "regression"]


@pytest.mark.medium
@pytest.mark.parametrize("task", mark_slow_except(TASKS[:1], TASKS))
def test_ensemble_logits_match_onnx(task: Task) -> None:
    """Of two architectures in one graph, whose constants have the same names."""
    shape = (8, 8, 1)
    names = tuple("0123456789")
    numbers = (0.0,) * 10 if task == "regression" else ()
    targets = Targets(names, task, numbers, numbers)
    dense = "{name: dense, features: $classes}"
    layers = f"model.layers=[{{name: conv, features: 3, kernel: 3}}, flatten, {dense}]"
    models = ["model=mlp", "model.hidden=[5]"], ["model=layers", "model.blocks={}", layers]
    runs = [fresh(list(model), shape) for model in (*models, models[1])]
    runs = [replace(run, samples=replace(run.samples, targets=targets)) for run in runs]
    averaged = make_ensemble({Path(str(number)): run for number, run in enumerate(runs)})
    images = np.random.default_rng(1).normal(size=(3, *shape)).astype(np.float32)
    assert difference(averaged, images) < 1e-5


LAYERS: dict[str, list[str]] = {
    "convolutions": [
        "{name: conv, features: 8, kernel: [3,5], stride: [2,1], dilation: [1,2], bias: true}",
        "{name: conv, features: 8, kernel: 4, stride: 2, padding: symmetric, groups: 4}",
        "{name: conv, features: 6, kernel: 3, padding: [[0,2],[1,0]]}",
    ],
    "transposed same": ["{name: conv_transpose, features: 5, kernel: 3, stride: 2, bias: true}"],
    "transposed valid": [
        "{name: conv_transpose, features: 5, kernel: 2, stride: 3, padding: valid}"
    ],
    "transposed wide": ["{name: conv_transpose, features: 5, kernel: 4, stride: 2}"],
    "transposed once": ["{name: conv_transpose, features: 5, kernel: 3}"],
    "pools": [
        "{name: max_pool, kernel: 3, stride: 2, padding: same}",
        "{name: avg_pool, kernel: [2,3], stride: 1, padding: same}",
    ],
    "norms": [
        "{name: conv, features: 8, kernel: 1}",
        "{name: group_norm, groups: 4}",
        "layer_norm",
        "rms_norm",
        "batch_norm",
        "{name: dropout, rate: 0.5}",
    ],
    "activations": ["relu6", "gelu", "tanh", "sigmoid", "swish", "hard_sigmoid", "squared_relu"],
    "hard swish": ["hard_swish"],
    "leaky": ["{name: leaky_relu, slope: 0.3}"],
    "transposed groups": [
        "{name: conv, features: 6, kernel: 1}",
        "{name: conv_transpose, features: 4, kernel: 3, stride: 2, groups: 2, bias: true}",
    ],
    "adaptive pools": [
        "{name: adaptive_avg_pool, size: [5, 12]}",
        "{name: adaptive_max_pool, size: [3, 5]}",
        "{name: adaptive_max_pool, size: [3, 1]}",
        "{name: adaptive_avg_pool, size: 1}",
    ],
    "volumes": [
        "{name: reshape, shape: [9, 6, 2, 3]}",
        "{name: conv3d, features: 4, kernel: [3, 2, 2], stride: [2, 1, 1], bias: true}",
        "batch_norm",
        "relu",
        "{name: conv3d, features: 4, kernel: 2, padding: 1, groups: 2}",
    ],
    "tokens": [
        "tokens",
        "{name: conv1d, features: 6, kernel: 3, groups: 3, padding: causal}",
        "{name: conv1d, features: 6, kernel: 3, stride: 4, dilation: 2, groups: 3, bias: true}",
        "batch_norm",
        "relu",
        "{name: dense, features: 4}",
        "{name: lstm, features: 5}",
        "{name: gru, features: 3, bidirectional: true}",
        "{name: lstm, features: 4, bidirectional: true, output: last, bias: false}",
    ],
    "gated": [
        "tokens",
        "{name: gated_mlp, hidden: 5, bias: true}",
        "rms_norm",
        "{name: gated_mlp, hidden: 6, activation: gelu}",
    ],
    "pooled tokens": [
        "tokens",
        "{name: max_pool1d, kernel: 3, stride: 2, padding: 1}",
        "{name: avg_pool1d, kernel: 4, padding: same}",
        "mean_token",
    ],
    "last state": ["{name: reshape, shape: [12, 27]}", "{name: gru, features: 5, output: last}"],
    "upsample": ["{name: upsample, factor: 2}"],
    "shuffle": ["{name: conv, features: 6, kernel: 1}", "{name: channel_shuffle, groups: 3}"],
    "shuffled features": [
        "{name: conv, features: 6, kernel: 1}",
        "global_avg_pool",
        "{name: channel_shuffle, groups: 3}",
    ],
    "branches": [
        "{name: conv, features: 8, kernel: 1}",
        "{name: branches, split: true, branches: [[], [{name: conv, features: 2, kernel: 3}]]}",
        "{name: residual, body: [{name: conv, features: 6, kernel: 1}, relu]}",
        "{name: gate, body: [global_avg_pool, {name: dense, features: 6}, sigmoid]}",
        "{name: dual_path, added: 4, body: [{name: conv, features: 7, kernel: 1}]}",
        "{name: sequence, repeat: 2, body: [{name: conv, features: 4, kernel: 1}, batch_norm]}",
    ],
    "views": [
        "{name: views, shift: 2, body: [{name: conv, features: 4, kernel: 3}, relu, flatten, "
        "{name: dense, features: 5}]}",
    ],
}


@pytest.mark.medium
@pytest.mark.parametrize("kind", mark_slow_except([*LAYERS][:1], LAYERS))
def test_layer_outputs_match_onnx(kind: str) -> None:
    layers = ", ".join([*LAYERS[kind], "flatten", "{name: dense, features: $classes}"])
    run = fresh(["model=layers", f"model.layers=[{layers}]"], (9, 12, 3))
    images = np.random.default_rng(1).normal(size=(2, 9, 12, 3)).astype(np.float32)
    assert difference(run, images) < 1e-5


OPS = {
    "bytes, linear": "{name: resize, size: [12, 10]}",
    "bytes, smaller": "{name: resize, size: [5, 7]}",
    "nearest": "{name: resize, size: [12, 10], interpolation: nearest}",
    "floats, linear": "{name: rescale, factor: 0.01, shift: -1}, {name: resize, size: [12, 10]}",
    "arithmetic": "{name: normalize, mean: [0.1, 2, 3], std: [1, 2, 0.5]}, "
    "{name: type_cast, column: image, dtype: float32}",
    "channels first": "hwc2chw, {name: rescale, factor: 0.5, shift: 1}",
    "crop": "{name: center_crop, size: [5, 6]}",
}


@pytest.mark.medium
@pytest.mark.parametrize("kind", mark_slow_except([*OPS][:1], OPS))
def test_map_ops_match_onnx(kind: str) -> None:
    """From bytes on: rounding is that of the op, to the bit."""
    layers = "model.layers=[flatten, {name: dense, features: $classes}]"
    run = fresh(["model=layers", layers], (9, 8, 3), ops=OPS[kind], dtype="uint8")
    images = np.random.default_rng(1).integers(0, 256, (4, 9, 8, 3), np.uint8)
    assert difference(run, images) < 1e-5


@pytest.mark.medium
@pytest.mark.parametrize(
    ("column", "dtype"),
    [("features", "float32"), ("tokens", "int32"), ("logits", "float32"), ("matmul_1", "float32")],
)
def test_input_has_the_name_and_dtype_of_the_column(column: str, dtype: str) -> None:
    """Rows and tokens have one axis; a name of the output or of a node may be the column's."""
    from pipeline.stages.export.onnx.onnx_export import make_onnx_model

    layers = "model.layers=[{name: dense, features: 4}, relu, {name: dense, features: $classes}]"
    recipe = load_recipe(
        "lenet5_digits",
        ["dataset=numpy", "dataset.root=none.npz", "model=layers", "model.blocks={}", layers]
        + [f"dataset.{split}.ops=[]" for split in ("train", "eval")],
    )
    variables = draw_variables(shapes(build_network(recipe, Targets(tuple("0123456789"))), (6,)))
    arrays = {name: np.asarray(value) for name, value in flatten_dict(variables, sep="/").items()}
    formatted = Samples({column: ColumnSpec((6,), dtype)}, Targets(tuple("0123456789")))
    run = TrainedRun(recipe, arrays, 0, formatted)
    samples = np.random.default_rng(1).integers(0, 9, (3, 6)).astype(dtype)
    model = make_onnx_model(run)
    assert [entry.name for entry in model.graph.input] == [column]
    session = ort.InferenceSession(model.SerializeToString())
    (found,) = session.run(None, {column: samples})
    expected = np.asarray(jax.jit(make_predict(run))(run.arrays, samples))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_untranslatable_networks_are_refused_by_name() -> None:
    from pipeline.stages.export.onnx.onnx_export import make_onnx_model

    vit = fresh(["model=vit_tiny", "model.blocks=1"], (32, 32, 3))
    with pytest.raises(RecipeError, match=r"model layer .*: has no translation to ONNX"):
        make_onnx_model(vit)
    ops = "{name: resize, size: [16, 16], interpolation: cubic}"
    cubic = fresh(["model=mlp"], (16, 16, 1), ops=ops, dtype="uint8")
    with pytest.raises(RecipeError, match=r"dataset\.eval\.ops\.0 \(resize\): has no translation"):
        make_onnx_model(cubic)
    rows = fresh(["model=mlp"], (16, 16, 1))
    table = FittedTable(columns=(), format=TableFormat())
    of_a_table = replace(rows, samples=replace(rows.samples, table=table))
    with pytest.raises(RecipeError, match="the encoding of a table has no translation"):
        make_onnx_model(of_a_table)
    dataset = rows.recipe.dataset.model_copy(update={"padding_mask": True})
    masked = replace(rows, recipe=rows.recipe.model_copy(update={"dataset": dataset}))
    with pytest.raises(RecipeError, match=r"padding_mask = true: .*; export without --to onnx"):
        make_onnx_model(masked)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("onnx") / "run"
    run(compose_tiny(cache), run_dir)
    return run_dir


@pytest.fixture(scope="module")
def printed_and_exported(trained: Path) -> tuple[str, Path]:
    """The lines that `export` prints, and its folder."""
    folder = trained.parent / "exported"
    with redirect_stdout(io.StringIO()) as printed:
        arguments = ["--to", "onnx", "--int8", "--samples=64", "--weights=int4"]
        assert export([str(trained), str(folder), *arguments]) == 0
    return printed.getvalue(), folder


@pytest.fixture(scope="module")
def exported(printed_and_exported: tuple[str, Path]) -> Path:
    return printed_and_exported[1]


@pytest.mark.slow
def test_export_reports_its_error_and_infer_reads_it(
    trained: Path, printed_and_exported: tuple[str, Path], tmp_path: Path
) -> None:
    said, exported = printed_and_exported
    accuracy = read_summary(trained)["metrics"]["accuracy"]
    assert f"accuracy {accuracy:.4f}, in int8 " in said
    assert abs(float(said.split("in int8 ")[1].split()[0]) - accuracy) < 0.06
    about = json.loads((exported / "model.json").read_text())
    assert about["onnx"]["program"] == "model.onnx"
    assert about["onnx"]["weights"] == "model_weights.onnx"
    by_weights = said.split("model_weights.onnx: int4 weights")[1].splitlines()[0]
    assert abs(float(by_weights.split("accuracy ")[1]) - accuracy) < 0.2
    np.save(tmp_path / "one.npy", np.zeros((8, 8, 1), np.uint8))
    assert infer([str(exported), str(tmp_path / "one.npy")]) == 0


@pytest.mark.slow
def test_export_reports_the_number_of_calibration_samples(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export([str(trained), str(tmp_path / "out"), "--to", "onnx", "--int8"]) == 0
    assert "(96 samples to calibrate)" in capsys.readouterr().out


@pytest.mark.slow
def test_export_without_onnx_removes_an_older_onnx_file(trained: Path, tmp_path: Path) -> None:
    assert export([str(trained), str(tmp_path / "out"), "--to=onnx"]) == 0
    assert export([str(trained), str(tmp_path / "out")]) == 0
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"model.bin", "model.mlir", "weights.safetensors", "model.json"}


def script(exported: Path, *arguments: str) -> list[dict[str, Any]]:
    result = subprocess.run(
        [sys.executable, "-S", "-c", PATHS, str(exported / "predict.py"), *arguments],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    rows = [line.rsplit(": ", 1) for line in result.stdout.splitlines()]
    return [{"file": file, "class": said.split()[0]} for file, said in rows]


PATHS = (
    "import sys, runpy; sys.path += " + repr(sys.path) + "; sys.modules['jax'] = None; "
    "sys.modules['pipeline'] = None; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""The script where neither jax nor this package can be imported."""


@pytest.mark.slow
def test_exported_script_classifies_as_infer(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = np.random.default_rng(0).integers(0, 16, (5, 8, 8, 1), np.uint8)
    np.save(tmp_path / "five.npy", images)
    capsys.readouterr()
    assert infer([str(exported), str(tmp_path / "five.npy"), "--json"]) == 0
    expected = [json.loads(line)["class"] for line in capsys.readouterr().out.splitlines()]
    assert [row["class"] for row in script(exported, str(tmp_path / "five.npy"))] == expected
    assert len(script(exported, "--int8", "--top=2", str(tmp_path))) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to=onyx"], "--to onyx: must be one of onnx, ckpt"),
        (["--int8"], "--int8: needs --to onnx"),
        (["to=onnx", "--int8"], "to=onnx: is an option: --to onnx"),
        (["--to=onnx", "--samples=0"], "must be a whole number from 1 to 999,999,999"),
        (["--weights=int4"], "--weights: needs --to onnx"),
        (["--to=onnx", "--samples=3"], "--samples 3: needs --int8"),
        (["--to=onnx", "--prefix=a"], "--prefix: needs --to ckpt"),
        (["--to=ckpt", "--prefix=../a"], "must be a name without folders"),
    ],
)
def test_invalid_options_are_refused(options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        export([str(tmp_path / "run"), str(tmp_path / "out"), *options])
