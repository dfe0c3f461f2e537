"""The names that collections of models give the arrays of networks that are here."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pipeline.models.weights.files.named_arrays import Arrays, make_natural_key
from pipeline.models.weights.rules.syntax import Place, place_layer
from pipeline.stages.export.matching import Matching, match_weights
from pipeline.stages.export.network import NetworkArrays
from tests.conftest import ROOT
from tests.models.build import conf_model

GOLDEN = ROOT / "tests" / "golden"
NETWORKS = [
    pytest.param(collection, json.loads(line), id=f"{collection}-{json.loads(line)['theirs']}")
    for collection in ("torchvision", "timm", "mindcv")
    for line in (GOLDEN / "names" / f"{collection}.jsonl").read_text().splitlines()
]


def network(model: str) -> NetworkArrays:
    """A network's golden list of parameters, with the statistics of its norms."""
    shapes: dict[str, tuple[int, ...]] = {}
    for line in (GOLDEN / f"parameters_{model}.txt").read_text().splitlines()[1:-1]:
        name, shape, _ = line.split()
        sizes = tuple(map(int, shape.split("x")))
        shapes[f"params/{name}"] = sizes
        layer, _, leaf = name.rpartition("/")
        if leaf == "scale" and "batch_norm" in layer:
            shapes[f"batch_stats/{layer}/mean"] = shapes[f"batch_stats/{layer}/var"] = sizes
    return NetworkArrays(conf_model(model).name, shapes, {})


def targets(matching: Matching) -> dict[str, list[str]]:
    """The status of each entry."""
    found: dict[str, list[str]] = {}
    for row in matching.rows:
        assert row.status in ("matched", "skipped"), row
        found.setdefault(row.source, []).append(row.target)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("collection", "golden"), NETWORKS)
def test_all_golden_names_are_recognised_in_any_order(
    collection: str, golden: dict[str, Any]
) -> None:
    needed = network(golden["model"])
    theirs: Arrays = {
        f"{layer}.{leaf}" if layer else leaf: np.broadcast_to(np.float32(0), shape)
        for layer, leaves in golden["layers"].items()
        for leaf, shape in leaves.items()
    }
    file = "w.ckpt" if collection == "mindcv" else "w.pth"
    found = targets(match_weights(file, theirs, needed))
    reached = [target for names in found.values() for target in names if target]
    assert sorted(reached) == sorted(needed.shapes)
    ordered = {name: theirs[name] for name in sorted(theirs, key=make_natural_key)}
    assert targets(match_weights("w.safetensors", ordered, needed)) == found


def test_rule_computes_and_annotates_the_place() -> None:
    rules = (
        (r"out(\d)", r"block<\1-1>/{kind}_0^T"),
        (r"types", "+table"),
        (r"gone", ""),
    )
    assert place_layer(rules, "out3", "dense") == Place("block2/dense_0", transposed=True)
    assert place_layer(rules, "out3", "") is None
    assert place_layer(rules, "types", "") == Place("table", added=True)
    assert place_layer(rules, "gone", "conv") == Place("")
    assert place_layer(rules, "other", "conv") is None
