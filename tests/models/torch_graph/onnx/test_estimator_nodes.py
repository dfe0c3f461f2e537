"""Linear models and trees of scikit-learn compute as there, and damaged ones are refused."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pipeline.models.torch_graph.computation.torch_network import initial_variables_of
from pipeline.models.torch_graph.graph import SampleSpec, TorchGraph
from pipeline.models.torch_graph.onnx.import_onnx import import_onnx, list_onnx_inputs
from pipeline.models.torch_graph.onnx.onnx_file import read_onnx
from tests.models.build import QUICK
from tests.models.torch_graph.golden_graphs import network_of
from tests.models.torch_graph.onnx.golden_onnx import encode, model, node, signature

FILE = Path(__file__).parents[3] / "golden" / "estimators.npz"
ROWS = [SampleSpec((6,))]


@cache
def golden() -> Mapping[str, np.ndarray]:
    """The arrays of estimators.npz."""
    with np.load(FILE) as file:
        return {key: file[key] for key in file.files}


NAMES = [key.removesuffix(".onnx") for key in golden() if key.endswith(".onnx")]
SINGLE = [name for name in NAMES if f"{name}.scores" in golden()]
"""Files with one node of an estimator."""


def write(folder: Path, name: str) -> Path:
    file = folder / "net.onnx"
    file.write_bytes(golden()[f"{name}.onnx"].tobytes())
    return file


def compute(graph: TorchGraph, x: np.ndarray) -> np.ndarray:
    network = network_of(graph)
    apply = jax.jit(lambda v, x: network.apply(v, x, train=False), compiler_options=QUICK)
    return np.asarray(apply(initial_variables_of(graph), x))


@pytest.mark.parametrize("name", NAMES)
def test_outputs_match_scikit_learn(tmp_path: Path, name: str) -> None:
    y = golden()[f"{name}.y"]
    z = compute(import_onnx(write(tmp_path, name), ROWS), golden()["x"])
    has_probabilities = y.ndim == 2 and np.allclose(y.sum(1), 1)
    result = np.asarray(jax.nn.softmax(z)) if has_probabilities else z.reshape(y.shape)
    np.testing.assert_allclose(result, y, atol=2e-6)


@pytest.mark.medium
@pytest.mark.parametrize("name", SINGLE)
def test_requested_scores_match_onnx_runtime(tmp_path: Path, name: str) -> None:
    file = write(tmp_path, name)
    (estimator,) = (
        n for n in read_onnx(file).nodes if n.op.partition("ml.")[2][:2] in ("Li", "Tr")
    )
    z = compute(import_onnx(file, ROWS, estimator.outputs[-1]), golden()["x"])
    np.testing.assert_allclose(z, golden()[f"{name}.scores"], atol=2e-6)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("logistic_3", {"kernel": (6, 3), "bias": (3,)}),
        ("linear", {"kernel": (6, 1), "bias": (1,)}),
    ],
)
def test_linear_models_are_trained(
    tmp_path: Path, name: str, parameters: dict[str, tuple[int, ...]]
) -> None:
    graph = import_onnx(write(tmp_path, name), ROWS)
    assert {
        spec.path.rpartition("/")[2]: spec.shape
        for spec in graph.arrays
        if spec.role == "parameter"
    } == parameters
    assert list_onnx_inputs(tmp_path / "net.onnx") == ("X",)


def test_trees_are_constants(tmp_path: Path) -> None:
    graph = import_onnx(write(tmp_path, "forest_3"), ROWS)
    assert {spec.role for spec in graph.arrays} == {"constant"}


TREE: dict[str, list[Any]] = {
    "nodes_treeids": [0, 0, 0],
    "nodes_nodeids": [0, 1, 2],
    "nodes_featureids": [1, 0, 0],
    "nodes_values": [0.5, 0.0, 0.0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_truenodeids": [1, 0, 0],
    "nodes_falsenodeids": [2, 0, 0],
    "target_treeids": [0, 0],
    "target_nodeids": [1, 2],
    "target_ids": [0, 0],
    "target_weights": [-1.0, 1.0],
}


def make_attribute(name: str, value: Any) -> bytes:
    if isinstance(value, int):
        return encode({1: name, 3: value, 20: 2})
    if isinstance(value, str):
        return encode({1: name, 4: value, 20: 3})
    if isinstance(value, np.ndarray):
        tensor = encode({1: list(value.shape), 2: 11, 9: value.astype("<f8").tobytes()})
        return encode({1: name, 5: tensor, 20: 4})
    if isinstance(value[0], str):
        return encode({1: name, 9: value, 20: 8})
    if isinstance(value[0], float):
        return encode({1: name, 7: struct.pack(f"<{len(value)}f", *value), 20: 6})
    return encode({1: name, 8: value, 20: 7})


def import_node(folder: Path, op: str, output: str | None = None, **attributes: Any) -> TorchGraph:
    written = [make_attribute(name, value) for name, value in attributes.items()]
    outputs = ["label", "y"] if op.endswith("Classifier") else ["y"]
    content = model(
        [node(op, ["x"], outputs, attribute=written, domain="ai.onnx.ml")],
        output=signature("y", "batch", 1),
    )
    (folder / "net.onnx").write_bytes(content)
    return import_onnx(folder / "net.onnx", ROWS, output)


def make_samples(values: list[float]) -> np.ndarray:
    x = np.zeros((len(values), 6), np.float32)
    x[:, 1] = values
    return x


ABOVE = float(np.nextafter(np.float32(0.5), np.float32(1)))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("BRANCH_LEQ", [-1, -1, 1, 1]),
        ("BRANCH_LT", [-1, 1, 1, 1]),
        ("BRANCH_GTE", [1, -1, -1, 1]),
        ("BRANCH_GT", [1, 1, -1, 1]),
    ],
)
@pytest.mark.parametrize("tracks", [0, 1])
def test_branches_compare_by_their_mode(
    tmp_path: Path, mode: str, expected: list[int], tracks: int
) -> None:
    """The last sample is missing, and takes the second branch unless it tracks the first."""
    attributes = {**TREE, "nodes_modes": [mode, "LEAF", "LEAF"]}
    missing = {"nodes_missing_value_tracks_true": [tracks, 0, 0]}
    graph = import_node(tmp_path, "TreeEnsembleRegressor", **attributes, **missing)
    y = compute(graph, make_samples([0.4, 0.5, ABOVE, np.nan]))
    assert y[:, 0].tolist() == [*expected[:3], -1 if tracks else 1]


def test_mean_and_base_value_of_trees(tmp_path: Path) -> None:
    shift = [1, 1, 1]
    both: dict[str, Any] = {name: [*value, *value] for name, value in TREE.items()}
    both["nodes_treeids"][3:] = shift
    both["target_treeids"][2:] = [1, 1]
    both["target_weights"][2:] = [3.0, 5.0]
    more = {"aggregate_function": "AVERAGE", "base_values": [10.0]}
    graph = import_node(tmp_path, "TreeEnsembleRegressor", **both, **more)
    assert compute(graph, make_samples([0.4, 0.6]))[:, 0].tolist() == [11, 13]


def test_tensors_of_float64_replace_lists(tmp_path: Path) -> None:
    """As scikit-learn's converter writes the numbers of a model of float64 samples."""
    names = ("nodes_values", "target_weights")
    attributes = {name: value for name, value in TREE.items() if name not in names}
    attributes |= {f"{name}_as_tensor": np.array(TREE[name]) for name in names}
    attributes["base_values_as_tensor"] = np.array([10.0])
    graph = import_node(tmp_path, "TreeEnsembleRegressor", **attributes)
    assert compute(graph, make_samples([0.4, 0.6]))[:, 0].tolist() == [9, 11]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes_truenodeids": [0, 0, 0]}, "in a cycle|or a node twice"),
        ({"nodes_truenodeids": [2, 0, 0]}, "in a cycle|or a node twice"),
        ({"nodes_truenodeids": [7, 0, 0]}, "a branch of its trees has no node"),
        ({"nodes_featureids": [6, 0, 0]}, "read features that aren't among the 6 of a sample"),
        ({"nodes_nodeids": [0, 1, 1]}, "a node twice"),
        ({"nodes_modes": ["BRANCH_EQ", "LEAF", "LEAF"]}, "nodes of mode BRANCH_EQ aren't computed"),
        ({"nodes_values": [0.5]}, "nodes_values has 1 values for 3 nodes"),
        ({"target_nodeids": [1, 9]}, "a leaf is at node 9 of tree 0 for target 0"),
        ({"target_ids": [0, 5]}, "for target 5"),
        ({"n_targets": 2**30}, "3 nodes for 1,073,741,824 targets; their product must be"),
        ({"post_transform": "PROBIT"}, "post_transform PROBIT isn't computed here; must be NONE"),
        ({"base_values": [1.0, 2.0]}, "has 2 base_values for 1 targets"),
        ({"aggregate_function": "MIN"}, "aggregate_function MIN isn't computed here; must be SUM"),
        ({"target_weights": [1.0]}, "ids have 2, 2, 2 values for 1 target_weights"),
        ({"target_ids": ["a", "b"]}, r"target_ids = \('a', 'b'\); must be whole numbers"),
        ({"nodes_treeids": [0]}, "a node twice"),
    ],
)
def test_damaged_trees_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"net.onnx: .*{message}"):
        import_node(tmp_path, "TreeEnsembleRegressor", **{**TREE, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"coefficients": [1.0] * 7}, "has 7 coefficients for 3 scores"),
        ({"classlabels_ints": [0, 1]}, "has 3 scores for 2 classes"),
        ({"post_transform": "PROBIT"}, "post_transform PROBIT of 3 scores isn't computed here"),
        ({"coefficients": 3}, "attribute coefficients = 3; must be several values"),
    ],
)
def test_damaged_linear_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    attributes = {
        "coefficients": [1.0] * 18,
        "intercepts": [0.0] * 3,
        "classlabels_ints": [0, 1, 2],
        **changes,
    }
    with pytest.raises(ValueError, match=f"net.onnx: .*{message}"):
        import_node(tmp_path, "LinearClassifier", **attributes)


