from __future__ import annotations

import jax
import numpy as np
import pytest

from pipeline.models.layers import Dense, Flatten, LayerSpec
from pipeline.models.tokens import (
    ClassToken,
    Embedding,
    FirstToken,
    PositionEmbedding,
    SelfAttention,
    TiedEmbedding,
    Tokens,
)
from tests.models.build import Variables, initialise, network, parameters, random, shapes

IMAGES = random(2, 3, 2, 4)
TOKENS = IMAGES.reshape(2, 6, 4)


def out(*layers: LayerSpec, x: np.ndarray = IMAGES) -> tuple[np.ndarray, Variables]:
    module = network(*layers, Flatten())
    variables = initialise(module, x)
    y = np.asarray(module.apply(variables, x, train=False))
    return y, parameters(variables) if "params" in variables else {}


def test_tokens_are_positions_row_by_row() -> None:
    np.testing.assert_array_equal(out(Tokens(), FirstToken())[0], IMAGES[:, 0, 0])
    np.testing.assert_array_equal(out(Tokens())[0], IMAGES.reshape(2, -1))


def test_the_class_token_comes_first() -> None:
    y, p = out(Tokens(), ClassToken())
    tokens = y.reshape(2, 7, 4)
    np.testing.assert_array_equal(tokens[:, 1:], TOKENS)
    np.testing.assert_array_equal(tokens[:, 0], np.repeat(p["class_token_0/token"][0], 2, 0))


def test_every_place_adds_a_vector_of_its_own() -> None:
    y, p = out(Tokens(), PositionEmbedding())
    table = p["position_embedding_0/table"]
    assert table.shape == (6, 4)
    assert 0 < np.abs(table).max() <= 0.04
    np.testing.assert_allclose(y.reshape(2, 6, 4), TOKENS + table, rtol=1e-5)


def attend(p: Variables, x: np.ndarray, heads: int) -> np.ndarray:
    """Self-attention of one sample, head by head and token by token."""

    def dense(name: str, rows: np.ndarray) -> np.ndarray:
        path = f"self_attention_0/{name}"
        return rows @ np.asarray(p[f"{path}/kernel"]) + np.asarray(p[f"{path}/bias"])

    query, key, value = (dense(name, x) for name in ("query", "key", "value"))
    size = x.shape[1] // heads
    read = np.zeros_like(x)
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        for token in range(len(x)):
            scores = key[:, part] @ query[token, part] / np.sqrt(size)
            weights = np.exp(scores) / np.exp(scores).sum()
            read[token, part] = weights @ value[:, part]
    return dense("out", read)


@pytest.mark.parametrize("heads", [1, 2])
def test_self_attention_matches_its_definition(heads: int) -> None:
    y, p = out(Tokens(), SelfAttention(heads=heads))
    for sample, result in zip(TOKENS, y.reshape(2, 6, 4), strict=True):
        np.testing.assert_allclose(result, attend(p, sample, heads), rtol=1e-4, atol=1e-5)


def test_attention_drops_weights_in_training_alone() -> None:
    module = network(Tokens(), SelfAttention(heads=2, dropout=0.5), Flatten())
    variables = initialise(module, IMAGES)
    outputs = [
        module.apply(variables, IMAGES, train=train, rngs={"dropout": jax.random.key(seed)})
        for train, seed in ((True, 1), (True, 2), (False, 1), (False, 2))
    ]
    assert (outputs[0] != outputs[1]).any()
    np.testing.assert_array_equal(outputs[2], outputs[3])


NUMBERS = np.array([[1, 999], [998, 0]], np.float32).reshape(2, 2, 1, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding_looks_whole_numbers_up_whatever_the_dtype(dtype: str) -> None:
    module = network(Embedding(vocabulary=1000, features=3), Flatten(), dtype=dtype)
    variables = initialise(module, NUMBERS)
    table = np.asarray(variables["params"]["embedding_0"]["table"])
    y = module.apply(variables, NUMBERS, train=False)
    expected = np.stack([table[[1, 999]], table[[998, 0]]]).reshape(2, -1)
    np.testing.assert_allclose(y, expected, rtol=1e-2 if dtype == "bfloat16" else 0)


def test_a_number_outside_the_vocabulary_gives_nan() -> None:
    y, _ = out(Embedding(vocabulary=999, features=3), x=NUMBERS)
    np.testing.assert_array_equal(np.isnan(y), [[False] * 3 + [True] * 3, [False] * 6])


def test_dense_reads_each_token() -> None:
    y, p = out(Tokens(), Dense(features=5, bias=False))
    np.testing.assert_allclose(
        y, (TOKENS @ p["dense_0/kernel"]).reshape(2, -1), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((SelfAttention(heads=2),), r"self_attention_0: reads \(batch, tokens, features\), and"),
        ((FirstToken(),), "first_token_0: reads .*; put tokens or embedding before it"),
        ((Tokens(), Tokens()), r"tokens_1: reads images \(batch, height, width, channels\)"),
        (
            (Tokens(), SelfAttention(heads=3)),
            r"self_attention_0: heads 3 does not divide the 4 features of shape \(1, 6, 4\)",
        ),
    ],
)
def test_layers_that_do_not_fit_are_named(layers: tuple[LayerSpec, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shapes(network(*layers, Flatten()), (3, 2, 4))


def test_a_causal_token_reads_those_up_to_it_alone() -> None:
    y, p = out(Tokens(), SelfAttention(heads=2, causal=True))
    for sample, result in zip(TOKENS, y.reshape(2, 6, 4), strict=True):
        for token in range(6):
            expected = attend(p, sample[: token + 1], heads=2)[token]
            np.testing.assert_allclose(result[token], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_tokens_are_scored_by_the_rows_that_embed_them(dtype: str) -> None:
    layer = TiedEmbedding(scope="tokens", vocabulary=1000, features=3, body=(Dense(features=3),))
    module = network(layer, dtype=dtype)
    variables = initialise(module, NUMBERS)
    p = parameters(variables)
    logits = module.apply(variables, NUMBERS, train=False)
    table = np.asarray(p["tokens/table"])
    rows = table[NUMBERS.reshape(2, 2).astype(int)]
    hidden = rows @ p["tokens/dense_0/kernel"] + p["tokens/dense_0/bias"]
    assert (logits.shape, logits.dtype) == ((2, 2, 1000), np.float32)
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(logits, hidden @ table.T, rtol=0, atol=tolerance)


def test_a_body_of_other_features_can_not_be_scored() -> None:
    layer = TiedEmbedding(vocabulary=9, features=3, body=(Dense(features=4),))
    message = r"tied_embedding_0: the body gives shape \(1, 4, 4\); .* must be \(batch, tokens, 3\)"
    with pytest.raises(ValueError, match=message):
        shapes(network(layer), (2, 2, 1))


def test_a_vocabulary_of_classes_is_a_number_in_python() -> None:
    with pytest.raises(ValueError, match=r"embedding_0: features \$classes stands for a number"):
        shapes(network(Embedding(vocabulary="$classes", features=3)), (2, 2, 1))
