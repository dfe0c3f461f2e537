"""Networks of ONNX files compute and train as in the frameworks that wrote them."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from pipeline.models.torch_graph.computation.graph_file import graph_of_document, graph_to_text
from pipeline.models.torch_graph.computation.torch_network import initial_variables_of
from pipeline.models.torch_graph.graph import SampleSpec, TorchGraph
from pipeline.models.torch_graph.onnx.estimator_nodes import ESTIMATORS
from pipeline.models.torch_graph.onnx.graph_builder import ONNX_OPERATORS
from pipeline.models.torch_graph.onnx.import_onnx import find_sample_shape, import_onnx
from pipeline.models.torch_graph.onnx.onnx_file import read_onnx
from tests.models.build import QUICK
from tests.models.torch_graph.golden_graphs import network_of
from tests.models.torch_graph.onnx.golden_onnx import (
    NAMES,
    encode,
    golden_arrays,
    golden_network,
    model,
    node,
    operator_cases,
    signature,
    tensor,
    two_inputs,
)
from tests.slow_cases import mark_slow_except

PLAIN = ("perceptron", "tensorflow")
"""Networks of a plain test run."""
RATES = {5: 0.05, 20: 0.02}
"""Learning rates of golden losses, by the number of steps."""
SENSITIVE = ("densenet", "shufflenet")
"""Networks whose losses an ulp of the images changes by 0.5 % after 15 steps. By another
processor's order of sums they changed by 4 %."""
EXACT_STEPS = 5
"""Steps after which such losses still agree to 0.1 %."""
ROOT = Path(__file__).parents[4]
ROW = (1, 1, 6)


def evaluate(graph: TorchGraph, images: np.ndarray) -> np.ndarray:
    """Logits in evaluation."""
    network = network_of(graph)
    apply = jax.jit(lambda v, x: network.apply(v, x, train=False), compiler_options=QUICK)
    return np.asarray(apply(initial_variables_of(graph), images))


@cache
def logits_of(name: str) -> np.ndarray:
    """Logits of the images in tests/golden/onnx."""
    return evaluate(golden_network(name), golden_arrays(name)["images"])


def train(graph: TorchGraph, images: np.ndarray, labels: np.ndarray, steps: int) -> list[float]:
    """Losses of steps of SGD."""
    rate = RATES[steps]
    network = network_of(graph)
    variables = initial_variables_of(graph)

    @jax.jit
    def step(params: Any, stats: Any) -> Any:
        def loss_of(params: Any) -> Any:
            logits, changed = network.apply(
                {"params": params, "batch_stats": stats},
                images,
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": jax.random.key(0)},
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), changed.get("batch_stats", stats)

        (loss, stats_after), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradients), stats_after, loss

    params = variables["params"]
    stats = variables["batch_stats"]
    losses = []
    for _ in range(steps):
        params, stats, loss = step(params, stats)
        losses.append(float(loss))
    return losses


def test_golden_networks_cover_every_framework() -> None:
    assert {"mindspore", "patches_dynamo", "perceptron", "swin", "tensorflow"} <= set(NAMES)
    assert len(NAMES) == 20


