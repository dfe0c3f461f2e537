"""The model component torch: what a recipe says, and a run of it.

The model component onnx: what a recipe says, and a run of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.models.layers.model_spec import replace_classes
from pipeline.models.torch_graph.computation.torch_network import (
    ImportedModule,
    OnnxFile,
    TorchNetwork,
    initial_variables_of,
)
from pipeline.models.torch_graph.graph import SampleSpec
from tests import outcome
from tests.models.build import conf_model
from tests.models.torch_graph.golden_graphs import FOLDER, golden_graph
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
NAME = "residual"
OPS = "[{name: resize, size: [12, 12], interpolation: linear}]"
SMALL_IMAGES = ["dataset.train.ops=[]", "dataset.eval.ops=[]"]
"""The made-up digits in the size that they are stored in."""


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    """A graph for images 12x12x3 and 3 classes, in a folder of its own."""
    for ending in ("torch.json", "torch.safetensors"):
        shutil.copy(FOLDER / f"{NAME}.{ending}", tmp_path)
    return tmp_path / f"{NAME}.torch.json"


def of_images(graph_file: Path, *more: str) -> list[str]:
    """Overrides of a run on made-up images with three channels."""
    return [
        "model=torch",
        f"model.graph={graph_file}",
        "dataset.like=cifar10",
        f"dataset.train.ops={OPS}",
        f"dataset.eval.ops={OPS}",
        *more,
    ]


def test_classes_placeholder_is_replaced_in_arguments() -> None:
    given: dict[str, Any] = {"num_classes": "$classes", "widths": [8, "$classes"], "p": 0.1}
    assert replace_classes(given, 7) == {"num_classes": 7, "widths": [8, 7], "p": 0.1}


@pytest.fixture
def named_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plug-ins that have every object."""
    monkeypatch.setattr("pipeline.core.plugins.loading.find_object", lambda _: object())


@pytest.mark.usefixtures("named_code")
def test_network_source_is_the_import_arguments_and_seed() -> None:
    model = conf_model("torch", **{"import": "my_nets:MyNet", "seed": 3, "arguments": {"n": 1}})
    network = model.build(10, "bfloat16")
    assert isinstance(network, TorchNetwork)
    assert network.source == ImportedModule("my_nets:MyNet", '{"n": 1}', 3, None, None, None)
    assert network.dtype == "bfloat16"


@pytest.mark.medium
@pytest.mark.usefixtures("named_code")
def test_module_seed_is_the_recipe_seed(tiny: Compose) -> None:
    recipe = tiny("model=torch", "model.import=my_nets:MyNet", "seed=5")
    assert recipe.model.model_dump()["seed"] == 5
    assert recipe.model.model_dump()["import"] == "my_nets:MyNet"


@pytest.mark.medium
def test_exactly_one_source_is_required(tiny: Compose) -> None:
    with pytest.raises(ValueError, match=r"has no network; must have import, such as torchvision"):
        conf_model("torch", seed=1).build(10, "float32")
    with pytest.raises(RecipeError, match="has both import and graph; one must be null"):
        tiny("model=torch", "model.import=my_nets:MyNet", "model.graph=net.torch.json")


def test_custom_code_needs_the_plugin_flag() -> None:
    """Also for commands of a done run, which check no recipe."""
    model = conf_model("torch", **{"import": "my_nets:MyNet", "seed": 0})
    for call in (model.require_code, lambda: model.build(10, "float32")):
        with pytest.raises(ValueError, match=r"^import = 'my_nets:MyNet' is code, .* --plugin my_"):
            call()


@pytest.mark.medium
def test_recipe_is_refused_for_missing_code_beside_its_other_problems(tiny: Compose) -> None:
    expected = r"(?s)has 2 problems:.*model\.import = 'my_nets:MyNet' is code"
    with pytest.raises(RecipeError, match=expected):
        tiny("model=torch", "model.import=my_nets:MyNet", "train.epochs=1", "train.steps=1")


@pytest.mark.slow
def test_output_count_different_from_the_classes_is_refused(
    tiny: Compose, graph_file: Path
) -> None:
    with pytest.raises(RecipeError, match="ends in 3 outputs, and the dataset has 10 classes"):
        run(tiny(*of_images(graph_file)))


@pytest.mark.slow
def test_images_of_another_size_are_refused(tiny: Compose, graph_file: Path) -> None:
    with pytest.raises(RecipeError, match=r"model torch: images are .*; must be 12x12x3"):
        run(tiny("model=torch", f"model.graph={graph_file}"))


@pytest.mark.slow
def test_thor_is_bit_equal_across_sinks(tiny: Compose, tmp_path: Path) -> None:
    """One program, whose sinks are of 1, of an epoch and, resumed, of 7.

    Across devices the same module is compared as an ONNX network, in test_onnx_network.py.
    """
    keys = of_images(ten_classes(tmp_path))
    require_same_bits(tiny, tmp_path / "runs", keys, [["train.sink_size=-1"]])


@pytest.mark.slow
def test_torch_graph_trains_equally_at_every_sink_size(tiny: Compose, tmp_path: Path) -> None:
    """Losses are the same at every sink size, and the weights start from the module's own."""
    file = ten_classes(tmp_path)
    losses = []
    for sink in ("1", "20"):
        folder = tmp_path / f"run_{sink}"
        recipe = tiny(*of_images(file, "train.steps=20", f"train.sink_size={sink}"))
        summary = run(recipe, run_dir=folder)
        assert summary.status == "done"
        lowerings = (folder / "lowerings.json").read_text()
        assert '"layout": "chwn"' in lowerings
        assert '"max_pool forward' in lowerings
        losses.append(summary.metrics["loss"])
    assert losses[0] == losses[1]


