"""Layers against PyTorch: results, gradients of inputs and of weights, converted by name."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn

from pipeline.models.layers.model_spec import InitSpec, LayerSpec
from pipeline.models.layers.standard import (
    AdaptiveAvgPool,
    AdaptiveMaxPool,
    Conv3d,
    ConvTranspose,
)
from pipeline.models.layers.tokens import Conv1d, Gru, Lstm
from pipeline.models.modules.apply_layers import LayerContext, apply_layers
from pipeline.stages.export.network import NetworkArrays, convert_layout
from tests.golden.make_layers import FILE, SIZES
from tests.models.build import INIT, draw_variables
from tests.slow_cases import mark_slow_except

with np.load(FILE) as stored:
    GOLDEN = dict(stored)

LAYERS: dict[str, LayerSpec] = {
    **{f"adaptive_avg_pool/{name}": AdaptiveAvgPool(size=size) for name, size in SIZES.items()},
    **{f"adaptive_max_pool/{name}": AdaptiveMaxPool(size=size) for name, size in SIZES.items()},
    "conv1d/plain": Conv1d(features=4, kernel=3, bias=True),
    "conv1d/strided": Conv1d(
        features=4, kernel=4, stride=2, padding=3, dilation=2, groups=2, bias=True
    ),
    "conv3d/plain": Conv3d(features=4, kernel=3, bias=True),
    "conv3d/strided": Conv3d(
        features=6, kernel=(2, 3, 1), stride=(1, 2, 2), padding="valid", groups=2
    ),
    "conv_transpose/grouped": ConvTranspose(
        features=6, kernel=3, stride=2, padding="valid", groups=2, bias=True
    ),
    "conv_transpose/depthwise": ConvTranspose(
        features=4, kernel=2, stride=2, padding="valid", groups=4, bias=True
    ),
    "lstm/plain": Lstm(features=4),
    "lstm/bidirectional": Lstm(features=3, bidirectional=True),
    "lstm/without_bias": Lstm(features=4, bias=False),
    "gru/plain": Gru(features=4),
    "gru/bidirectional": Gru(features=3, bidirectional=True),
}
NAMES = {
    "weight": "kernel",
    "weight_ih_l0": "kernel",
    "weight_hh_l0": "recurrent_kernel",
    "bias_ih_l0": "bias",
    "bias_hh_l0": "recurrent_bias",
}


def rename(name: str) -> str:
    """The name of PyTorch's parameter here."""
    if name.endswith("_reverse"):
        return f"reverse_{NAMES[name.removesuffix('_reverse')]}"
    return NAMES.get(name, name)


def to_channels_last(array: np.ndarray, key: str) -> np.ndarray:
    is_recurrent = key.startswith(("lstm", "gru"))
    return array if is_recurrent else np.moveaxis(array, 1, -1)


class Stack(nn.Module):
    """A layer, whose result may have any shape."""

    layer: LayerSpec
    mask: Any = None
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = InitSpec.model_validate(INIT)
        context = LayerContext((), init, self.dtype, train=True, token_mask=self.mask)
        return apply_layers((self.layer,), x.astype(self.dtype), context)


def scope(layer: LayerSpec) -> str:
    """The layer's name in paths of parameters."""
    return f"{layer.name}_0"


def convert(key: str, layer: LayerSpec, prefix: str = "") -> dict[str, np.ndarray]:
    """Parameters, or with the prefix `d_` their gradients, of a case, by the layer's names."""
    arrays = {
        name.rpartition("/")[2].removeprefix(prefix): array
        for name, array in GOLDEN.items()
        if name.startswith(f"{key}/{prefix}")
        and name.rpartition("/")[2].removeprefix(prefix).startswith(("weight", "bias"))
    }
    x = to_channels_last(GOLDEN[f"{key}/x"], key)
    variables = jax.eval_shape(Stack(layer).init, jax.random.key(0), x)
    leaves = variables.get("params", {}).get(scope(layer), {})
    shapes = {f"params/{scope(layer)}/{name}": leaf.shape for name, leaf in leaves.items()}
    network = NetworkArrays("layers", shapes, {})
    return {
        rename(name): convert_layout(array, f"params/{scope(layer)}/{rename(name)}", network)
        for name, array in arrays.items()
    }


RECURRENT = {key for key in LAYERS if key.startswith(("lstm", "gru"))} - {"lstm/plain"}
"""Further recurrent layers, which are left to the complete run."""