@pytest.mark.parametrize(
    ("op", "inputs", "outputs"),
    [
        ("LinearClassifier", ["x"], ["y"]),
        ("LinearClassifier", [], ["label", "y"]),
        ("LinearRegressor", ["x"], ["y", "z"]),
    ],
)
def test_wrong_number_of_tensors_is_refused(
    tmp_path: Path, op: str, inputs: list[str], outputs: list[str]
) -> None:
    estimator = node(op, inputs, outputs, domain="ai.onnx.ml")
    (tmp_path / "net.onnx").write_bytes(model([estimator], output=signature("y", "batch", 1)))
    numbers = f"has {len(inputs)} inputs and {len(outputs)} outputs; must have 1 and"
    with pytest.raises(
        ValueError, match=f"net.onnx: {op.replace('L', 'ai.onnx.ml.L')}, .*{numbers}"
    ):
        import_onnx(tmp_path / "net.onnx", ROWS)


def test_targets_must_be_a_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"attribute targets = \(1, 2\); must be a whole number"):
        import_node(tmp_path, "LinearRegressor", coefficients=[1.0] * 6, targets=[1, 2])


def test_cycle_of_copies_is_refused(tmp_path: Path) -> None:
    nodes = [node("Identity", ["b"], "a"), node("Identity", ["a"], "b")]
    (tmp_path / "net.onnx").write_bytes(model(nodes, output=signature("b", "batch", 6)))
    with pytest.raises(ValueError, match="Identity, opset 17 reads b, which is not before it"):
        import_onnx(tmp_path / "net.onnx", ROWS)


@pytest.mark.parametrize(
    ("weights", "transform", "p"),
    [
        ([0.25, 0.75], "NONE", [0.25, 0.75]),
        ([-1.0, 1.0], "LOGISTIC", [1 / (1 + np.e), 1 / (1 + 1 / np.e)]),
    ],
)
def test_scores_of_one_class_are_the_second(
    tmp_path: Path, weights: list[float], transform: str, p: list[float]
) -> None:
    attributes: dict[str, Any] = {name.replace("target", "class"): TREE[name] for name in TREE}
    attributes |= {"class_weights": weights, "class_ids": [1, 1], "classlabels_ints": [0, 1]}
    x = make_samples([0.4, 0.6])
    for output in (None, "y"):
        graph = import_node(
            tmp_path,
            "TreeEnsembleClassifier",
            output,
            **{**attributes, "post_transform": transform},
        )
        y = compute(graph, x)
        y = y if output else np.asarray(jax.nn.softmax(y))
        np.testing.assert_allclose(y, [[1 - p[0], p[0]], [1 - p[1], p[1]]], atol=1e-6)