@pytest.mark.medium
@pytest.mark.parametrize("name", mark_slow_except(PLAIN, NAMES))
def test_logits_match_the_framework(name: str) -> None:
    arrays, logits = golden_arrays(name), logits_of(name)
    if name == "tensorflow":
        # Logarithms of probabilities.
        logits = np.asarray(jax.nn.log_softmax(logits))
    scale = np.abs(arrays["logits"]).max()
    np.testing.assert_allclose(logits / scale, arrays["logits"] / scale, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_losses_match_the_framework(name: str) -> None:
    arrays = golden_arrays(name)
    losses = train(golden_network(name), arrays["images"], arrays["labels"], len(arrays["losses"]))
    exact = EXACT_STEPS if name in SENSITIVE else len(losses)
    np.testing.assert_allclose(losses[:exact], arrays["losses"][:exact], rtol=1e-3)
    np.testing.assert_allclose(losses[exact:], arrays["losses"][exact:], rtol=0.05)


@pytest.mark.medium
@pytest.mark.parametrize("name", mark_slow_except(PLAIN, NAMES))
def test_imported_graph_supports_any_batch_size(name: str) -> None:
    """Also if the file was exported for one."""
    graph = golden_network(name)
    images = golden_arrays(name)["images"]
    assert graph.input.shape[0] is None
    np.testing.assert_allclose(
        evaluate(graph, images[:1]), logits_of(name)[:1], rtol=1e-4, atol=1e-5
    )


@pytest.mark.medium
@pytest.mark.parametrize("name", NAMES)
def test_graph_file_contains_the_network(name: str) -> None:
    graph = golden_network(name)
    again = graph_of_document(json.loads(graph_to_text(graph)), dict(graph.values))
    assert again.training == graph.training
    assert again.arrays == graph.arrays


def test_parameters_have_the_names_of_the_modules() -> None:
    specs = {spec.path: spec for spec in golden_network("residual").arrays}
    assert specs["down/0/kernel"].shape == (1, 1, 8, 8)
    assert specs["bn1/mean"].role == "buffer"
    assert specs["fc/kernel"].order == "io"
    assert {"bn/scale", "bn1/scale", "down/1/scale"} <= set(specs)


def test_batch_norm_and_dropout_have_a_training_form() -> None:
    graph = golden_network("residual")
    by_form = [
        {node.op: node.args for node in form.nodes} for form in (graph.training, graph.evaluation)
    ]
    assert [nodes["aten.batch_norm.default"][5] for nodes in by_form] == [True, False]
    assert [nodes["aten.dropout.default"][2] for nodes in by_form] == [True, False]


@pytest.mark.parametrize("name", mark_slow_except([*operator_cases()][::4], operator_cases()))
def test_operator_matches_onnx_runtime(name: str, tmp_path: Path) -> None:
    case = operator_cases()[name]
    file = tmp_path / "one.onnx"
    file.write_bytes(case.content)
    graph = import_onnx(file, [SampleSpec(case.images.shape[1:])], "y")
    y = evaluate(graph, case.images)
    assert y.shape == case.y.shape
    np.testing.assert_allclose(y, case.y, rtol=1e-5, atol=1e-5)


def test_documented_operators_are_complete() -> None:
    text = (ROOT / "docs" / "bring-your-own.md").read_text()
    table = text.partition("| kind | operators |")[2].partition("\n\n")[0]
    names = {name.removeprefix("ai.onnx.ml.") for name in (*ONNX_OPERATORS, *ESTIMATORS)}
    assert set(re.findall(r"`(\w+)`", table)) == names


def import_bytes(
    folder: Path, content: bytes, image: tuple[int, ...] = ROW, output: str | None = None
) -> TorchGraph:
    """Import the content of a file."""
    file = folder / "net.onnx"
    file.write_bytes(content)
    return import_onnx(file, [SampleSpec(image)], output)


WEIGHT = np.ones((6, 6), np.float32)
UNKNOWN = np.where(np.eye(6) > 0, np.float32(np.nan), WEIGHT)
BOUNDLESS = np.where(np.eye(6) > 0, np.float32(np.inf), WEIGHT)


def test_computed_negative_indices_count_from_the_end(tmp_path: Path) -> None:
    nodes = [
        node("Cast", ["x"], "i", attribute=encode({1: "to", 3: 7, 20: 2})),
        node("Gather", ["numbers", "i"], "parts"),
        node("Flatten", ["parts"], "y"),
    ]
    content = model(nodes, [tensor("numbers", np.arange(9, dtype=np.float32).reshape(9, 1, 1))])
    indices = np.array([[[[-1, -9, -4, 0, 8, 3]]]], np.float32)
    y = evaluate(import_bytes(tmp_path, content), indices)
    np.testing.assert_array_equal(y, [[8, 0, 5, 0, 8, 3]])


def test_mask_of_minus_infinity_is_added(tmp_path: Path) -> None:
    content = model([node("Add", ["x", "w"], "y")], [tensor("w", -BOUNDLESS[0])])
    y = evaluate(import_bytes(tmp_path, content), np.zeros((1, 1, 1, 6), np.float32))
    np.testing.assert_array_equal(y, -BOUNDLESS[:1])


def test_last_softmax_is_removed_unless_requested(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], "z"), node("Softmax", ["z"], "y")]
    content = model(nodes, [tensor("w", WEIGHT)])
    assert [n.module_class for n in import_bytes(tmp_path, content).training.nodes] == ["MatMul"]
    assert len(import_bytes(tmp_path, content, output="y").training.nodes) == 2


