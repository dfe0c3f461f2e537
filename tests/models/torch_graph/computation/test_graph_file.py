"""Graph files: what is written is read, and whatever is wrong with one is refused in a line."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.models.torch_graph.computation.graph_file import (
    graph_of_document,
    graph_to_text,
    read_graph,
    write_graph,
)
from pipeline.models.weights.files.weight_files import write_weights
from tests.models.torch_graph.golden_graphs import FOLDER, NAMES, golden_graph


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A graph as JSON."""
    found: dict[str, Any] = json.loads((FOLDER / "residual.torch.json").read_text())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_graph_is_unchanged_after_reading_and_writing(name: str, tmp_path: Path) -> None:
    graph = golden_graph(name)
    assert graph_to_text(graph) == (FOLDER / f"{name}.torch.json").read_text()
    write_graph(tmp_path / "net.torch.json", graph)
    again = read_graph(tmp_path / "net.torch.json")
    assert (again.training, again.evaluation, again.arrays) == (
        graph.training,
        graph.evaluation,
        graph.arrays,
    )
    for key, value in graph.values.items():
        np.testing.assert_array_equal(again.values[key], value)


def refusal(document: dict[str, Any], **changes: Any) -> str:
    """The message for a graph with some fields changed."""
    with pytest.raises(ValueError, match=r"\w") as caught:
        graph_of_document({**document, **changes}, dict(golden_graph("residual").values))
    return str(caught.value)


def test_problem_is_reported(document: dict[str, Any]) -> None:
    train = document["train"]
    first, *rest = train["nodes"]

    def with_first(node: list[Any]) -> dict[str, Any]:
        return {**train, "nodes": [node, *rest]}

    assert refusal(document, version=2) == (
        "format 'torch graph' version 2; must be 'torch graph' 1"
    )
    assert "must be an object of format, version" in refusal(document, more=1)
    unknown = [first[0], "aten.bessel.default", *first[2:]]
    assert refusal(document, train=with_first(unknown)).startswith(
        "operator aten.bessel.default of module stem (make_torch_graphs.py:"
    )
    later = [*first[:2], [{"value": "relu"}, *first[2][1:]], *first[3:]]
    assert "reads relu, which is not before it" in refusal(document, train=with_first(later))
    missing = [*first[:2], [first[2][0], {"array": "nope"}], *first[3:]]
    assert "reads array nope, which is missing" in refusal(document, train=with_first(missing))
    many = [*first[:2], [*first[2], 1, 1, 1, 1, 1, 1, 1], *first[3:]]
    assert "too many positional arguments" in refusal(document, train=with_first(many))
    assert "two nodes are called" in refusal(
        document, train={**train, "nodes": [first, *rest, first]}
    )
    huge = [*first[:4], [[[None, 2**30, 2**30], "float32"]], *first[5:]]
    assert "has more than 2,147,483,648 values" in refusal(document, train=with_first(huge))


def test_arrays_must_match_the_graph(document: dict[str, Any]) -> None:
    arrays = document["arrays"]
    path, *others = arrays["stem.weight"]
    assert "letters, digits and dots" in refusal(
        document, arrays={**arrays, "stem.weight": ["../x", *others]}
    )
    assert "two arrays have the same path" in refusal(
        document, arrays={**arrays, "stem.weight": ["fc/kernel", *others]}
    )
    assert "is inside another array's" in refusal(
        document, arrays={**arrays, "stem.weight": ["fc/kernel/more", *others]}
    )
    assert "must be in both graph and weights" in refusal(
        document, arrays={**arrays, "more": [path + "2", *others]}
    )
    wide = [path, *others[:2], [3, 3, 3, 9], others[3]]
    assert "float32 (3, 3, 3, 8) in the weights and float32 (3, 3, 3, 9)" in refusal(
        document, arrays={**arrays, "stem.weight": wide}
    )


def test_invalid_graph_file_is_reported(tmp_path: Path) -> None:
    for content, message in (
        ("[", "isn't a graph: Expecting value"),
        ("[" * 100_000, "isn't a graph: is nested too deeply"),
        ("{}", "has no readable weights beside it"),
    ):
        file = tmp_path / "net.torch.json"
        file.write_text(content)
        with pytest.raises(ValueError, match=message) as caught:
            read_graph(file)
        assert str(caught.value).startswith(f"{file}: ")
    write_weights(tmp_path / "net.torch.safetensors", {"x": np.zeros(1)})
    with pytest.raises(ValueError, match="must be an object of format"):
        read_graph(tmp_path / "net.torch.json")


@pytest.mark.slow
def test_mutated_graph_is_refused_or_read(document: dict[str, Any]) -> None:
    """2,000 graphs with a value replaced raise nothing but ValueError."""
    draw = random.Random(0)
    values = dict(golden_graph("residual").values)
    odd: list[Any] = [None, True, -1, 2**70, 1.5, "x" * 3000, "", [], {}, [[]], {"value": "x"}]
    odd += [{"value": "conv2d", "item": -1}, {"array": []}, {"float": "one"}, "\x00", {"type": 1}]
    outcomes = Counter(_read(document, values, draw, odd) for _ in range(2000))
    assert outcomes["refused"] > 1000
    assert outcomes["read"] > 100, "some values are free, such as lines of code"
    assert outcomes.total() == 2000


def _read(
    document: dict[str, Any], values: dict[str, np.ndarray], draw: random.Random, odd: list[Any]
) -> str:
    """Read the document with one value replaced; anything but ValueError is raised."""
    changed = copy.deepcopy(document)
    _replace_somewhere(changed, draw, draw.choice(odd))
    try:
        graph_of_document(changed, values)
    except ValueError:
        return "refused"
    return "read"


def _replace_somewhere(node: Any, draw: random.Random, value: Any) -> None:
    """Replace one value of nested lists and objects."""
    while True:
        key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not isinstance(node[key], dict | list) or not node[key] or draw.random() < 0.15:
            node[key] = value
            return
        node = node[key]
