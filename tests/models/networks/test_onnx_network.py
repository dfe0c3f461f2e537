"""The model component onnx: what a recipe says, and a run of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.models.torch_graph.computation.sources import OnnxFile
from pipeline.models.torch_graph.computation.torch_network import TorchNetwork
from tests import outcome
from tests.models.build import conf_model
from tests.models.torch_graph.onnx.golden_onnx import (
    encode,
    model,
    node,
    signature,
    tensor,
    two_inputs,
)
from tests.training.optimizers.thor.same_bits import require_same_bits
from tests.whole_run import run

Compose = Callable[..., Recipe]
SMALL_IMAGES = ["dataset.train.ops=[]", "dataset.eval.ops=[]"]
"""The made-up digits in the size that they are stored in."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A network with batch norm and dropout for images 8x8x1 and 10 classes."""
    random = np.random.default_rng(0)
    nodes = [
        node("Conv", ["x", "conv.weight"], "a"),
        node("BatchNormalization", ["a", "bn.weight", "bn.bias", "bn.mean", "bn.var"], "b"),
        node("Relu", ["b"], "c"),
        node("MaxPool", ["c"], "d", attribute=encode({1: "kernel_shape", 8: [2, 2], 20: 7})),
        node("GlobalAveragePool", ["d"], "e"),
        node("Flatten", ["e"], "f"),
        node("Dropout", ["f"], "g"),
        node("Gemm", ["g", "fc.weight", "fc.bias"], "y"),
    ]
    ones = np.ones(8, np.float32)
    arrays = {
        "conv.weight": random.normal(size=(8, 1, 3, 3)).astype(np.float32),
        "bn.weight": ones,
        "bn.bias": 0 * ones,
        "bn.mean": 0 * ones,
        "bn.var": ones,
        "fc.weight": random.normal(size=(8, 10)).astype(np.float32),
        "fc.bias": np.zeros(10, np.float32),
    }
    tensors = [tensor(name, array) for name, array in arrays.items()]
    path = tmp_path / "net.onnx"
    path.write_bytes(model(nodes, tensors, input=signature("x", "n", 1, 8, 8)))
    return path


def test_network_source_is_the_file_and_output() -> None:
    network = conf_model("onnx", file="net.onnx", output="y").build(10, "bfloat16")
    assert isinstance(network, TorchNetwork)
    assert network.source == OnnxFile(Path("net.onnx"), "y")
    assert network.dtype == "bfloat16"


def test_model_without_a_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"file = null: must name the file, as model\.file=net"):
        conf_model("onnx").build(10, "float32")


@pytest.mark.slow
def test_onnx_network_trains_equally_at_every_sink_size(tiny: Compose, file: Path) -> None:
    """Losses are the same at every sink size."""
    losses = []
    for sink in ("1", "20"):
        folder = file.parent / f"run_{sink}"
        keys = ("train.steps=20", f"train.sink_size={sink}", *SMALL_IMAGES)
        summary = run(tiny("model=onnx", f"model.file={file}", *keys), run_dir=folder)
        assert summary.status == "done"
        losses.append(summary.metrics["loss"])
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_thor_is_bit_equal_across_sinks_and_devices(
    tiny: Compose, file: Path, tmp_path: Path
) -> None:
    keys = ["model=onnx", f"model.file={file}", *SMALL_IMAGES]
    keys += ["parallel.mode=data", "parallel.devices=1"]
    others = [["train.sink_size=-1", "parallel.devices=2"]]
    require_same_bits(tiny, tmp_path / "runs", keys, others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, r"model onnx: .*net\.onnx: can't be read: No such file"),
        (b"no network", r"model onnx: .*net\.onnx: it "),
        (model([node("Magic", ["x"], "y", name="m")]), r"Magic m, opset 17: the operator"),
        (model([node("Relu", ["x"], "y")]), r"reads samples of shape 6, and 1,024 values came"),
    ],
)
def test_invalid_file_is_refused(
    content: bytes | None, problem: str, tiny: Compose, tmp_path: Path
) -> None:
    file = tmp_path / "net.onnx"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RecipeError, match=problem) as error:
        run(tiny("model=onnx", f"model.file={file}"))
    assert error.value.exit_status == 2


@pytest.fixture
def two_input_file(tmp_path: Path) -> Path:
    """A network that reads `picture` and `row`."""
    path = tmp_path / "two.onnx"
    path.write_bytes(two_inputs("picture", "row")[0])
    return path


def test_inputs_are_those_of_the_file(two_input_file: Path, file: Path) -> None:
    assert conf_model("onnx", file=str(two_input_file)).list_inputs() == ("picture", "row")
    assert conf_model("onnx", file=str(file)).list_inputs() is None
    assert conf_model("onnx").list_inputs() is None


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_two_columns_are_read_by_name_and_by_position(
    two_input_file: Path, cache: Path, tmp_path: Path
) -> None:
    """With any sink, and on two devices."""
    keys = ["model=onnx", f"model.file={two_input_file}", "train.epochs=null", "train.steps=20"]
    keys += ["monitor.tensorboard=false", "eval.every_epochs=null", f"cache.root={cache}"]
    keys += ["parallel.mode=data", "train.optimizer.lr=0.03"]
    named, listed = "{row: features, picture: image}", "[image,features]"
    runs = {
        "named": [f"model.inputs={named}", "train.sink_size=1"],
        "listed": [f"model.inputs={listed}", "train.sink_size=7"],
        "devices": [f"model.inputs={listed}", "parallel.devices=2"],
    }
    for name, more in runs.items():
        summary = run(load_recipe("digit_halves", [*keys, *more]), run_dir=tmp_path / name)
        assert summary.metrics["accuracy"] > 0.3
    for name in ("listed", "devices"):
        assert outcome.metrics(tmp_path / name) == outcome.metrics(tmp_path / "named")


@pytest.mark.medium
def test_columns_of_other_names_are_refused(two_input_file: Path, cache: Path) -> None:
    keys = ["model=onnx", f"model.file={two_input_file}", f"cache.root={cache}"]
    expected = "the network reads picture, row: there is no column 'picture'; the columns are"
    with pytest.raises(RecipeError, match=expected):
        run(load_recipe("digit_halves", keys))