def ten_classes(folder: Path) -> Path:
    """The golden graph with a head of ten classes."""
    import dataclasses

    from pipeline.models.torch_graph.computation.graph_file import write_graph
    from pipeline.models.torch_graph.graph import TorchGraph

    graph = golden_graph(NAME)
    random = np.random.default_rng(0)
    head = {
        "fc.weight": random.normal(size=(8, 10)).astype(np.float32),
        "fc.bias": np.zeros(10, np.float32),
    }

    def widened(form: Any) -> Any:
        nodes = list(form.nodes)
        last = nodes[-1]
        shape = dataclasses.replace(last.results[0], shape=(None, 10))
        nodes[-1] = dataclasses.replace(last, results=(shape,))
        return dataclasses.replace(form, nodes=tuple(nodes))

    arrays = tuple(
        dataclasses.replace(spec, shape=head[spec.name].shape) if spec.name in head else spec
        for spec in graph.arrays
    )
    wide: TorchGraph = dataclasses.replace(
        graph,
        arrays=arrays,
        values={**graph.values, **head},
        training=widened(graph.training),
        evaluation=widened(graph.evaluation),
    )
    assert initial_variables_of(wide)["params"]["fc"]["kernel"].shape == (8, 10)
    write_graph(folder / "ten.torch.json", wide)
    return folder / "ten.torch.json"


class TwoInputs:
    """The signature of a module."""

    def forward(self, image: Any, features: Any, *, mask: Any = None) -> Any: ...


class OneInput:
    def forward(self, image: Any) -> Any: ...


@pytest.mark.parametrize(
    ("target", "inputs"),
    [
        (TwoInputs, ("image", "features")),
        (TwoInputs(), ("image", "features")),
        (OneInput, None),
        (lambda: TwoInputs(), None),
    ],
)
def test_inputs_are_in_the_signature_of_forward(
    target: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.core.plugins.loading.find_object", lambda _: target)
    assert conf_model("torch", **{"import": "my_nets:MyNet", "seed": 0}).list_inputs() == inputs


class Classifier:
    def __init__(self, width: int = 2, num_classes: int = 1000) -> None: ...


def make_classifier(classes: int, **options: Any) -> Any: ...


@pytest.mark.parametrize(
    ("target", "arguments", "passed"),
    [
        (Classifier, {}, '{"num_classes": 7}'),
        (Classifier, {"width": 3}, '{"num_classes": 7, "width": 3}'),
        (Classifier, {"num_classes": 2}, '{"num_classes": 2}'),
        (make_classifier, {}, '{"classes": 7}'),
        (OneInput, {}, "{}"),
        (Classifier(), {}, "{}"),
    ],
)
def test_number_of_classes_is_passed_to_the_constructor(
    target: Any, arguments: Any, passed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.core.plugins.loading.find_object", lambda _: target)
    model = conf_model("torch", **{"import": "nets:Net", "seed": 0, "arguments": arguments})
    assert model.build(7, "float32").source.arguments == passed


@pytest.mark.usefixtures("named_code")
def test_output_of_a_module_is_named() -> None:
    model = conf_model("torch", **{"import": "nets:Net", "seed": 0, "output": "scores"})
    assert model.build(10, "float32").source.output == "scores"


@pytest.mark.usefixtures("named_code")
def test_output_of_a_module_can_be_a_position() -> None:
    model = conf_model("torch", **{"import": "nets:Net", "seed": 0, "output": 1})
    assert model.build(10, "float32").source.output == "1"


@pytest.mark.medium
def test_output_of_a_graph_file_is_refused(tiny: Compose) -> None:
    with pytest.raises(RecipeError, match="has both output and graph, which has one output"):
        tiny("model=torch", "model.graph=net.torch.json", "model.output=logits")


def test_settings_of_one_input_are_refused_for_several() -> None:
    module = ImportedModule("my_nets:MyNet", "{}", 0, (3, 4), None, None)
    samples = [SampleSpec((4, 8, 1), name="image"), SampleSpec((4,), name="features")]
    with pytest.raises(ValueError, match="of an only input, and the network reads image, features"):
        module.graph_for(*samples)


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


@pytest.mark.medium
@pytest.mark.parametrize("split", ["train", "eval"])
def test_token_beyond_the_table_is_refused_before_training(
    split: str, cache: Path, tmp_path: Path
) -> None:
    nodes = [
        node("Cast", ["x"], "i", attribute=encode({1: "to", 3: 7, 20: 2})),
        node("Gather", ["table", "i"], "rows"),
        node("Flatten", ["rows"], "y"),
    ]
    file = tmp_path / "net.onnx"
    table = np.zeros((20, 2), np.float32)
    file.write_bytes(model(nodes, [tensor("table", table)], input=signature("x", "n", 5)))
    tokens = np.full((32, 5), 19, np.int32)
    labels = np.arange(32, dtype=np.int32) % 10
    arrays = {"x_train": tokens, "x_test": tokens, "y_train": labels, "y_test": labels}
    beyond = tokens.copy()
    beyond[3, 2] = 20
    arrays["x_train" if split == "train" else "x_test"] = beyond
    np.savez(tmp_path / "data.npz", **arrays)
    data = ["dataset=numpy", f"dataset.root={tmp_path}/data.npz", f"cache.root={cache}"]
    problem = (
        rf"model onnx and dataset\.{split}: table table of .* has 20 rows, and sample 3 has the "
        "token 20; must be from 0 to 19"
    )
    with pytest.raises(RecipeError, match=problem):
        run(
            load_recipe("lenet5_digits", ["model=onnx", f"model.file={file}", *data, *SMALL_IMAGES])
        )


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
