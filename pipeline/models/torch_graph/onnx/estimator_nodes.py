"""Linear models and ensembles of trees of scikit-learn, as ONNX's domain ai.onnx.ml has them.

A classifier is replaced by nodes that compute its probabilities, or logits whose softmax is the
probabilities. Weights of linear models are trained; trees are constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipeline.models.torch_graph.onnx.classifier_scores import (
    CLASSIFIERS,
    DOMAIN,
    TREE_CLASSIFIER,
    ScoreForm,
    ScoreTracer,
    count_classes,
    find_transform,
    has_shares,
    read_tuple,
)
from pipeline.models.torch_graph.onnx.graph_builder import (
    MAX_CONSTANTS,
    OnnxNodeReader,
    OnnxValue,
    onnx_operator,
)
from pipeline.models.torch_graph.onnx.onnx_file import OnnxModel, OnnxNode

_TREES = f"{DOMAIN}TreeEnsembleRegressor"
_LINEAR_REGRESSOR = f"{DOMAIN}LinearRegressor"
ESTIMATORS = (*CLASSIFIERS, _LINEAR_REGRESSOR)
"""Operators that `replace_estimators` replaces by others."""
_NUMBER = (int, float)
SMALLEST = 1e-7
"""Probability in place of smaller ones of a forest, whose logits are logarithms."""
_COMPUTED = {"post_transform": ("NONE",), "aggregate_function": ("SUM", "AVERAGE")}
"""Values of attributes of trees that are computed, the default first."""
MAX_DEPTH = 1_000
"""Most levels of a tree, each of which adds nodes to the graph."""


def replace_estimators(model: OnnxModel, copies: Iterable[str] | None) -> OnnxModel:
    """Return a model without nodes of `ESTIMATORS`.

    Classifiers whose scores only nodes of the operators `copies` pass on to an output compute
    logits; if that is None, all compute what the file says. Raises ValueError for attributes that
    aren't computed here.
    """
    tracer = ScoreTracer(model, frozenset(copies or ()))
    passed = {} if copies is None else tracer.find_passed()
    nodes: list[OnnxNode] = []
    initializers = dict(model.initializers)
    for node in model.nodes:
        forms = [passed[name] for name in node.outputs if name in passed]
        source = tracer.find_source(node, forms[0]) if forms else None
        if source is not None:
            nodes.append(replace(node, op="Identity", inputs=(source,), attributes={}))
        elif node.op in ESTIMATORS:
            writer = _EstimatorWriter(node)
            try:
                writer.write(forms[0] if forms else "scores")
            except ValueError as error:
                raise ValueError(f"{model.describe(node)}: {error}") from error
            nodes += writer.nodes
            initializers |= writer.initializers
        else:
            nodes.append(node)
    return replace(model, nodes=tuple(nodes), initializers=initializers)


@dataclass
class _EstimatorWriter:
    """The nodes in place of one node, and their initializers by name.

    Sums z, float32 (samples, width), are what the file's transformation is applied to.
    """

    node: OnnxNode
    nodes: list[OnnxNode] = field(default_factory=list)
    initializers: dict[str, np.ndarray] = field(default_factory=dict)

    def write(self, form: ScoreForm) -> None:
        """Add nodes that compute the outputs: of a classifier the class's number and its scores.

        Raises ValueError for inputs, outputs or attributes that the operator doesn't have.
        """
        num_outputs = 2 if self.node.op in CLASSIFIERS else 1
        if len(self.node.inputs) != 1 or len(self.node.outputs) != num_outputs:
            numbers = f"{len(self.node.inputs)} inputs and {len(self.node.outputs)} outputs"
            raise ValueError(f"has {numbers}; must have 1 and {num_outputs}")
        z, width = self._sum_trees() if self.node.op == TREE_CLASSIFIER else self._sum_linear()
        transform = find_transform(self.node)
        if self.node.op == _LINEAR_REGRESSOR:
            if transform != "NONE":
                raise ValueError(f"post_transform {transform} isn't computed here")
            self._name_last(z, self.node.outputs[0])
            return
        classes = count_classes(self.node)
        if width != classes and (width, classes) != (1, 2):
            raise ValueError(f"has {width} scores for {classes} classes")
        write = {
            "scores": self._write_scores,
            "logits": self._write_logits,
            "logarithms": self._write_logarithms,
        }[form]
        scores = write(transform, z, width)
        self._name_last(scores, self.node.outputs[1])
        if self.node.outputs[0]:
            attributes = {"axis": 1, "keepdims": 0}
            self._name_last(self._call("ArgMax", scores, **attributes), self.node.outputs[0])

    def _sum_linear(self) -> tuple[str, int]:
        """Add a layer of the coefficients and intercepts; return the name of z and its width."""
        coefficients = self._read_numbers("coefficients")
        intercepts = self._read_numbers("intercepts")
        width = intercepts.size or _read_integer(self.node.attributes, "targets")
        if width < 1 or not coefficients.size or coefficients.size % width:
            raise ValueError(f"has {coefficients.size:,} coefficients for {width:,} scores")
        weight = self._store("weight", coefficients.reshape(width, -1).T)
        biases = [self._store("bias", intercepts)] if intercepts.size else []
        return self._call("Gemm", self.node.inputs[0], weight, *biases), width

    def _sum_trees(self) -> tuple[str, int]:
        """Add the sum of the trees; return the name of z and its width."""
        attributes = dict(self.node.attributes)
        for name in ("treeids", "nodeids", "weights"):
            attributes[f"target_{name}"] = read_tuple(attributes, f"class_{name}")
        ids = read_tuple(attributes, "class_ids")
        classes = count_classes(self.node)
        # With two classes, the scores of a single one are the second's.
        width = 1 if classes == 2 and len(set(ids)) == 1 else classes
        attributes["target_ids"] = (0,) * len(ids) if width == 1 else ids
        attributes["n_targets"] = width
        attributes["base_values"] = read_tuple(attributes, "base_values")[-width:]
        attributes["post_transform"] = "NONE"
        return self._call(_TREES, self.node.inputs[0], **attributes), width

    def _write_scores(self, transform: str, z: str, width: int) -> str:
        """Add nodes that compute what the file says of sums z."""
        if transform == "LOGISTIC":
            p = self._call("Sigmoid", z)
            return self._complement(p) if width == 1 else p
        if transform == "SOFTMAX" and width > 1:
            return self._call("Softmax", z, axis=1)
        if transform != "NONE":
            raise ValueError(f"post_transform {transform} of {width} scores isn't computed here")
        if width > 1:
            return z
        return self._complement(z) if has_shares(self.node) else self._join(self._call("Neg", z), z)

    def _write_logits(self, transform: str, z: str, width: int) -> str:
        """Add nodes that compute logits of sums z; their softmax is the probabilities."""
        if transform == "LOGISTIC" and width == 1:
            return self._join(self._call("Sub", z, z), z)
        if transform == "LOGISTIC" and width == 2 and self._has_opposites():
            # The softmax of [-z / 2, z / 2] is [1 - p, p], p the sigmoid of z.
            return self._call("Mul", z, self._store("half", np.array(0.5, np.float32)))
        if transform == "SOFTMAX" and width > 1:
            return z
        return self._write_logarithms(transform, z, width)

    def _write_logarithms(self, transform: str, z: str, width: int) -> str:
        """Add nodes that compute logarithms of probabilities, or scores that are none."""
        if transform == "LOGISTIC":
            logarithm = self._call("Neg", self._call("Softplus", self._call("Neg", z)))
            if width > 1:
                return logarithm
            return self._join(self._call("Neg", self._call("Softplus", z)), logarithm)
        if transform == "SOFTMAX" and width > 1:
            return self._call("LogSoftmax", z, axis=1)
        scores = self._write_scores(transform, z, width)
        if not has_shares(self.node):
            return scores
        smallest = self._store("smallest", np.array(SMALLEST, np.float32))
        return self._call("Log", self._call("Max", scores, smallest))

    def _has_opposites(self) -> bool:
        """Return whether the second score is the first one with another sign."""
        first, second = self._read_numbers("coefficients").reshape(2, -1)
        return np.array_equal(first, -second) and not self._read_numbers("intercepts").sum()

    def _complement(self, p: str) -> str:
        return self._join(self._call("Sub", self._store("one", np.array(1, np.float32)), p), p)

    def _join(self, first: str, second: str) -> str:
        return self._call("Concat", first, second, axis=1)

    def _read_numbers(self, name: str) -> np.ndarray:
        return np.array(read_tuple(self.node.attributes, name, _NUMBER), np.float32)

    def _store(self, name: str, array: np.ndarray) -> str:
        name = f"{self.node.outputs[-1]}.{name}"
        self.initializers[name] = array
        return name

    def _call(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{self.node.outputs[-1]}@{len(self.nodes) + 1}"
        self.nodes.append(OnnxNode(self.node.name, op, inputs, (name,), attributes))
        return name

    def _name_last(self, value: str, output: str) -> None:
        self.nodes.append(OnnxNode(self.node.name, "Identity", (value,), (output,), {}))


def _read_integer(attributes: Mapping[str, Any], name: str) -> int:
    """Return a whole number, 1 if it is missing. Raises ValueError for another kind."""
    value = attributes.get(name, 1)
    if not isinstance(value, int):
        raise ValueError(f"attribute {name} = {value!r:.60}; must be a whole number")
    return value


@dataclass(frozen=True)
class _Trees:
    """Nodes of all trees."""

    features: np.ndarray
    thresholds: np.ndarray
    children: np.ndarray
    """Node that follows node i, int32 (2 * nodes,): entry 2 * i + 1 if `x <= threshold`, else entry
    2 * i. A leaf follows itself."""
    missing: np.ndarray
    """Whether a missing value counts as at most the threshold, bool (nodes,)."""
    leaves: np.ndarray
    """Number that a leaf adds to each target, float32 (nodes, targets)."""
    roots: np.ndarray
    depth: int


@onnx_operator(_TREES)
def read_trees(reader: OnnxNodeReader) -> OnnxValue:
    """Read the sum or the mean of regression trees. Their values are constants."""
    graph = reader.graph
    x = graph.call("_to_copy.default", reader.value(), dtype="float32")
    trees = _parse_trees(reader.node.attributes, reader.fixed_sizes(1))
    roots = graph.constant(trees.roots[None])
    (batch, _) = graph.shape(x)
    node = graph.call("expand.default", roots, (batch, len(trees.roots)))

    def look_up(table: np.ndarray, index: OnnxValue) -> OnnxValue:
        return graph.call("index.Tensor", graph.constant(table), (index,))

    for _ in range(trees.depth):
        value = graph.call("gather.default", x, 1, look_up(trees.features, node))
        is_below = graph.call("le.Tensor", value, look_up(trees.thresholds, node))
        if trees.missing.any():
            is_missing = graph.call("ne.Tensor", value, value)
            counts = graph.call("logical_and.default", is_missing, look_up(trees.missing, node))
            is_below = graph.call("logical_or.default", is_below, counts)
        doubled = graph.call("mul.Scalar", node, 2)
        node = look_up(trees.children, graph.call("add.Tensor", doubled, is_below))
    result = graph.call("sum.dim_IntList", look_up(trees.leaves, node), (1,), False)
    if reader.attribute("aggregate_function", "SUM") == "AVERAGE":
        result = graph.call("div.Scalar", result, len(trees.roots))
    base = read_tuple(reader.node.attributes, "base_values", _NUMBER)
    if base and len(base) != trees.leaves.shape[1]:
        raise ValueError(f"has {len(base)} base_values for {trees.leaves.shape[1]} targets")
    return graph.call("add.Tensor", result, graph.constant(np.array(base))) if base else result


def _parse_trees(attributes: Mapping[str, Any], sizes: tuple[int, ...]) -> _Trees:
    """Parse the trees for samples of `sizes`, (features,). Raises ValueError for damaged trees."""
    for name, computed in _COMPUTED.items():
        if (value := attributes.get(name, computed[0])) not in computed:
            choices = " or ".join(computed)
            raise ValueError(f"{name} {value!s:.60} isn't computed here; must be {choices}")
    tree_ids = read_tuple(attributes, "nodes_treeids", (int,))
    node_ids = read_tuple(attributes, "nodes_nodeids", (int,))
    keys = list(zip(tree_ids, node_ids, strict=False))
    numbers = {key: number for number, key in enumerate(keys)}
    count = len(tree_ids)
    if not count or len(numbers) < max(count, len(node_ids)) or len(sizes) != 1:
        raise ValueError("has no nodes, or a node twice, or reads samples that aren't rows")

    def read_column(name: str, *types: type, default: Any = None) -> tuple[Any, ...]:
        values = read_tuple(attributes, f"nodes_{name}", types)
        values = values or (default,) * count
        if len(values) != count or None in values:
            raise ValueError(f"nodes_{name} has {len(values):,} values for {count:,} nodes")
        return values

    def find_children(name: str) -> np.ndarray:
        ids = zip(keys, read_column(name, int), strict=True)
        return np.array([numbers.get((tree, child), -1) for (tree, _), child in ids], np.int32)

    modes = read_column("modes", object)
    features = np.array(read_column("featureids", int), np.int64)
    values = read_column("values", *_NUMBER)
    is_leaf = np.array([mode == "LEAF" for mode in modes])
    children = np.stack([find_children("falsenodeids"), find_children("truenodeids")], 1)
    if (features[~is_leaf] >= sizes[0]).any() or (features < 0).any():
        raise ValueError(f"its trees read features that aren't among the {sizes[0]:,} of a sample")
    if (children[~is_leaf] < 0).any():
        raise ValueError("a branch of its trees has no node")
    missing = np.array(read_column("missing_value_tracks_true", int, default=0)).astype(bool)
    thresholds, is_swapped = _to_thresholds(modes, np.array(values, np.float64))
    children[is_swapped] = children[is_swapped][:, ::-1]
    children[is_leaf] = np.flatnonzero(is_leaf)[:, None]
    is_child = np.zeros(count, bool)
    is_child[children[~is_leaf]] = True
    roots = np.flatnonzero(~is_child)
    return _Trees(
        np.where(is_leaf, 0, features).astype(np.int32),
        np.where(is_leaf, np.float32(0), thresholds),
        children.ravel(),
        (missing ^ is_swapped) & ~is_leaf,
        _add_leaves(attributes, numbers),
        roots.astype(np.int32),
        _measure_depth(children, is_leaf, roots),
    )


def _to_thresholds(modes: tuple[Any, ...], values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return thresholds t, float32, and whether a branch is taken if `x <= t` is false.

    A float32 x is at most a float64 value if it is at most the float32 below.
    """
    kinds = np.array(modes)
    unknown = set(modes) - {"BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "LEAF"}
    if unknown:
        raise ValueError(f"nodes of mode {min(map(str, unknown))} aren't computed here")
    rounded = values.astype(np.float32)
    below = np.nextafter(rounded, np.float32(-np.inf))
    is_strict = np.isin(kinds, ("BRANCH_LT", "BRANCH_GTE"))
    is_beyond = np.where(is_strict, rounded >= values, rounded > values)
    return np.where(is_beyond, below, rounded), np.isin(kinds, ("BRANCH_GTE", "BRANCH_GT"))


def _add_leaves(attributes: Mapping[str, Any], numbers: Mapping[Any, int]) -> np.ndarray:
    """Return what each node adds to the targets, float32 (nodes, targets)."""
    names = ("treeids", "nodeids", "ids")
    columns = [read_tuple(attributes, f"target_{name}", (int,)) for name in names]
    weights = read_tuple(attributes, "target_weights", _NUMBER)
    if {len(weights)} != set(map(len, columns)):
        lengths = ", ".join(f"{len(column):,}" for column in columns)
        raise ValueError(
            f"target_treeids, nodeids and ids have {lengths} values for "
            f"{len(weights):,} target_weights"
        )
    targets = _read_integer(attributes, "n_targets")
    if not 0 < targets * len(numbers) <= MAX_CONSTANTS:
        size = f"{len(numbers):,} nodes for {targets:,} targets"
        raise ValueError(f"has {size}; their product must be 1 to {MAX_CONSTANTS:,}")
    leaves = np.zeros((len(numbers), targets), np.float64)
    for tree, node, target, weight in zip(*columns, weights, strict=True):
        if (tree, node) not in numbers or not 0 <= target < targets:
            raise ValueError(f"a leaf is at node {node} of tree {tree} for target {target}")
        leaves[numbers[tree, node], target] += weight
    return leaves.astype(np.float32)


def _measure_depth(children: np.ndarray, is_leaf: np.ndarray, roots: np.ndarray) -> int:
    """Return the levels of the deepest tree. Raises ValueError if a branch leads back."""
    level = roots
    seen = 0
    for depth in range(MAX_DEPTH):
        seen += len(level)
        level = children[level[~is_leaf[level]]].ravel()
        if not len(level):
            if seen != len(is_leaf):
                raise ValueError("a node of its trees is in a cycle")
            return depth
        if seen + len(level) > len(is_leaf):
            break
    raise ValueError(f"its trees have more than {MAX_DEPTH:,} levels, or a node twice")
