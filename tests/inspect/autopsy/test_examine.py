"""A finding in one line, in several, and as JSON."""

from __future__ import annotations

import json
from math import nan
from typing import Any

import numpy as np
import pytest

from pipeline.backends.graph.replay import find_range
from pipeline.inspect.autopsy.examine import MAX_LINES, Autopsy, Finding, NonFiniteSamples, Tensor

BAD = Tensor("activation", "dense_0", find_range(np.array([1.0, np.nan], np.float32)))
GOOD = Tensor("parameter", "kernel", find_range(np.array([1.0, 3.0], np.float32)))


def finding(**fields: Any) -> Finding:
    return Finding("forward", "dense_0", "dot_general", BAD, **fields)


def test_headline_names_phase_layer_operation_and_tensor() -> None:
    assert finding().headline == (
        "in the forward pass, dense_0 (dot_general): "
        "activation dense_0: float32 2 with 1 NaN, else 1 to 1, mean 1"
    )
    column = Tensor("input column", "image", BAD.range)
    assert Finding("data", "", "", column).headline.startswith("in the data: input column image: ")


@pytest.mark.parametrize(
    ("ids", "of", "text"),
    [
        ((7, 9), 8, "2 of 8 samples: 7, 9"),
        ((7, 9), 2, "all 2 samples of the batch"),
    ],
)
def test_bad_samples_are_listed_unless_all_are_bad(
    ids: tuple[int, ...], of: int, text: str
) -> None:
    samples = NonFiniteSamples(ids, tuple(range(len(ids))), of)
    assert str(samples).startswith(text)
    assert f"  samples: {text}" in str(finding(samples=samples))


def test_long_tensor_list_is_truncated() -> None:
    text = str(finding(operands=(GOOD,) * (MAX_LINES + 3), parameters=(GOOD,)))
    assert text.count("  it read parameter kernel") == MAX_LINES
    assert "  it read 3 more" in text
    assert text.endswith("  the layer has parameter kernel: float32 2, 1 to 3, mean 2")


def test_json_has_all_tensors_and_the_text() -> None:
    autopsy = Autopsy(3, 0.5, nan, finding(operands=(GOOD,) * 20))
    tree = json.loads(json.dumps(autopsy.to_dict()))
    assert (tree["step"], tree["reproduced"], tree["grad_norm"]) == (3, True, "nan")
    assert len(tree["finding"]["operands"]) == 20
    assert tree["finding"]["tensor"]["nan"] == 1
    assert tree["text"].startswith(str(autopsy).splitlines()[0])


def test_autopsy_without_a_finding_has_a_reason() -> None:
    autopsy = Autopsy(3, 0.5, 2.0, None, "a fault of memory")
    assert str(autopsy) == "step 3: not reproduced: a fault of memory"
    assert autopsy.to_dict()["reproduced"] is False
