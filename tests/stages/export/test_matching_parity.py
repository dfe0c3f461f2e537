"""Weights of other frameworks give the same outputs here; the golden logits are theirs."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest

from pipeline.data.columns import ColumnSpec
from pipeline.models.layers.model_spec import ModelSpec
from pipeline.models.weights.files.named_arrays import Arrays
from pipeline.stages.export.matching import match_weights
from pipeline.stages.export.network import trace_model_arrays
from pipeline.stages.warm_start import replace_leaves
from tests.conftest import ROOT
from tests.models.build import QUICK, conf_model, shapes

GOLDEN = ROOT / "tests" / "golden" / "weights"


def state_dict(golden: dict[str, Any]) -> Arrays:
    """The state that tests/golden/make_weights.py drew, entry by entry."""
    rng = np.random.default_rng(golden["seed"])
    state: Arrays = {}
    for name, shape in golden["state"]:
        if name.endswith("num_batches_tracked"):
            state[name] = np.array(0)
            continue
        values = rng.standard_normal(tuple(shape))
        if name.endswith(("running_var", "moving_variance")):
            state[name] = (0.5 + np.abs(values)).astype(np.float32)
        elif len(shape) > 1:
            state[name] = (values / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        else:
            state[name] = (name.endswith(("weight", "gamma")) + 0.2 * values).astype(np.float32)
    return state


def logits(model: ModelSpec, framework: str, state: Arrays, images: np.ndarray) -> np.ndarray:
    spec = ColumnSpec(images.shape[1:], "float32")
    file = {"torch": "golden.pth", "mindspore": "golden.ckpt"}[framework]
    matching = match_weights(file, state, trace_model_arrays(model, 10, spec))
    matching.require(partial=False)
    assert matching.rules == framework
    module = model.build(10, "float32")
    # What the file lacked would stay zero.
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes(module, spec.shape))
    variables = replace_leaves(zeros, matching.arrays)
    apply = jax.jit(lambda v, x: module.apply(v, x, train=False), compiler_options=QUICK)
    return np.asarray(apply(variables, images))


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "mindspore"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [("resnet18", {"widths": [16, 32, 64, 128], "stem": "cifar"}), ("lenet5", {})],
)
def test_golden_logits_are_met(framework: str, name: str, changes: dict[str, Any]) -> None:
    golden = json.loads((GOLDEN / f"{framework}_{name}.json").read_text())
    images = np.random.default_rng(golden["seed"] + 1).random((3, *golden["image"]), np.float32)
    found = logits(conf_model(name, **changes), framework, state_dict(golden), images)
    expected = np.array(golden["logits"])
    assert np.abs(expected).max() > 0.1
    assert np.ptp(expected, axis=0).max() > 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