@pytest.mark.medium
@pytest.mark.parametrize("is_reversed", [False, True])
def test_probabilities_of_two_classes_become_logits(tmp_path: Path, is_reversed: bool) -> None:
    """As in binary classifiers of scikit-learn, whose output may be a map of class to number."""
    pair = ["p", "q"] if is_reversed else ["q", "p"]
    nodes = [
        node("MatMul", ["x", "w"], "z"),
        node("Sigmoid", ["z"], "p"),
        node("Sub", ["one", "p"], "q"),
        node("Concat", pair, "y", attribute=[encode({1: "axis", 3: 1, 20: 2})]),
    ]
    weight = np.linspace(-1, 1, 6, dtype=np.float32)[:, None]
    arrays = [tensor("w", weight), tensor("one", np.ones(1, np.float32))]
    content = model(nodes, arrays)
    x = np.random.default_rng(0).normal(size=(3, 1, 1, 6)).astype(np.float32)
    graph = import_bytes(tmp_path, content)
    variables = initial_variables_of(graph)
    logits = np.asarray(network_of(graph).apply(variables, x, train=False))
    p = 1 / (1 + np.exp(-x[:, 0, 0] @ weight))
    expected = np.concatenate([p, 1 - p] if is_reversed else [1 - p, p], 1)
    np.testing.assert_allclose(jax.nn.softmax(logits), expected, atol=1e-6)
    assert np.abs(logits - expected).max() > 0.5
    asked = import_bytes(tmp_path, content, output="y")
    unchanged: Any = network_of(asked).apply(initial_variables_of(asked), x, train=False)
    np.testing.assert_allclose(unchanged, expected, atol=1e-6)


def test_concatenation_of_other_values_is_unchanged(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], "z"),
        node("Sigmoid", ["z"], "p"),
        node("Sub", ["two", "p"], "q"),
        node("Concat", ["q", "p"], "y", attribute=[encode({1: "axis", 3: 1, 20: 2})]),
    ]
    arrays = [tensor("w", WEIGHT), tensor("two", np.full(1, 2, np.float32))]
    kinds = [n.module_class for n in import_bytes(tmp_path, model(nodes, arrays)).training.nodes]
    assert kinds == ["MatMul", "Sigmoid", "Sub", "Concat"]


def test_constants_of_normalisation_are_not_trained(tmp_path: Path) -> None:
    nodes = [
        node("Sub", ["x", "mean"], "a"),
        node("Mul", ["a", "factor"], "b"),
        node("Add", ["b", "bias"], "y"),
    ]
    row = np.arange(6, dtype=np.float32)
    arrays = [tensor("mean", row), tensor("factor", row[1:2]), tensor("bias", row)]
    graph = import_bytes(tmp_path, model(nodes, arrays))
    roles = {spec.name: spec.role for spec in graph.arrays}
    assert list(roles.values()).count("parameter") == 1
    assert roles["bias"] == "parameter"


def test_shared_vectors_are_separate_and_shared_matrices_are_tied(tmp_path: Path) -> None:
    """PyTorch stores equal arrays once, such as the biases of fresh layers."""
    nodes = [
        node("Gemm", ["x", "w", "b"], "a", name="/one/Gemm"),
        node("Gemm", ["a", "w", "b"], "y", name="/two/Gemm"),
    ]
    content = model(nodes, [tensor("w", WEIGHT), tensor("b", WEIGHT[0])])
    paths = {spec.path for spec in import_bytes(tmp_path, content).arrays}
    assert {"one/bias", "two/bias"} <= paths
    assert len(paths) == 3


def test_input_that_is_left_out_stays_so(tmp_path: Path) -> None:
    nodes = [node("Identity", ["b"], ""), node("Gemm", ["x", "w", ""], "y")]
    graph = import_bytes(tmp_path, model(nodes, [tensor("w", WEIGHT), tensor("b", WEIGHT[0])]))
    assert [spec.role for spec in graph.arrays] == ["parameter"]


def test_shape_of_samples_is_of_the_input_that_the_output_reads(tmp_path: Path) -> None:
    nodes = [node("Relu", ["x"], "y"), node("Add", ["x", "b"], "z")]
    inputs = [signature("x", "n", 6), signature("b", "n", 6)]
    (tmp_path / "net.onnx").write_bytes(model(nodes, input=inputs, output=signature("z")))
    file = read_onnx(tmp_path / "net.onnx")
    assert find_sample_shape(file, "y") == (6, 1, 1)
    with pytest.raises(ValueError, match="has inputs x, b; must have one"):
        find_sample_shape(file)


def make_typed_input(dtype: int, *sizes: int) -> bytes:
    """A ValueInfoProto of x (1, *sizes) with ONNX's number of a dtype."""
    dims = encode({1: [encode({1: size}) for size in (1, *sizes)]})
    return encode({1: "x", 2: encode({1: encode({1: dtype, 2: dims})})})