@pytest.mark.parametrize("key", mark_slow_except(LAYERS.keys() - RECURRENT, LAYERS))
def test_layer_values_and_gradients_match_pytorch(key: str) -> None:
    layer = LAYERS[key]
    x = to_channels_last(GOLDEN[f"{key}/x"], key)
    params = convert(key, layer)
    expected = GOLDEN[f"{key}/y"]
    factors = np.cos(np.arange(expected.size, dtype=np.float32)).reshape(expected.shape)

    def loss(params: Any, x: Any) -> tuple[jax.Array, jax.Array]:
        y = Stack(layer).apply({"params": {scope(layer): params}}, x)
        return (y * to_channels_last(factors, key)).sum(), y

    grad = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (by_params, by_x), y = grad(params, x)
    close = {"rtol": 1e-4, "atol": 2e-5}
    np.testing.assert_allclose(y, to_channels_last(expected, key), **close)
    np.testing.assert_allclose(by_x, to_channels_last(GOLDEN[f"{key}/dx"], key), **close)
    gradients = convert(key, layer, "d_")
    assert set(gradients) == set(params) == set(by_params)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(by_params[name], gradient, **close)


@pytest.mark.parametrize(
    "key",
    mark_slow_except(["lstm/plain"], ["lstm/plain", "lstm/bidirectional", "gru/bidirectional"]),
)
def test_last_state_matches_pytorch(key: str) -> None:
    layer = LAYERS[key].model_copy(update={"output": "last"})
    params = {scope(layer): convert(key, layer)}
    y = jax.jit(Stack(layer).apply)({"params": params}, GOLDEN[f"{key}/x"])
    np.testing.assert_allclose(y, GOLDEN[f"{key}/last"], rtol=1e-4, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize(
    "key", mark_slow_except(["gru/bidirectional"], ["lstm/bidirectional", "gru/bidirectional"])
)
def test_padding_does_not_change_the_state(key: str) -> None:
    """The last state of padded tokens is the last state of the tokens alone."""
    layer = LAYERS[key].model_copy(update={"output": "last"})
    params = {"params": {scope(layer): convert(key, layer)}}
    x = GOLDEN[f"{key}/x"]
    mask = np.arange(x.shape[1]) < np.array([[4], [7], [1]])
    y = jax.jit(Stack(layer, mask).apply)(params, np.where(mask[..., None], x, 1e9))
    apply = jax.jit(Stack(layer).apply)
    for row, tokens in enumerate(mask.sum(1)):
        alone = apply(params, x[row : row + 1, :tokens])
        np.testing.assert_allclose(y[row : row + 1], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.medium
def test_causal_conv1d_reads_a_token_and_those_before_it() -> None:
    layer = Conv1d(features=4, kernel=3, stride=2, dilation=2, groups=2, padding="causal")
    x = np.random.default_rng(0).normal(size=(2, 7, 6)).astype(np.float32)
    params = draw_variables(jax.eval_shape(Stack(layer).init, jax.random.key(0), x))
    kernel = jax.tree.leaves(params)[0]
    y = jax.jit(Stack(layer).apply)(params, x)
    assert y.shape == (2, 4, 4)
    for result in range(4):
        expected = np.zeros((2, 4))
        for tap in range(3):
            token = 2 * result - 2 * (2 - tap)
            if token >= 0:
                halves = [
                    x[:, token, :3] @ kernel[tap, :, :2],
                    x[:, token, 3:] @ kernel[tap, :, 2:],
                ]
                expected += np.concatenate(halves, axis=1)
        np.testing.assert_allclose(y[:, result], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.medium
def test_conv1d_reads_padding_as_zeros() -> None:
    """So real tokens don't depend on the values of padding."""
    layer = Conv1d(features=4, kernel=3)
    x = np.random.default_rng(0).normal(size=(3, 7, 5)).astype(np.float32)
    params = draw_variables(jax.eval_shape(Stack(layer).init, jax.random.key(0), x))
    mask = np.arange(x.shape[1]) < np.array([[4], [7], [1]])
    y = jax.jit(Stack(layer, mask).apply)(params, np.where(mask[..., None], x, 1e9))
    apply = jax.jit(Stack(layer).apply)
    for row, tokens in enumerate(mask.sum(1)):
        alone = apply(params, x[row : row + 1, :tokens])
        np.testing.assert_allclose(y[row, :tokens], alone[0], rtol=1e-5, atol=1e-6)
