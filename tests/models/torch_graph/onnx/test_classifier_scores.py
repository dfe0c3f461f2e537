"""Scores of classifiers that a file joins, divides or chooses from are logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.models.torch_graph.onnx.classifier_scores import NORMALIZER, ScoreTracer
from pipeline.models.torch_graph.onnx.import_onnx import import_onnx
from pipeline.models.torch_graph.onnx.onnx_file import OnnxModel, OnnxNode, OnnxTensor, read_onnx
from tests.models.torch_graph.onnx.test_estimator_nodes import ROWS, compute, golden, write

CLASSIFIER = "ai.onnx.ml.LinearClassifier"
COLUMNS = "ai.onnx.ml.ArrayFeatureExtractor"
NORM = "LpNormalization"


def test_each_classifier_against_the_rest_is_trained(tmp_path: Path) -> None:
    graph = import_onnx(write(tmp_path, "rest_3"), ROWS)
    kernels = [spec for spec in graph.arrays if spec.path.endswith("kernel")]
    assert [(spec.role, spec.shape) for spec in kernels] == [("parameter", (6, 2))] * 3


def test_probabilities_of_rest_are_computed_as_the_file_says(tmp_path: Path) -> None:
    file = write(tmp_path, "rest_3")
    (norm,) = (n for n in read_onnx(file).nodes if n.op == "LpNormalization")
    p = compute(import_onnx(file, ROWS, norm.outputs[0]), golden()["x"])
    np.testing.assert_allclose(p, golden()["rest_3.y"], atol=2e-6)


def make_node(op: str, inputs: str, output: str, **attributes: Any) -> OnnxNode:
    outputs = (f"{output}.label", output) if op == CLASSIFIER else (output,)
    return OnnxNode("", op, tuple(inputs.split()), outputs, attributes)


def make_classifier(output: str, classes: int = 2, transform: str = "LOGISTIC") -> OnnxNode:
    labels = tuple(range(classes))
    return make_node(CLASSIFIER, "x", output, classlabels_ints=labels, post_transform=transform)


def trace(*nodes: OnnxNode) -> dict[str, str]:
    """Forms of the tensors up to the output y."""
    outputs = (OnnxTensor("y", "float32", (None, 2)),)
    initializers = {"one": np.ones(1, np.float32)}
    model = OnnxModel("net.onnx", "", 15, nodes, initializers, (), outputs)
    return dict(ScoreTracer(model, frozenset({"Identity"})).find_passed())


def test_divided_scores_are_logarithms_only_if_they_are_probabilities() -> None:
    nodes = make_node("Concat", "p p", "c", axis=1), make_node(NORM, "c", "y", axis=1, p=1)
    assert trace(make_classifier("p"), *nodes)["p"] == "logarithms"
    assert trace(make_classifier("p", transform="NONE"), *nodes)["p"] == "scores"
    mixed = make_node("Concat", "p q", "c", axis=1), nodes[1]
    assert trace(make_classifier("p"), make_classifier("q", transform="NONE"), *mixed) == {}


def test_other_norms_are_computed_as_the_file_says() -> None:
    for attributes in ({"p": 2, "axis": 1}, {"p": 1, "axis": 0}):
        assert trace(make_classifier("p"), make_node(NORM, "p", "y", **attributes)) == {}
    assert trace(make_classifier("p"), make_node(NORMALIZER, "p", "y"))["p"] == "logits"


def test_column_stands_for_both_of_two_classes_only() -> None:
    column = make_node(COLUMNS, "p index", "y")
    assert trace(make_classifier("p"), column)["p"] == "logits"
    assert trace(make_classifier("p", classes=3), column) == {}


def test_pair_of_p_and_its_complement_is_the_classifier() -> None:
    pair = (
        make_node("Slice", "p starts ends axes", "s"),
        make_node("Sub", "one s", "q"),
        make_node("Concat", "q s", "y", axis=1),
    )
    assert trace(make_classifier("p"), *pair) == {"y": "logits", "p": "logits"}
    assert trace(make_classifier("p", classes=3), *pair) == {}


def test_cycles_and_doublings_end() -> None:
    doubled = [make_node("Concat", f"c{n} c{n}", f"c{n + 1}", axis=1) for n in range(60)]
    norm = make_node(NORM, "c60", "y", axis=1, p=1)
    assert len(trace(make_classifier("c0"), *doubled, norm)) == 62
    cycle = make_node("Identity", "a", "y"), make_node("Identity", "y", "a")
    assert len(trace(*cycle)) == 2
    assert trace(make_node(NORM, "", "y", p=1)) == {}