def test_images_of_floats_are_not_cut_to_whole_numbers(tmp_path: Path) -> None:
    """As a network of uint8 would read images that a map op divided by 255."""
    cast = [node("Cast", ["x"], "y", attribute=encode({1: "to", 3: 1, 20: 2}))]
    content = model(cast, input=make_typed_input(2, 1, 2, 3))
    graph = import_bytes(tmp_path, content, (2, 3, 1))
    images = np.arange(6, dtype=np.uint8).reshape(1, 2, 3, 1)
    np.testing.assert_array_equal(evaluate(graph, images)[0, 0], images[0, :, :, 0])
    with pytest.raises(ValueError, match="images are float32, and the network reads whole numbers"):
        evaluate(graph, images / np.float32(255))


def layer_over_time(*inputs: str, attribute: list[bytes] = [], op: str = "RNN") -> bytes:  # noqa: B006
    """A model of a plain layer of 4 features on x (batch, 3, 2)."""
    rng = np.random.default_rng(0)
    arrays = [tensor("w", rng.normal(size=(1, 4, 2)).astype(np.float32))]
    arrays.append(tensor("r", rng.normal(size=(1, 4, 4)).astype(np.float32)))
    nodes = [
        node("Transpose", ["x"], "time", attribute=[integers("perm", 1, 0, 2)]),
        node(op, [*inputs], "rows", attribute=attribute),
        node("Transpose", ["rows"], "y", attribute=[integers("perm", 2, 0, 1, 3)]),
    ]
    return model(nodes, arrays, input=signature("x", "batch", 3, 2))


def integers(name: str, *numbers: int) -> bytes:
    """An attribute of whole numbers."""
    return encode({1: name, 8: list(numbers), 20: 7})


@pytest.mark.medium
def test_recurrent_layer_may_have_the_batch_first(tmp_path: Path) -> None:
    images = np.random.default_rng(1).normal(size=(5, 1, 1, 6)).astype(np.float32)
    layout = encode({1: "layout", 3: 1, 20: 2})
    first = import_bytes(tmp_path, layer_over_time("x", "w", "r", attribute=[layout]))
    y = evaluate(first, images).transpose(1, 2, 0, 3)  # Undo the last transposition.
    second = import_bytes(tmp_path, layer_over_time("time", "w", "r"))
    np.testing.assert_allclose(y, evaluate(second, images), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "attribute", "problem"),
    [
        ((), encode({1: "clip", 3: 1, 20: 2}), "its gates are clipped"),
        ((), encode({1: "direction", 4: "up", 20: 3}), "direction 'up'; must be one of forward"),
        ((), encode({1: "activations", 9: ["Elu"], 20: 8}), r"activations \('Elu',\); must be"),
        (("", "", "", "", "w"), b"", "it has peepholes"),
        (("", "r"), b"", "its sequences have various lengths; all must have 3 steps"),
    ],
)
def test_unsupported_recurrent_layer_is_refused(
    inputs: tuple[str, ...], attribute: bytes, problem: str, tmp_path: Path
) -> None:
    names = "time", "w", "r", *inputs
    attributes = [attribute] if attribute else []
    with pytest.raises(ValueError, match=rf"RNN, opset 17: {problem}"):
        import_bytes(tmp_path, layer_over_time(*names, attribute=attributes))


