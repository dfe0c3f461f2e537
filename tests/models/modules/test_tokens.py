from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError
from flax.traverse_util import unflatten_dict
from pydantic import ValidationError

from pipeline.models.layers import standard
from pipeline.models.layers.precision import LEVELS, TypeRule
from pipeline.models.layers.standard import Dense, Flatten, LayerSpec, Residual
from pipeline.models.layers.tokens import (
    AvgPool1d,
    ClassToken,
    Embedding,
    FirstToken,
    MaxPool1d,
    MeanToken,
    PositionEmbedding,
    Rotary,
    SelfAttention,
    TiedEmbedding,
    Tokens,
)
from tests.golden.make_attention_masks import LENGTHS
from tests.golden.network_cases import CASES, Case, samples
from tests.models.build import (
    QUICK,
    Variables,
    conf_model,
    initialise,
    network,
    parameters,
    random,
    shapes,
)
from tests.models.conftest import GOLDEN
from tests.models.test_networks_parity import filled, kept

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


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "windows"),
    [
        (2, None, "valid", [(0, 2), (2, 4), (4, 6)]),
        (3, 2, 1, [(0, 2), (1, 4), (3, 6)]),
        (4, 3, "same", [(0, 4), (3, 6)]),
    ],
)
def test_pools_reduce_windows_of_tokens(
    kernel: int, stride: int | None, padding: Any, windows: list[tuple[int, int]]
) -> None:
    for layer, reduce in ((MaxPool1d, np.max), (AvgPool1d, np.mean)):
        pool = layer(kernel=kernel, stride=stride, padding=padding)
        expected = [reduce(TOKENS[:, first:end], axis=1) for first, end in windows]
        found = out(pool, x=TOKENS)[0].reshape(2, -1, 4)
        np.testing.assert_allclose(found, np.stack(expected, axis=1), rtol=1e-6)


def test_pool_padding_leaves_a_token_in_each_window() -> None:
    with pytest.raises(ValidationError, match="padding 2 must be less than kernel 2, or a window"):
        MaxPool1d(kernel=2, padding=2)


@pytest.mark.medium
def test_mean_token_is_the_mean_of_all_tokens() -> None:
    np.testing.assert_allclose(out(MeanToken(), x=TOKENS)[0], TOKENS.mean(axis=1), rtol=1e-5)


@pytest.mark.slow
def test_class_token_is_first() -> None:
    y, p = out(Tokens(), ClassToken())
    tokens = y.reshape(2, 7, 4)
    np.testing.assert_array_equal(tokens[:, 1:], TOKENS)
    np.testing.assert_array_equal(tokens[:, 0], np.repeat(p["class_token_0/token"][0], 2, 0))


