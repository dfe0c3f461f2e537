"""Classifiers of scikit-learn whose probabilities become logits, as ONNX's domain ai.onnx.ml has
them: alone, or each of one class against the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from pipeline.models.torch_graph.onnx.onnx_file import OnnxModel, OnnxNode

DOMAIN = "ai.onnx.ml."
NORMALIZER = f"{DOMAIN}Normalizer"
"""Operator that divides probabilities by their sum."""
TREE_CLASSIFIER = f"{DOMAIN}TreeEnsembleClassifier"
CLASSIFIERS = (f"{DOMAIN}LinearClassifier", TREE_CLASSIFIER)
_NORM = "LpNormalization"
_COLUMNS = f"{DOMAIN}ArrayFeatureExtractor"
ScoreForm = Literal["scores", "logits", "logarithms"]
"""The results of a classifier: as the file says, logits, or logarithms of probabilities."""


def count_classes(node: OnnxNode) -> int:
    """Return the classes of a classifier. Raises ValueError for a damaged list."""
    names = ("classlabels_int64s", "classlabels_ints", "classlabels_strings")
    return max(len(read_tuple(node.attributes, name)) for name in names)


def find_transform(node: OnnxNode) -> str:
    """Return what an estimator applies to its sums, such as SOFTMAX."""
    return str(node.attributes.get("post_transform", "NONE"))


def has_shares(node: OnnxNode) -> bool:
    """Return whether a classifier's leaves have shares of the classes, as in a forest."""
    weights = read_tuple(node.attributes, "class_weights")
    return node.op == TREE_CLASSIFIER and len(weights) > 0 and min(weights) >= 0


def has_probabilities(node: OnnxNode) -> bool:
    """Return whether the scores of a classifier are probabilities."""
    return find_transform(node) in ("LOGISTIC", "SOFTMAX") or has_shares(node)


def read_tuple(
    attributes: Mapping[str, Any], name: str, types: tuple[type, ...] = (object,)
) -> tuple[Any, ...]:
    """Return the values of an attribute, () if it is missing.

    Files with float64 have some in a tensor, the attribute `NAME_as_tensor`. Raises ValueError for
    another kind of attribute, and for values of other types.
    """
    value = attributes.get(name, attributes.get(f"{name}_as_tensor", ()))
    if isinstance(value, np.ndarray):
        value = tuple(value.ravel().tolist())
    if not isinstance(value, tuple):
        raise ValueError(f"attribute {name} = {value!r:.60}; must be several values")
    if not all(isinstance(item, types) for item in value):
        kind = "numbers" if float in types else "whole numbers"
        raise ValueError(f"attribute {name} = {value!r:.60}; must be {kind}")
    return value


@dataclass(frozen=True)
class ScoreTracer:
    """The classifiers whose scores become outputs."""

    model: OnnxModel
    copies: Set[str]
    """Operators that pass scores on."""

    @cached_property
    def producers(self) -> Mapping[str, OnnxNode]:
        """The node that computes a tensor, by the tensor's name."""
        return {name: node for node in self.model.nodes for name in node.outputs}

    def find_passed(self) -> dict[str, ScoreForm]:
        """Return the forms of classifiers' scores and of tensors made of them, up to an output."""
        passed: dict[str, ScoreForm] = {}
        for output in self.model.outputs:
            passed |= self._trace((output.name,), "logits") or {}
        return passed

    def find_source(self, node: OnnxNode, form: ScoreForm) -> str | None:
        """Return the tensor of which a node that passes scores on becomes a copy, if it does."""
        if node.op in (NORMALIZER, _NORM) or (node.op == _COLUMNS and form == "logits"):
            return node.inputs[0]
        return self._find_pair(node) if node.op == "Concat" else None

    def _trace(self, names: Iterable[str], form: ScoreForm) -> dict[str, ScoreForm] | None:
        """Return the forms of tensors, and of those up to scores; None if there are others.

        The probabilities of each class against the rest, divided by their sum, are the softmax of
        their logarithms. Of scores that aren't probabilities, the division is left out.
        """
        passed: dict[str, ScoreForm] = {}
        pending = [*names]
        while pending:
            name = pending.pop()
            node = self.producers.get(name)
            operands = None if node is None else self._find_operands(node, name, form)
            if node is None or operands is None:
                return None
            passed[name] = form
            if node.op == _NORM:
                parts = self._trace(operands, "logarithms") or self._trace(operands, "scores")
                if parts is None:
                    return None
                passed |= parts
            else:
                pending += [operand for operand in operands if operand not in passed]
        return passed

    def _find_operands(self, node: OnnxNode, name: str, form: ScoreForm) -> tuple[str, ...] | None:
        """Return tensors of scores that a node passes on; () for scores, None for other nodes."""
        if node.op in CLASSIFIERS:
            has_form = has_probabilities(node) == (form == "logarithms")
            is_score = node.outputs[1:2] == (name,) and (form == "logits" or has_form)
            return () if is_score else None
        pair = self._find_pair(node)
        if pair is not None:
            return (pair,)
        axis = node.attributes.get("axis", -1)
        if form == "logits":
            is_norm = node.op == _NORM and node.attributes.get("p") == 1 and axis in (1, -1)
            # A column of two scores stands for both.
            is_column = node.op == _COLUMNS and self._count_classes(node) == 2
            is_copy = node.op in self.copies or node.op == NORMALIZER
            return (node.inputs[:1] or None) if is_norm or is_column or is_copy else None
        if node.op == "Concat" and axis in (1, -1):
            return node.inputs
        is_column = node.op in (_COLUMNS, "Slice") and self._count_classes(node) > 0
        return node.inputs[:1] if is_column else None

    def _count_classes(self, node: OnnxNode) -> int:
        """Return the classes of the classifier that a node reads; 0 if it reads another node."""
        source = self.producers.get("".join(node.inputs[:1]))
        is_classifier = source is not None and source.op in CLASSIFIERS
        return count_classes(source) if source and is_classifier else 0

    def _find_pair(self, node: OnnxNode) -> str | None:
        """Return scores of which a node joins 1 - p and p, p the second of two; None for others."""
        if node.op != "Concat" or len(node.inputs) != 2:
            return None
        complement, p = (self.producers.get(name) for name in node.inputs)
        if complement is None or complement.op != "Sub" or complement.inputs[1:] != node.inputs[1:]:
            return None
        one = self.model.initializers.get(complement.inputs[0])
        if p is not None and p.op == "Concat" and len(p.inputs) == 1:
            p = self.producers.get(p.inputs[0])
        is_column = p is not None and p.op == "Slice" and self._count_classes(p) == 2
        return p.inputs[0] if p and is_column and one is not None and (one == 1).all() else None
