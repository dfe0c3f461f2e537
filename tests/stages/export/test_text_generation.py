"""Sampling with a cache against the full forward pass, and what the seed decides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.stages.export.prediction import make_predict
from pipeline.stages.export.text_generation import (
    Decoder,
    Sampling,
    make_cached_decoder,
    make_decoder,
    make_uncached_decoder,
    sample_tokens,
)
from pipeline.stages.record.trained_run import TrainedRun, read_trained_run
from tests.stages.export.text_runs import DECODER, GPT, RHYME, gpt
from tests.whole_run import run

PROMPT = "the dog"
LENGTH = 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> TrainedRun:
    folder = tmp_path_factory.mktemp("gpt")
    run(gpt(cache, folder / "a.txt"), folder / "run")
    return read_trained_run(folder / "run")


@pytest.fixture(scope="module")
def cached(trained: TrainedRun) -> Decoder:
    decoder = make_cached_decoder(trained)
    assert decoder is not None
    return decoder


def sampled(
    run_: TrainedRun, decoder: Decoder, prompt: str, count: int, sampling: Sampling
) -> list[int]:
    assert run_.samples.text is not None
    tokens = run_.samples.text.encode_prompt(prompt)
    parts = list(sample_tokens(decoder, run_.arrays, tokens, count, sampling))
    return [int(token) for part in parts for token in part]


@pytest.fixture(scope="module")
def predict(trained: TrainedRun) -> Callable[..., jax.Array]:
    return jax.jit(make_predict(trained))


@pytest.fixture(scope="module")
def uncached(trained: TrainedRun) -> Decoder:
    return make_uncached_decoder(make_predict(trained), LENGTH, trained.samples.single.dtype)


def by_full_passes(
    run_: TrainedRun, predict: Callable[..., jax.Array], prompt: str, count: int
) -> list[int]:
    """The most probable tokens by `predict` alone, each from a context that is read as a whole."""
    assert run_.samples.text is not None
    known = run_.samples.text.encode_prompt(prompt).tolist()
    start = max(0, len(known) - LENGTH)
    prompt_length = len(known)
    while len(known) < prompt_length + count:
        if len(known) - start > LENGTH:
            start = len(known) - 1 - LENGTH // 2
        context = known[start:]
        window = np.zeros((1, LENGTH), np.int32)
        window[0, : len(context)] = context
        logits = np.asarray(predict(run_.arrays, window))
        known.append(int(logits[0, len(context) - 1].argmax()))
    return known[prompt_length:]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["t", PROMPT, "the dog ran to the hat. the cat"])
def test_greedy_tokens_equal_full_passes(
    prompt: str,
    trained: TrainedRun,
    predict: Callable[..., jax.Array],
    cached: Decoder,
    uncached: Decoder,
) -> None:
    """Past the end of the context too, and from a prompt that is longer than it."""
    greedy = Sampling(temperature=0.0)
    found = sampled(trained, cached, prompt, 70, greedy)
    assert found == by_full_passes(trained, predict, prompt, 70)
    assert sampled(trained, uncached, prompt, 70, greedy) == found


@pytest.mark.slow
def test_cached_logits_equal_uncached_logits(
    trained: TrainedRun, predict: Callable[..., jax.Array], cached: Decoder
) -> None:
    tokens = np.arange(LENGTH, dtype=np.uint8) % 7
    expected = np.asarray(predict(trained.arrays, tokens.reshape(1, -1)))[0]
    cache = jax.tree.map(lambda kept: jnp.full(kept.shape, 9e9, kept.dtype), cached.shapes)
    step = jax.jit(cached.step)
    for position, token in enumerate(tokens):
        numbers = jnp.int32(token), jnp.int32(position)
        logits, cache = step(trained.arrays, cache, *numbers)
        np.testing.assert_allclose(logits, expected[position], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_seed_decides_the_tokens_for_any_number(trained: TrainedRun, cached: Decoder) -> None:
    hot = Sampling(temperature=2.0, seed=3)
    found = sampled(trained, cached, PROMPT, 80, hot)
    assert sampled(trained, cached, PROMPT, 30, hot) == found[:30]
    assert sampled(trained, cached, PROMPT, 80, Sampling(2.0, seed=4)) != found


@pytest.mark.slow
def test_top_k_1_is_greedy(trained: TrainedRun, cached: Decoder) -> None:
    one, greedy = Sampling(5.0, top_k=1), Sampling(0.0)
    expected = sampled(trained, cached, PROMPT, 20, greedy)
    assert sampled(trained, cached, PROMPT, 20, one) == expected
    every = sampled(trained, cached, PROMPT, 20, Sampling(1.0, top_k=10_000, seed=1))
    assert every == sampled(trained, cached, PROMPT, 20, Sampling(1.0, seed=1))


@pytest.mark.medium
def test_samples_follow_the_softmax_of_the_top_k() -> None:
    logits = jnp.array([0.0, 1.0, 2.0, -1.0])
    flat = Decoder(lambda weights, cache, token, position: (logits, cache), (), 8)
    parts = sample_tokens(flat, {}, np.zeros(1, np.int32), 4000, Sampling(1.5, top_k=3))
    shares = np.bincount(np.concatenate(list(parts)), minlength=4) / 4000
    powers = np.exp(np.array([0.0, 1.0, 2.0]) / 1.5)
    np.testing.assert_allclose(shares, [*(powers / powers.sum()), 0], atol=0.03)


@pytest.mark.slow
def test_non_causal_layers_have_no_cache(cache: Path, tmp_path: Path) -> None:
    layers = (
        "[{name: embedding, vocabulary: $classes, features: 8},"
        "{name: self_attention, heads: 1, causal: false}, {name: dense, features: $classes}]"
    )
    keys = ["model=layers", "model.blocks={}", f"model.layers={layers}", "train.steps=2"]
    own = [key for key in GPT if not key.startswith(("model.", "train.steps"))]
    (tmp_path / "a.txt").write_text(RHYME)
    data = [f"dataset.root={tmp_path / 'a.txt'}", f"cache.root={cache}"]
    run(load_recipe("gpt_text", [*keys, *own, *data]), tmp_path / "run")
    trained = read_trained_run(tmp_path / "run")
    assert make_cached_decoder(trained) is None
    assert len(sampled(trained, make_decoder(trained), PROMPT, 3, Sampling())) == 3


@pytest.mark.slow
def test_decoder_of_layers_continues_full_contexts_with_a_cache(
    cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text(RHYME)
    keys = [DECODER, *(key for key in GPT if not key.startswith("model."))]
    data = [f"dataset.root={tmp_path / 'a.txt'}", f"cache.root={cache}"]
    run(load_recipe("decoder_text", [*keys, *data]), tmp_path / "run")
    trained = read_trained_run(tmp_path / "run")
    decoder = make_cached_decoder(trained)
    assert decoder is not None
    found = sampled(trained, decoder, PROMPT, 3 * LENGTH, Sampling(0.0))
    assert found == by_full_passes(trained, jax.jit(make_predict(trained)), PROMPT, 3 * LENGTH)
    assert len(set(found)) > 3
