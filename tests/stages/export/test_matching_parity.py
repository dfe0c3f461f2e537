"""Weights of other frameworks give the same outputs here; the golden logits are theirs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from pipeline.config.renames import RenameSpec
from pipeline.data.columns import ColumnSpec
from pipeline.data.inputs import NetworkInput, NetworkInputs
from pipeline.models.layers.model_spec import ModelSpec
from pipeline.models.weights.files.named_arrays import Arrays
from pipeline.models.weights.files.weight_files import read_weights
from pipeline.stages.export.matching import Matching, match_weights
from pipeline.stages.export.network import trace_model_arrays
from pipeline.stages.fine_tuning import replace_leaves
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
    file = {"torch": "golden.pth", "mindspore": "golden.ckpt"}[framework]
    matching = match(file, model, state, images)
    assert matching.rules == framework
    return apply(model, matching, images)


def match(
    file: str,
    model: ModelSpec,
    state: Arrays,
    images: np.ndarray,
    renames: Sequence[RenameSpec] = (),
) -> Matching:
    image = NetworkInput("image", "image", ColumnSpec(images.shape[1:], "float32"))
    network = trace_model_arrays(model, 10, NetworkInputs((image,)))
    matching = match_weights(file, state, network, renames)
    matching.require(partial=False)
    return matching


def apply(model: ModelSpec, matching: Matching, images: np.ndarray) -> np.ndarray:
    spec = ColumnSpec(images.shape[1:], "float32")
    module = model.build(10, "float32")
    # What the file lacked would stay zero.
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes(module, spec.shape))
    variables = replace_leaves(zeros, matching.arrays)
    program = jax.jit(lambda v, x: module.apply(v, x, train=False), compiler_options=QUICK)
    return np.asarray(program(variables, images))


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "mindspore"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [("resnet18", {"widths": [16, 32, 64, 128], "stem": "cifar"}), ("lenet5", {})],
)
def test_logits_match_golden_logits(framework: str, name: str, changes: dict[str, Any]) -> None:
    golden = json.loads((GOLDEN / f"{framework}_{name}.json").read_text())
    images = np.random.default_rng(golden["seed"] + 1).random((3, *golden["image"]), np.float32)
    found = logits(conf_model(name, **changes), framework, state_dict(golden), images)
    expected = np.array(golden["logits"])
    assert np.abs(expected).max() > 0.1
    assert np.ptp(expected, axis=0).max() > 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


LAYERS = [
    {"name": "conv", "features": 6, "kernel": 3, "bias": True},
    {"name": "batch_norm", "epsilon": 1e-3},
    "relu",
    {"name": "conv", "features": 6, "kernel": 3, "groups": 6, "bias": True},
    {"name": "conv_transpose", "features": 4, "kernel": 2, "stride": 2, "bias": True},
    "flatten",
    {"name": "dense", "features": 5},
    "relu",
    *({"name": "dense", "features": features} for features in (5, 5, "$classes")),
]
"""The network of tests/golden/make_weights_tensorflow.py."""
FILES = ["keras2.h5", "keras2.index", "keras3.index", "keras3.keras", "keras3.weights.h5"]


@pytest.mark.medium
@pytest.mark.parametrize("name", [*FILES, "saved_model.index", "names.index"])
def test_tensorflow_weights_match_tensorflow_logits(name: str) -> None:
    if name.endswith(("h5", "keras")):
        pytest.importorskip("h5py")
    with np.load(GOLDEN / "tensorflow" / "logits.npz") as golden:
        images, expected = golden["images"], golden["logits"]
    model = conf_model("layers", layers=LAYERS, blocks={})
    renames: list[RenameSpec] = []
    if name == "names.index":
        pairs = {r"stem\.(.*)": r"0.\1", r"wise\.(depthwise_)?(.*)": r"1.\2"}
        pairs[r"up\.(.*)"] = r"conv_transpose_0/\1"
        renames = [RenameSpec(match=pattern, to=to) for pattern, to in pairs.items()]
    state = read_weights(GOLDEN / "tensorflow" / name)
    matching = match(name, model, state, images, renames)
    assert matching.rules == "tensorflow"
    np.testing.assert_allclose(apply(model, matching, images), expected, rtol=1e-4, atol=1e-5)
