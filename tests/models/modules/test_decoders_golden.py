"""Decoders against transformers: logits and gradients of all weights, converted by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import (
    Dense,
    GatedMlp,
    Gelu,
    LayerNorm,
    Residual,
    RmsNorm,
    Sequence,
)
from pipeline.models.layers.tokens import Embedding, Rotary, SelfAttention, TiedEmbedding
from tests.golden.make_decoders import FILE, LENGTHS, VOCABULARY
from tests.models.build import QUICK, network

with np.load(FILE) as stored:
    GOLDEN = dict(stored)


def block(norm: LayerSpec, attention: SelfAttention, *mlp: LayerSpec) -> LayerSpec:
    """A decoder's block that normalises first."""
    attend, compute = Residual(body=(norm, attention)), Residual(body=(norm, *mlp))
    return Sequence(scope="block", body=(attend, compute))


def grouped(rotary: Rotary, heads: int = 4, **settings: Any) -> SelfAttention:
    keys = heads // 2
    return SelfAttention(
        heads=heads, key_heads=keys, causal=True, bias=False, rotary=rotary, **settings
    )


LAYER_NORM = LayerNorm(epsilon=1e-5)
OUTPUT = Dense(scope="output", features=VOCABULARY, bias=False)
NETWORKS: dict[str, tuple[LayerSpec, ...]] = {
    "qwen3": (
        TiedEmbedding(
            scope="tokens",
            vocabulary=VOCABULARY,
            features=16,
            body=(
                block(
                    RmsNorm(),
                    grouped(Rotary(base=1000.0), window=3, query_key_norm=True),
                    GatedMlp(hidden=24),
                ),
                RmsNorm(),
            ),
        ),
    ),
    "llama3": (
        Embedding(scope="tokens", vocabulary=VOCABULARY, features=16),
        block(
            RmsNorm(),
            grouped(Rotary(base=100.0, factor=8.0, trained_tokens=64), heads=2),
            GatedMlp(hidden=24),
        ),
        RmsNorm(),
        OUTPUT,
    ),
    "linear": (
        Embedding(scope="tokens", vocabulary=VOCABULARY, features=16),
        block(RmsNorm(), grouped(Rotary(factor=4.0)), GatedMlp(hidden=24, activation="gelu")),
        RmsNorm(),
        OUTPUT,
    ),
    "bloom": (
        TiedEmbedding(
            scope="tokens",
            vocabulary=VOCABULARY,
            features=12,
            body=(
                LAYER_NORM,
                block(
                    LAYER_NORM,
                    SelfAttention(heads=6, causal=True, alibi=True),
                    Dense(features=48),
                    Gelu(),
                    Dense(features=12),
                ),
                LAYER_NORM,
            ),
        ),
    ),
}
ATTENTION, MLP = "block/residual_0/self_attention_0", "block/residual_1/gated_mlp_0"
PATHS = {
    "model.embed_tokens": "tokens/table",
    "model.norm": "rms_norm_0",
    "lm_head": "output",
    "input_layernorm": "block/residual_0/rms_norm_0",
    "post_attention_layernorm": "block/residual_1/rms_norm_0",
    **{f"self_attn.{name[0]}_proj": f"{ATTENTION}/{name}" for name in ("query", "key", "value")},
    "self_attn.o_proj": f"{ATTENTION}/out",
    "self_attn.q_norm": f"{ATTENTION}/query_norm",
    "self_attn.k_norm": f"{ATTENTION}/key_norm",
    **{f"mlp.{name}_proj": f"{MLP}/{name}" for name in ("gate", "up", "down")},
}
BLOOM_PATHS = {
    "transformer.word_embeddings": "tokens/table",
    "transformer.word_embeddings_layernorm": "layer_norm_0",
    "transformer.ln_f": "layer_norm_1",
    "input_layernorm": "block/residual_0/layer_norm_0",
    "post_attention_layernorm": "block/residual_1/layer_norm_0",
    "self_attention.dense": f"{ATTENTION}/out",
    "mlp.dense_h_to_4h": "block/residual_1/dense_0",
    "mlp.dense_4h_to_h": "block/residual_1/dense_1",
}
"""Layers of transformers, without the path of their block, and the layers here."""


def rename(name: str, case: str) -> str:
    """The path here of a parameter of transformers."""
    layer, _, leaf = name.rpartition(".")
    layer = layer.removeprefix("model.layers.0.").removeprefix("transformer.h.0.")
    path = (BLOOM_PATHS if case == "bloom" else PATHS)[layer]
    if path.endswith("/table"):
        return path
    inside = "tokens/" if case in ("qwen3", "bloom") else ""
    kernel = "scale" if "norm" in path.rpartition("/")[-1] else "kernel"
    return f"{inside}{path}/{kernel if leaf == 'weight' else leaf}"


def convert(arrays: Mapping[str, np.ndarray], case: str) -> dict[str, np.ndarray]:
    """Parameters or gradients by their paths here, in this package's order of axes."""
    found = {}
    for name, array in arrays.items():
        if "query_key_value" in name:
            base = name.replace("query_key_value", "dense")
            parts = array.reshape(6, 3, 2, *array.shape[1:])
            for index, part in enumerate(("query", "key", "value")):
                split = parts[:, index].reshape(12, *array.shape[1:])
                found[rename(base, case).replace("/out/", f"/{part}/")] = split.T
        else:
            path = rename(name, case)
            found[path] = array if path.endswith("table") else array.T
    return found


def read_case(case: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the parameters and their gradients."""
    arrays = {
        key.removeprefix(f"{case}/"): array
        for key, array in GOLDEN.items()
        if key.startswith(f"{case}/") and key not in (f"{case}/x", f"{case}/y")
    }
    gradients = {key[2:]: array for key, array in arrays.items() if key.startswith("d_")}
    return convert({key: arrays[key] for key in gradients}, case), convert(gradients, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", NETWORKS)
def test_decoder_has_parity_with_transformers(case: str) -> None:
    parameters, gradients = read_case(case)
    x, y = GOLDEN[f"{case}/x"], GOLDEN[f"{case}/y"]
    mask = np.arange(x.shape[1]) < np.array(LENGTHS)[:, None]
    module = network(*NETWORKS[case])
    weights = np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape) * mask[..., None]

    def compute(params: Any) -> tuple[Any, Any]:
        inputs = {"tokens": jnp.asarray(x), "mask": jnp.asarray(mask)}
        logits: Any = module.apply({"params": params}, inputs, train=True)
        return (logits * weights).sum(), logits

    params = unflatten_dict(parameters, sep="/")
    expected = jax.eval_shape(
        lambda: module.init(jax.random.key(0), jnp.asarray(x), train=False)["params"]
    )
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda leaf: leaf.shape, expected)
    grad = jax.jit(jax.grad(compute, has_aux=True), compiler_options=QUICK)
    found, logits = grad(params)
    np.testing.assert_allclose(np.asarray(logits)[mask], y[mask], atol=2e-5, rtol=1e-5)
    for path, gradient in flatten_dict(found, sep="/").items():
        np.testing.assert_allclose(gradient, gradients[path], atol=1e-4, rtol=1e-4, err_msg=path)
