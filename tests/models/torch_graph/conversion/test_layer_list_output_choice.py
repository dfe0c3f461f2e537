"""Names of the outputs of a module, and the choice of the logits among them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pipeline.models.torch_graph.conversion.layer_list import choose_output, name_outputs

Pair = namedtuple("Pair", "first second")


@dataclass
class Spec:
    """A container of a result, as torch describes it."""

    context: Any
    inner: Sequence[Spec] = ()

    def is_leaf(self) -> bool:
        return not self.inner

    def children(self) -> Sequence[Spec]:
        return self.inner


LEAF = Spec(None)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (LEAF, [""]),
        (Spec(None, [LEAF, LEAF]), ["0", "1"]),
        (
            Spec(["logits", "cache"], [LEAF, Spec(None, [LEAF, LEAF])]),
            ["logits", "cache.0", "cache.1"],
        ),
        (Spec(Pair, [LEAF, LEAF]), ["first", "second"]),
        (Spec("ab", [LEAF, LEAF]), ["0", "1"]),
        (Spec([["a", "b"], []], [LEAF, LEAF, LEAF]), ["0", "1", "2"]),
    ],
)
def test_outputs_are_named_by_keys_fields_and_positions(spec: Spec, names: list[str]) -> None:
    assert name_outputs(spec) == names


@pytest.mark.parametrize(
    ("outputs", "name", "chosen"),
    [
        ({"": 1}, None, 1),
        ({"": 1}, "scores", 1),
        ({"loss": 1, "logits": 2}, None, 2),
        ({"loss": 1, "logits": 2}, "loss", 1),
        ({"scores": 1}, None, 1),
    ],
)
def test_logits_are_chosen_by_default(outputs: Any, name: str | None, chosen: int) -> None:
    assert choose_output(outputs, name) == chosen


@pytest.mark.parametrize(
    ("outputs", "name", "words"),
    [
        ({}, None, "returns no tensor; must return one, the logits"),
        ({"0": 1, "1": 2}, None, "returns 2 tensors, 0, 1; model.output must name one of them"),
        ({"logits": 1}, "scores", "no output scores; model.output must name one of logits"),
        ({str(n): n for n in range(11)}, None, "11 tensors, 0, 1, 2, 3, 4, 5, 6, 7 and 3 more;"),
    ],
)
def test_missing_outputs_are_refused(outputs: Any, name: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose_output(outputs, name)
