"""Patterns over the paths of parameters."""

from __future__ import annotations

import pytest

from pipeline.models.layers.path_patterns import LayerPath, count_outermost_scopes, require_covered

DEEP: list[LayerPath] = [
    *(
        ("net", f"stage_{stage}", f"conv_{conv}", "kernel")
        for stage in range(3)
        for conv in range(9)
    ),
    ("net", "dense_0", "kernel"),
    ("net", "dense_0", "bias"),
]


def test_unmatched_pattern_error_lists_the_scopes() -> None:
    """Four of 62 names said little of a deep network."""
    scopes = (
        r"in net/stage_0 \(9\), net/stage_1 \(9\), net/stage_2 \(9\), net/dense_0 \(2\), such as"
    )
    with pytest.raises(ValueError, match=f"'head' matches none of the 29 parameters {scopes}"):
        require_covered(["head"], DEEP, "parameters")
    with pytest.raises(ValueError, match=r"did you mean net/dense_0\?$"):
        require_covered(["net/dense_1"], DEEP, "parameters")
    with pytest.raises(ValueError, match="'head': there are no parameters"):
        require_covered(["head"], [], "parameters")
    require_covered(["net/stage_*", "net/*/bias"], DEEP, "parameters")


def test_scopes_in_the_error_are_limited() -> None:
    many: list[LayerPath] = [(f"layer_{n}", "kernel") for n in range(500)]
    with pytest.raises(ValueError, match=r"layer_39, \.\.\., such as layer_0/kernel") as caught:
        require_covered(["x\\n" * 300], many, "parameters")
    assert len(str(caught.value)) < 1_000
    assert count_outermost_scopes([("only", "kernel")]) == {"only/kernel": 1}