@pytest.mark.slow
def test_every_position_adds_its_vector() -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2])
def test_self_attention_matches_its_definition(heads: int) -> None:
    y, p = out(Tokens(), SelfAttention(heads=heads))
    for sample, result in zip(TOKENS, y.reshape(2, 6, 4), strict=True):
        np.testing.assert_allclose(result, attend(p, sample, heads), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_attention_dropout_applies_only_in_training() -> None:
    module = network(Tokens(), SelfAttention(heads=2, dropout=0.5), Flatten())
    variables = initialise(module, IMAGES)
    outputs = [
        module.apply(variables, IMAGES, train=train, rngs={"dropout": jax.random.key(seed)})
        for train, seed in ((True, 1), (True, 2), (False, 1), (False, 2))
    ]
    assert (outputs[0] != outputs[1]).any()
    np.testing.assert_array_equal(outputs[2], outputs[3])


NUMBERS = np.array([[1, 999], [998, 0]], np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding_look_up_is_exact_for_any_dtype(dtype: str) -> None:
    module = network(Embedding(vocabulary=1000, features=3), Flatten(), dtype=dtype)
    variables = initialise(module, NUMBERS)
    table = np.asarray(variables["params"]["embedding_0"]["table"])
    y = module.apply(variables, NUMBERS, train=False)
    expected = np.stack([table[[1, 999]], table[[998, 0]]]).reshape(2, -1)
    np.testing.assert_allclose(y, expected, rtol=1e-2 if dtype == "bfloat16" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("rules", [(), (LEVELS["O2"].rules)])
def test_look_up_inside_of_another_layer_is_exact(rules: tuple[TypeRule, ...]) -> None:
    """Token numbers above 256 don't fit into bfloat16."""
    lookup = Embedding(vocabulary=1000, features=3)
    outer = standard.Sequence(body=(lookup, Residual(body=())))
    module = network(outer, Flatten(), dtype="bfloat16").clone(rules=rules)
    variables = initialise(module, NUMBERS)
    table = np.asarray(variables["params"]["sequence_0"]["embedding_0"]["table"])
    y = module.apply(variables, NUMBERS, train=False)
    expected = 2 * np.stack([table[[1, 999]], table[[998, 0]]]).reshape(2, -1)
    np.testing.assert_allclose(y, expected, rtol=1e-2)


@pytest.mark.slow
def test_number_outside_the_vocabulary_is_nan() -> None:
    y, _ = out(Embedding(vocabulary=999, features=3), x=NUMBERS)
    np.testing.assert_array_equal(np.isnan(y), [[False] * 3 + [True] * 3, [False] * 6])


@pytest.mark.slow
def test_dense_is_applied_to_each_token() -> None:
    y, p = out(Tokens(), Dense(features=5, bias=False))
    np.testing.assert_allclose(
        y, (TOKENS @ p["dense_0/kernel"]).reshape(2, -1), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            (SelfAttention(heads=2),),
            r"self_attention_0: shape .*; must be \(batch, tokens, features\): put",
        ),
        ((FirstToken(),), "first_token_0: shape .*: put tokens or embedding before it"),
        (
            (Tokens(), Tokens()),
            r"tokens_1: shape .*; must be images \(batch, height, width, channels\)",
        ),
        (
            (Tokens(), SelfAttention(heads=3)),
            r"self_attention_0: heads 3 does not divide the 4 features of shape \(1, 6, 4\)",
        ),
        (
            (Tokens(), SelfAttention(heads=4, rotary=Rotary())),
            "self_attention_0: a head has 1 of the 4 features; rotary .* must be even",
        ),
    ],
)
def test_incompatible_layers_are_reported(layers: tuple[LayerSpec, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shapes(network(*layers, Flatten()), (3, 2, 4))


@pytest.mark.slow
def test_causal_attention_does_not_read_later_tokens() -> None:
    y, p = out(Tokens(), SelfAttention(heads=2, causal=True))
    for sample, result in zip(TOKENS, y.reshape(2, 6, 4), strict=True):
        for token in range(6):
            expected = attend(p, sample[: token + 1], heads=2)[token]
            np.testing.assert_allclose(result[token], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"key_heads": 3}, "heads 4 is not a multiple of key_heads 3"),
        ({"rotary": {}, "alibi": True}, "rotary and alibi both encode positions; must be one"),
        ({"window": 2, "causal": False}, "window 2 is for tokens before .*; causal must be true"),
        ({"alibi": True, "causal": False}, "alibi is for tokens before .*; causal must be true"),
        ({"rotary": {"base": 1.0}}, "greater than 1"),
        ({"rotary": {"factor": 0.5}}, "greater than or equal to 1"),
    ],
)
def test_contradictory_settings_of_attention_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        SelfAttention.model_validate({"heads": 4, "causal": True, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 3])
def test_window_is_the_token_and_those_just_before_it(window: int) -> None:
    y, p = out(Tokens(), SelfAttention(heads=2, causal=True, window=window))
    for sample, result in zip(TOKENS, y.reshape(2, 6, 4), strict=True):
        for token in range(6):
            read = sample[max(0, token + 1 - window) : token + 1]
            np.testing.assert_allclose(
                result[token], attend(p, read, heads=2)[-1], rtol=1e-4, atol=1e-5
            )


@pytest.mark.slow
def test_rotary_attention_depends_on_distances_alone() -> None:
    """Tokens that follow equal tokens of a window read the same, wherever they are."""
    layer = SelfAttention(heads=1, causal=True, window=3, rotary=Rotary(base=10.0))
    x = np.concatenate([TOKENS[:1, :3], TOKENS[:1, :3]], axis=1)
    y, p = out(layer, x=x)
    tokens = y.reshape(6, 4)
    np.testing.assert_allclose(tokens[5], tokens[2], atol=1e-5)
    module = network(SelfAttention(heads=1, causal=True, window=3), Flatten())
    parameters = unflatten_dict(p, sep="/")
    plain = np.asarray(module.apply({"params": parameters}, x, train=False)).reshape(6, 4)
    np.testing.assert_allclose(plain[0], tokens[0], atol=1e-5)
    assert np.abs(plain[1:] - tokens[1:]).max(axis=1).min() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("alibi", [False, True])
