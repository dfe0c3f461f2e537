"""Custom backward passes in forms, and forms whose passes aren't separate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.models.torch_graph.graph import (
    COTANGENT,
    CUSTOM_GRADIENT,
    INPUT,
    ArrayOf,
    Form,
    GraphNode,
    ValueOf,
    find_backward_passes,
)


def node(name: str, op: str, *args: Any) -> GraphNode:
    """A node of the network itself."""
    return GraphNode(name, op, args, (), (), "", "Net", "nets.py:3")


X = ValueOf(INPUT)
DOUBLED = node("double", "aten.mul.Tensor", X, 2)
G = node("g", COTANGENT, ValueOf("double"))
SCALED = node("scaled", "aten.mul.Tensor", ValueOf("g"), ArrayOf("w"))
CUSTOM = node(
    "custom", CUSTOM_GRADIENT, (X,), (ValueOf("double"),), (ValueOf("g"),), (ValueOf("scaled"),)
)
FORM = Form((DOUBLED, G, SCALED, CUSTOM), ValueOf("custom", 0))


def test_backward_pass_has_all_nodes_that_depend_on_its_cotangents() -> None:
    found = find_backward_passes(FORM)["custom"]
    assert found.numbers == (1, 2)
    assert set(found.reads) == {ValueOf("double"), ArrayOf("w")}


def test_form_without_custom_functions_has_no_backward_pass() -> None:
    assert find_backward_passes(Form((DOUBLED,), ValueOf("double"))) == {}


OUTSIDE = node("outside", "aten.add.Tensor", ValueOf("scaled"), X)
MIXED = node("mixed", "aten.add.Tensor", ValueOf("g"), ValueOf("h"))
OTHER = node("other", CUSTOM_GRADIENT, (X,), (ValueOf("double"),), (ValueOf("h"),), (None,))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (replace(FORM, output=ValueOf("scaled")), "the network's output depends on a value in a"),
        (replace(FORM, updates=(("seen", ValueOf("g")),)), "buffer seen changes in a backward"),
        (
            Form((*FORM.nodes, OUTSIDE), ValueOf("outside")),
            "the network's output depends on a value in a backward pass",
        ),
        (Form((DOUBLED, G), ValueOf("double")), r"has no custom gradient"),
        (
            Form((DOUBLED, G, node("h", COTANGENT, X), MIXED, OTHER, CUSTOM), ValueOf("double")),
            "aten.add.Tensor of the network .nets.py:3. is of two backward passes",
        ),
        (
            Form((DOUBLED, G, replace(CUSTOM, args=(*CUSTOM.args[:3], ()))), ValueOf("double")),
            "its gradients must be of its inputs",
        ),
        (
            Form((DOUBLED, G, replace(CUSTOM, args=((ValueOf("g"),), *CUSTOM.args[1:]))), X),
            "its gradients must be of its inputs",
        ),
        (Form((DOUBLED, replace(CUSTOM, args=(X,))), X), "must have four lists"),
    ],
)
def test_backward_pass_that_is_not_separate_is_refused(form: Form, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_backward_passes(form)
