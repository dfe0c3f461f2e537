"""Networks of two texts in ONNX Runtime, against the same networks in JAX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from pipeline import load_recipe
from pipeline.data.columns import ColumnSpec, Targets
from pipeline.data.text.text_format import NO_TOKEN, TextFormat
from pipeline.data.text.tokenizer import ByteTokenizer
from pipeline.stages.build import build_network
from pipeline.stages.export.prediction import make_predict
from pipeline.stages.record.trained_run import Samples, TrainedRun
from tests.models.build import draw_variables, without_draws

onnx = pytest.importorskip("onnx", reason="not installed: pip install '.[onnx]'")
ort = pytest.importorskip(
    "onnxruntime", reason="not installed: pip install '.[onnx]'", exc_type=ImportError
)

LENGTHS = {"text_a": 5, "text_b": 7}
EMBED = "{name: embedding, vocabulary: 20, features: 4}"
CONV = "{name: conv1d, features: 6, kernel: 3, bias: true}"
LSTM = "{name: lstm, features: 3, bidirectional: true, bias: false}"
STATES = "{name: gru, features: 3}"
GRU = "{name: gru, features: 5, bidirectional: true, output: last}"
DENSE = "{name: dense, features: $classes}"
ONE_TOWER = f"{{name: branches, inputs: [query, passage], branches: [[{EMBED}, mean_token]]}}"
BRANCHES: dict[str, list[str]] = {
    "convolution": [f"[{EMBED}, {CONV}, relu, mean_token]", f"[{EMBED}, layer_norm, mean_token]"],
    "last states": [f"[{EMBED}, {GRU}]", f"[{EMBED}, {{name: lstm, features: 3, output: last}}]"],
    # Values of padding reach the dense layer too.
    "all states": [
        f"[{EMBED}, {LSTM}, flatten]",
        f"[{EMBED}, {STATES}, flatten]",
    ],
}


def make_run(layers: str, *keys: str) -> TrainedRun:
    recipe = load_recipe("pair_docstrings", [f"model.layers={layers}", *keys])
    columns: dict[str, ColumnSpec] = {}
    for name, length in LENGTHS.items():
        columns[name] = ColumnSpec((length,), "int32")
        columns[f"{name}_mask"] = ColumnSpec((length,), "bool")
    network = build_network(recipe, Targets(("a", "b", "c")))
    renamed = recipe.model.inputs or {name: name for name in LENGTHS}
    inputs = {
        name: jax.ShapeDtypeStruct((1, LENGTHS[column]), np.int32)
        for name, column in renamed.items()
    }
    shapes = jax.eval_shape(
        lambda key, inputs: without_draws(network).init(key, inputs, train=False),
        jax.random.key(0),
        inputs,
    )
    arrays = flatten_dict(draw_variables(shapes), sep="/")
    samples = Samples(columns, Targets(("a", "b", "c")))
    return TrainedRun(recipe, {key: np.asarray(array) for key, array in arrays.items()}, 0, samples)


def draw_texts() -> dict[str, np.ndarray]:
    """Texts of every length from 0, whose padding has tokens too."""
    draw = np.random.default_rng(0)
    texts: dict[str, np.ndarray] = {}
    for name, length in LENGTHS.items():
        texts[name] = draw.integers(0, 20, (length + 1, length), np.int32)[:6]
        texts[f"{name}_mask"] = np.tri(length + 1, length, -1, dtype=bool)[:6]
    return texts


def compare(run: TrainedRun, texts: dict[str, np.ndarray]) -> Any:
    """The model, after its outputs are compared with those of JAX."""
    from pipeline.stages.export.onnx.onnx_export import make_onnx_model

    model = make_onnx_model(run)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, texts)
    expected = np.asarray(jax.jit(make_predict(run))(run.arrays, texts))
    assert expected.std() > 0
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
    return model


@pytest.mark.medium
@pytest.mark.parametrize("kind", BRANCHES)
def test_pairs_of_texts_match_onnx(kind: str) -> None:
    branches = ", ".join(BRANCHES[kind])
    first = f"{{name: branches, inputs: [text_a, text_b], branches: [{branches}]}}"
    model = compare(make_run(f"[{first}, {DENSE}]"), draw_texts())
    names = {entry.name: entry.type.tensor_type.elem_type for entry in model.graph.input}
    whole, boolean = onnx.TensorProto.INT32, onnx.TensorProto.BOOL
    assert names == {
        "text_a": whole,
        "text_a_mask": boolean,
        "text_b": whole,
        "text_b_mask": boolean,
    }


@pytest.mark.medium
def test_towers_of_one_branch_have_their_weights_once() -> None:
    keys = ["model.inputs={query: text_a, passage: text_b}"]
    run = make_run(f"[{ONE_TOWER}]", *keys)
    model = compare(run, draw_texts())
    tables = [entry.name for entry in model.graph.initializer if "table" in entry.name]
    assert tables == ["branches_0/branch_0/embedding_0/table"]


@pytest.mark.medium
def test_text_alone_has_its_mask() -> None:
    """A network that names one input reads no other text; its first layer isn't `branches`."""
    run = make_run(f"[{EMBED}, mean_token, {DENSE}]", "model.inputs={words: text_b}")
    compare(run, draw_texts())


@pytest.mark.medium
def test_padding_of_classified_texts_is_read_as_by_the_run() -> None:
    """Without a mask, padding is token 0; in samples it is -1."""
    run = make_run(f"[{EMBED}, mean_token, {DENSE}]", "model.inputs={words: text_b}")
    text = TextFormat(ByteTokenizer(), "class")
    samples = replace(run.samples, columns={"text_b": ColumnSpec((7,), "int32")}, text=text)
    texts = np.where(draw_texts()["text_b_mask"], draw_texts()["text_b"], NO_TOKEN)
    compare(replace(run, samples=samples), {"text_b": texts.astype(np.int32)})