def test_tokens_read_one_by_one_have_the_results_of_all_at_once(dtype: str, alibi: bool) -> None:
    positions = {"alibi": True} if alibi else {"rotary": Rotary(factor=2.0)}
    attention = SelfAttention(
        heads=4, key_heads=2, causal=True, window=3, query_key_norm=True, **positions
    )
    module = network(Embedding(vocabulary=9, features=16), attention, dtype=dtype)
    numbers = np.array([[1, 5, 3, 3, 8, 0, 2], [4, 4, 7, 1, 0, 6, 5]], np.int32)
    variables = initialise(module, numbers)
    expected = np.asarray(module.apply(variables, numbers, train=False))
    cached = module.clone(cached_tokens=7)
    cache: Any = {}
    for position in range(7):
        token = numbers[:, position : position + 1]
        place = np.int32(position)
        y, cache = cached.apply(
            {**variables, **cache}, token, train=False, position=place, mutable=["cache"]
        )
        tolerance = 1e-6 if dtype == "float32" else 1e-3
        np.testing.assert_allclose(y[:, 0], expected[:, position], atol=tolerance, rtol=1e-2)
    shapes_of_cache = {leaf.shape for leaf in jax.tree.leaves(cache)}
    assert shapes_of_cache == {(2, 7, 2, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_embedding_scores_with_the_embedding_table(dtype: str) -> None:
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


def test_tied_embedding_refuses_a_body_of_other_features() -> None:
    layer = TiedEmbedding(vocabulary=9, features=3, body=(Dense(features=4),))
    message = (
        r"tied_embedding_0: the body returns shape \(1, 4, 4\); .* must be \(batch, tokens, 3\)"
    )
    with pytest.raises(ValueError, match=message):
        shapes(network(layer), (2, 2, 1))


def test_classes_placeholder_must_be_replaced_in_python() -> None:
    with pytest.raises(ValueError, match=r"embedding_0: features \$classes is a number"):
        shapes(network(Embedding(vocabulary="$classes", features=3)), (2, 2, 1))


def masked(numbers: np.ndarray, lengths: Sequence[int]) -> dict[str, np.ndarray]:
    """Tokens (batch, tokens) with the mask that tells those behind a length."""
    mask = np.arange(numbers.shape[1]) < np.array(lengths)[:, None]
    return {"tokens": numbers.reshape(mask.shape).astype(np.int32), "mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if "transformers" in case.peer])
def test_masked_padding_has_parity_with_transformers(case: Case) -> None:
    """BERT's logits of a text, GPT-2's of every token that is none of padding."""
    expected = np.array(json.loads((GOLDEN / "attention_masks.json").read_text())[case.model])
    module = conf_model(case.model, **case.changes).build(case.classes, "float32")
    variables = filled(case, kept(case))
    compute = jax.jit(lambda x: module.apply(variables, x, train=False), compiler_options=QUICK)
    logits = np.asarray(compute(masked(samples(case), LENGTHS)))
    assert logits.shape == expected.shape
    for sample, length in enumerate(LENGTHS):
        real = slice(length) if case.model == "gpt2" else slice(None)
        np.testing.assert_allclose(logits[sample][real], expected[sample][real], atol=1e-4)


SMALL = {"features": 8, "hidden": 12, "heads": 2, "blocks": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more"), [("bert_base", {"vocabulary": 30}), ("gpt2", {"dropout": 0.0})]
)
def test_padded_text_has_the_results_of_the_unpadded_text(model: str, more: dict[str, Any]) -> None:
    """Whatever padding holds, and though there are fewer tokens than places; gradients too."""
    module = conf_model(model, **SMALL, **more).build(30, "float32")
    tokens = np.random.default_rng(0).integers(0, 30, (3, 7), np.int32)
    variables = initialise(module, masked(tokens, [7, 7, 7]))

    @partial(jax.jit, compiler_options=QUICK)
    def compute(x: np.ndarray) -> tuple[jax.Array, Variables]:
        """Logits of texts of 4 tokens, and a gradient."""

        def loss(variables: Variables) -> tuple[jax.Array, jax.Array]:
            logits = module.apply(variables, x, train=False)
            logits = logits if logits.ndim == 2 else logits[:, :4]
            return (logits**2).sum(), logits

        gradient, logits = jax.grad(loss, has_aux=True)(variables)
        return logits, gradient

    other = np.concatenate([tokens[:, :4], tokens[:, :3]], axis=1)
    alone, padded, elsewise = (compute(masked(x, [4] * 3)) for x in (tokens[:, :4], tokens, other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), alone, padded)
    np.testing.assert_array_equal(padded[0], elsewise[0])


@pytest.mark.slow
def test_blank_sample_has_finite_results() -> None:
    """It is what a network is initialised with."""
    module = conf_model("bert_base", **SMALL, vocabulary=30).build(3, "float32")
    blank = masked(np.zeros((2, 5), np.int32), [0, 0])
    variables = initialise(module, blank)
    value, gradient = jax.jit(
        jax.value_and_grad(lambda v: module.apply(v, blank, train=False).sum()),
        compiler_options=QUICK,
    )(variables)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((value, gradient)))


def test_mask_with_a_different_number_of_tokens_is_refused() -> None:
    layers = (Embedding(vocabulary=9, features=4), ClassToken(), SelfAttention(heads=2), Flatten())
    module = network(*layers)
    expected = (
        r"self_attention_0: the mask of padding has shape \(1, 5\), and the tokens are \(1, 6\)"
    )
    with pytest.raises(ValueError, match=expected):
        initialise(module, masked(np.zeros((1, 5), np.int32), [5]))


@pytest.mark.medium
def test_position_embedding_of_images_fits_one_size_only() -> None:
    """Patches of a smaller image lie elsewhere: its table fits one size alone."""
    module = network(Tokens(), PositionEmbedding(), Flatten())
    variables = initialise(module, IMAGES)
    with pytest.raises(ScopeParamShapeError, match=r"position_embedding_0"):
        module.apply(variables, IMAGES[:, :2], train=False)
