"""Documents that share a window: each has the logits that it has alone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.data.text.packing import pack_documents
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import Branches, Dense, Residual
from pipeline.models.layers.tokens import (
    Conv1d,
    Embedding,
    Lstm,
    PositionEmbedding,
    Rotary,
    SelfAttention,
)
from pipeline.models.modules.network import separate_masks
from pipeline.models.modules.tokens import number_tokens
from tests.models.build import initialise, network

LENGTH, VOCABULARY = 8, 11
SIZES = (6, 3, 3, 9, 2, 4)
"""Tokens of documents, of which the longest just fits."""


def attention(**settings: object) -> LayerSpec:
    return Residual(body=(SelfAttention(heads=2, causal=True, **settings),))  # type: ignore[arg-type]


NETWORKS = {
    "positions": (PositionEmbedding(shorter=True), attention()),
    "rotary": (attention(rotary=Rotary(), window=3), attention(alibi=True)),
}


@pytest.mark.medium
@pytest.mark.parametrize("kind", NETWORKS)
def test_document_in_a_shared_window_has_the_losses_that_it_has_alone(kind: str) -> None:
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, VOCABULARY, size).astype(np.int32) for size in SIZES]
    packed = pack_documents(documents, LENGTH, -1).columns
    assert len(packed["tokens"]) == 3 < len(SIZES)
    embedding = Embedding(vocabulary=VOCABULARY, features=8)
    module = network(embedding, *NETWORKS[kind], Dense(features=VOCABULARY))
    variables = initialise(module, packed["tokens"])
    inputs = {"tokens": packed["tokens"], "mask": packed["document"]}
    logits = np.asarray(module.apply(variables, inputs, train=False))
    assert np.isfinite(logits).all()
    found = {
        tuple(packed["label"][place][packed["document"][place] == number].tolist()): logits[place][
            packed["document"][place] == number
        ]
        for place in range(len(logits))
        for number in range(1, packed["document"][place].max() + 1)
    }
    assert len(found) == len(SIZES)
    for document in documents:
        alone = module.apply(variables, document[None, :-1], train=False)[0]
        key = tuple(document[1:].tolist())
        np.testing.assert_allclose(found[key], alone, atol=1e-5)


def test_positions_begin_anew_with_each_document() -> None:
    documents = jnp.array([[1, 1, 1, 2, 3, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    expected = [[0, 1, 2, 0, 0, 1, 0, 1], list(range(8))]
    np.testing.assert_array_equal(number_tokens(documents), expected)


@pytest.mark.parametrize(
    ("layer", "place"),
    [
        (Conv1d(features=4, kernel=2, padding="causal"), "conv1d_0: layer conv1d"),
        (Residual(body=(Lstm(features=4),)), "residual_0: layer lstm"),
    ],
)
def test_layers_that_mix_documents_are_refused(layer: LayerSpec, place: str) -> None:
    module = network(Embedding(vocabulary=4, features=4), layer)
    inputs = {"tokens": np.zeros((1, 5), np.int32), "mask": np.ones((1, 5), np.int32)}
    message = f"^{place} mixes the tokens of documents .* as dataset=documents packs them; remove"
    with pytest.raises(ValueError, match=message):
        initialise(module, inputs)


def test_mask_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="gets mask alone; must get an array besides masks"):
        separate_masks((Dense(features=2),), {"mask": np.ones((1, 2), bool)})


def test_input_named_mask_that_a_branch_reads_is_no_mask_of_tokens() -> None:
    layer = Branches(branches=((Dense(features=2),),), inputs=("image", "mask"))
    inputs = {"image": np.ones((1, 2)), "mask": np.zeros((1, 2))}
    read, token_mask, masks = separate_masks((layer,), inputs)
    assert list(read) == ["image", "mask"]
    assert token_mask is None
    assert masks == {}