def test_channels_last_images_are_supported(tmp_path: Path) -> None:
    """As TensorFlow's networks read them."""
    nodes = [node("GlobalAveragePool", ["x"], "y")]
    content = model(nodes, input=signature("x", "batch", 5, 4, 3))
    images = np.random.default_rng(0).normal(size=(2, 5, 4, 3)).astype(np.float32)
    y = evaluate(import_bytes(tmp_path, content, (5, 4, 3)), images)
    np.testing.assert_allclose(y[:, :, 0, 0], images.mean((2, 3)), rtol=1e-5)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            model([node("Magic", ["x"], "y", name="m")]),
            r"net\.onnx: Magic m, opset 17: the operator",
        ),
        (model([node("Relu", ["x"], "y", domain="other")]), r"other\.Relu, opset 17: the operator"),
        (
            model([node("Relu", ["b"], "a"), node("Relu", ["a"], "b"), node("Relu", ["b"], "y")]),
            r"Relu, opset 17 reads b, which is not before it",
        ),
        (model([node("Relu", ["x"], "x")]), r"computes x again"),
        (
            model([node("MatMul", ["x", "w"], "y")], [tensor("w", UNKNOWN)]),
            r"net\.onnx.*: parameter .* has 6 NaN among 36 values; must be numbers",
        ),
        (
            model([node("MatMul", ["x", "w"], "y")], [tensor("w", -BOUNDLESS)]),
            r"net\.onnx.*: parameter .* has 6 infinite among 36 values; must be finite",
        ),
        (
            model([node("Add", ["x", "w"], "y")], [tensor("w", BOUNDLESS[0])]),
            r"net\.onnx.*: parameter .* has 1 infinite among 6 values; must be finite",
        ),
        (model([node("Relu", ["x"], "z")]), r"no node computes output y"),
        (
            model([node("Relu", ["x"], "y")], input=make_typed_input(8, 6)),
            r"its input x is texts; must be numbers",
        ),
        (
            model([node("Relu", ["x"], "y")], input=signature("x", "batch")),
            r"its input x has 1 axes; must have a batch and at least one more",
        ),
        (
            model([node("Relu", ["x"], "y")], input=signature("x", "batch", 7)),
            r"reads samples of shape 7, and 6 values came",
        ),
        (model([node("Gemm", ["x"], "y")]), r"Gemm, opset 17: input 1 is missing"),
        (
            model([node("Dropout", ["x"], ["z", "mask"]), node("Not", ["mask"], "y")]),
            r"net\.onnx: mask is not computed here",
        ),
        (
            model([node("MatMul", ["x", "w"], "y")], [tensor("w", WEIGHT[:5])]),
            r"MatMul, opset 17: a product of shape \(2, 6\)",
        ),
        (
            model(
                [node("ConstantOfShape", ["s"], "c"), node("Add", ["x", "c"], "y")],
                [tensor("s", np.array([2**20, 2**20]))],
            ),
            r"ConstantOfShape, opset 17: its constants have more than",
        ),
        (
            model(
                [node("Expand", ["x", "s"], "y")],
                [tensor("s", np.array([2**20, 2**20, 1, 6]))],
            ),
            r"Expand, opset 17: its result has more than",
        ),
        (
            model([node("Reshape", ["x", "x"], "y")]),
            r"a shape or an axis depends on the values of the network's input",
        ),
        (
            model([node("Reshape", ["x", "s"], "y")], [tensor("s", np.array([-1, 3], np.float32))]),
            r"Reshape, opset 17: a shape or an axis is float32 of 1 axes",
        ),
        (
            model(
                [
                    node("Transpose", ["x"], "t"),
                    node("MatMul", ["x", "t"], "products"),
                    node("Size", ["products"], "s"),
                    node("Unsqueeze", ["s", "zero"], "shape"),
                    node("Expand", ["one", "shape"], "ones"),
                    node("ReduceSum", ["ones"], "sum"),
                    node("Mul", ["x", "sum"], "y"),
                ],
                [tensor("zero", np.array([0])), tensor("one", np.ones(1, np.float32))],
            ),
            r"net\.onnx: a size isn't linear in the batch size",
        ),
    ],
)
def test_unsupported_network_is_refused(content: bytes, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        import_bytes(tmp_path, content)


TWO = [SampleSpec((4, 8, 1), name="image"), SampleSpec((4,), name="features")]


def test_inputs_are_read_by_name(tmp_path: Path) -> None:
    content, kernel = two_inputs()
    (tmp_path / "net.onnx").write_bytes(content)
    # The order of the samples isn't that of the file.
    graph = import_onnx(tmp_path / "net.onnx", TWO[::-1])
    assert list(graph.inputs) == ["image", "features"]
    draw = np.random.default_rng(1)
    image = draw.normal(size=(3, 4, 8, 1)).astype(np.float32)
    features = draw.normal(size=(3, 4)).astype(np.float32)
    expected = np.concatenate([image.reshape(3, 32), features], 1) @ kernel
    document = json.loads(graph_to_text(graph))
    assert document["input"]["features"] == [[None, 4], "float32"]
    for network in (graph, graph_of_document(document, graph.values)):
        found = network_of(network).apply(
            initial_variables_of(graph), {"features": features, "image": image}, train=False
        )
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_inputs_of_other_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(two_inputs()[0])
    expected = "has inputs image, features; model.inputs must name a column for each"
    for samples in (TWO[:1], [TWO[0], SampleSpec((4,), name="numbers")]):
        with pytest.raises(ValueError, match=expected):
            import_onnx(tmp_path / "net.onnx", samples)


@pytest.mark.parametrize("reference", [{"value": "input"}, {"value": "input", "item": 2}])
def test_graph_file_refers_to_one_of_its_inputs(reference: Any, tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(two_inputs()[0])
    graph = import_onnx(tmp_path / "net.onnx", TWO)
    document = json.loads(graph_to_text(graph))
    document["train"]["nodes"][0][2][0] = reference
    with pytest.raises(ValueError, match=r"reads (input None of 2|result 2 of input)"):
        graph_of_document(document, graph.values)
