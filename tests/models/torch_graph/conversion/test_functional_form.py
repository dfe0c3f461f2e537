"""Forms of small graphs: updates of counts, checks that are left out, and constants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.models.torch_graph.conversion import functional_form
from pipeline.models.torch_graph.conversion.functional_form import ProgramReader, prune_form
from pipeline.models.torch_graph.graph import INPUT, ArrayOf, GraphNode, TensorSpec, ValueOf

COUNT = "bn.num_batches_tracked"


class FakeTensor(np.ndarray):
    """An array with the method of tensors that a reader calls."""

    def clone(self) -> FakeTensor:
        return self.copy()


def make_node(name: str, *args: Any, dtype: str = "int64") -> GraphNode:
    return GraphNode(name, "aten.add.Tensor", args, (), (TensorSpec((), dtype),), "", "", "")


def test_count_of_batches_is_updated_if_a_node_reads_it() -> None:
    nodes = (
        make_node("count", ArrayOf(COUNT), 1),
        make_node("output", ValueOf(INPUT), ArrayOf(COUNT), dtype="float32"),
    )
    form = prune_form(nodes, ValueOf("output"), {COUNT: ValueOf("count")})
    assert form.nodes == nodes
    assert form.updates == ((COUNT, ValueOf("count")),)


def test_unread_count_of_batches_is_not_updated() -> None:
    count = make_node("count", ArrayOf(COUNT), 1)
    output = make_node("output", ValueOf(INPUT), dtype="float32")
    form = prune_form((count, output), ValueOf("output"), {COUNT: ValueOf("count")})
    assert form.nodes == (output,)
    assert form.updates == ()


@pytest.mark.parametrize(
    ("name", "is_ignored"),
    [
        ("aten._assert_async.msg", True),
        ("aten.sym_constrain_range_for_size.default", True),
        ("<function sym_constrain_range at 0x7f0>", True),
        ("mine.spell_check.default", False),
        ("mine.my_guard.default", False),
        ("aten.add.Tensor", False),
    ],
)
def test_only_checks_of_torch_are_left_out(name: str, is_ignored: bool) -> None:
    assert bool(functional_form._IGNORED_OPS.search(name)) == is_ignored


@pytest.mark.parametrize("later", [np.nan, 2.0])
def test_constant_that_is_read_twice_is_kept_once_unless_it_changes(later: float) -> None:
    torch = SimpleNamespace(equal=np.array_equal, Tensor=FakeTensor)
    reader = ProgramReader(torch, None)
    for value in (np.nan, later):
        reader.tensors["c"] = np.array([1.0, value]).view(FakeTensor)
        reader._find_value(SimpleNamespace(name="c"))
    assert list(reader.constants) == (["c"] if np.isnan(later) else ["c", "c_later"])
