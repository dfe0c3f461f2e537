from __future__ import annotations

from functools import partial
from math import erf
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from pipeline.models.layers.initializers import Constant, Ones
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import (
    AvgPool,
    BatchNorm,
    ChannelShuffle,
    Conv,
    ConvTranspose,
    Dense,
    Dropout,
    Flatten,
    Gelu,
    GlobalAvgPool,
    GroupNorm,
    HardSigmoid,
    HardSwish,
    LayerNorm,
    MaxPool,
    Relu,
    Relu6,
    Residual,
    Sequence,
    Sigmoid,
    SquaredRelu,
    Swish,
    Tanh,
    Upsample,
)
from pipeline.models.layers.token_mixers import StateSpace
from pipeline.models.layers.tokens import Embedding, MeanToken, Tokens
from pipeline.models.lowerings.problem import Layout
from pipeline.models.modules.network import Network
from tests.models.build import initialise, network, parameters, random, shapes
from tests.models.lowerings.test_lowered_layers import by_loops

IMAGES = random(3, 6, 5, 4)
ROWS = random(6, 4)


def run(
    module: Network, x: np.ndarray, train: bool = False, **rngs: jax.Array
) -> tuple[np.ndarray, dict[str, Any]]:
    """Logits, and the variables after the call."""
    variables = initialise(module, x)
    logits, changed = module.apply(variables, x, train=train, mutable=["batch_stats"], rngs=rngs)
    return np.asarray(logits), {**variables, **changed}


def images_out(layer: LayerSpec, x: np.ndarray = IMAGES) -> tuple[np.ndarray, dict[str, Any]]:
    """The output of a layer on images, after a flatten."""
    y, variables = run(network(layer, Flatten()), x)
    return y, parameters(variables) if "params" in variables else {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "pads"),
    [
        (Conv(features=6, kernel=3), ((1, 1), (1, 1))),
        (Conv(features=6, kernel=3, stride=2), ((0, 1), (1, 1))),
        (Conv(features=6, kernel=3, stride=2, padding="symmetric"), ((1, 1), (1, 1))),
        (Conv(features=6, kernel=2, dilation=4, padding="symmetric"), ((2, 2), (2, 2))),
        (Conv(features=6, kernel=3, padding="valid", groups=2), ((0, 0), (0, 0))),
        (Conv(features=6, kernel=3, padding=2, dilation=2, bias=True), ((2, 2), (2, 2))),
        (Conv(features=6, kernel=3, padding=((0, 2), (1, 0))), ((0, 2), (1, 0))),
    ],
)
def test_conv_matches_its_definition(
    layer: Conv, pads: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    y, variables = images_out(layer)
    kernel = np.asarray(variables["conv_0/kernel"])
    assert isinstance(layer.stride, int)
    assert isinstance(layer.dilation, int)
    expected = by_loops(IMAGES, kernel, layer.stride, pads, layer.dilation, layer.groups)
    assert ("conv_0/bias" in variables) == layer.bias
    expected += np.asarray(variables.get("conv_0/bias", 0.0))
    np.testing.assert_allclose(y, expected.reshape(3, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_conv_supports_a_non_square_kernel() -> None:
    y, variables = images_out(Conv(features=2, kernel=(1, 5), padding="valid", stride=(2, 1)))
    assert variables["conv_0/kernel"].shape == (1, 5, 4, 2)
    expected = np.einsum("bhwi,wio->bho", IMAGES[:, ::2], variables["conv_0/kernel"][0])
    np.testing.assert_allclose(y, expected.reshape(3, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 2), (3, 1)])
def test_conv_transpose_matches_its_definition(kernel: int, stride: int) -> None:
    layer = ConvTranspose(features=3, kernel=kernel, stride=stride, padding="valid", bias=True)
    y, variables = images_out(layer)
    weights = np.asarray(variables["conv_transpose_0/kernel"])[::-1, ::-1]
    expected = np.zeros((3, 5 * stride + kernel, 4 * stride + kernel, 3))
    for i in range(6):
        for j in range(5):
            window = np.einsum("bi,hwio->bhwo", IMAGES[:, i, j], weights)
            rows, columns = slice(i * stride, i * stride + kernel), slice(j * stride, None)
            expected[:, rows, columns][:, :, :kernel] += window
    expected += np.asarray(variables["conv_transpose_0/bias"])
    np.testing.assert_allclose(y, expected.reshape(3, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_conv_transpose_same_multiplies_the_size_by_the_stride() -> None:
    y, variables = images_out(ConvTranspose(features=2, kernel=3, stride=2))
    assert y.shape == (3, 12 * 10 * 2)
    assert set(variables) == {"conv_transpose_0/kernel"}


def test_upsample_repeats_every_pixel() -> None:
    y, _ = images_out(Upsample(factor=3))
    np.testing.assert_array_equal(y, IMAGES.repeat(3, 1).repeat(3, 2).reshape(3, -1))


def test_channel_shuffle_interleaves_the_groups() -> None:
    y, _ = run(network(ChannelShuffle(groups=2)), np.arange(6, dtype=np.float32)[None])
    np.testing.assert_array_equal(y, [[0, 3, 1, 4, 2, 5]])


@pytest.mark.slow
def test_dense_matches_its_definition() -> None:
    y, variables = run(network(Dense(features=3), Dense(features=2, bias=False)), ROWS)
    first, second = variables["params"]["dense_0"], variables["params"]["dense_1"]
    assert set(second) == {"kernel"}
    expected = (ROWS @ first["kernel"] + first["bias"]) @ second["kernel"]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_layers_may_have_custom_initialisers() -> None:
    _, variables = images_out(
        Conv(features=2, kernel=1, bias=True, kernel_init=Ones(), bias_init=Constant(value=3.0))
    )
    np.testing.assert_array_equal(variables["conv_0/kernel"], 1)
    np.testing.assert_array_equal(variables["conv_0/bias"], 3)
    dense = network(Dense(features=2, kernel_init=Constant(value=2.0), bias_init=Ones()))
    y, _ = run(dense, ROWS)
    np.testing.assert_allclose(y, 2 * ROWS.sum(1, keepdims=True).repeat(2, 1) + 1, rtol=1e-4)


@pytest.mark.slow
def test_batch_norm_normalises_over_the_batch_in_training() -> None:
    module = network(BatchNorm(momentum=0.75, epsilon=0.1, scale_init=2.0), Flatten())
    y, variables = run(module, IMAGES, train=True)
    mean, variance = IMAGES.mean((0, 1, 2)), IMAGES.var((0, 1, 2))
    unbiased = IMAGES.var((0, 1, 2), ddof=1)
    expected = 2 * (IMAGES - mean) / np.sqrt(variance + 0.1)
    np.testing.assert_allclose(y, expected.reshape(3, -1), rtol=1e-4, atol=1e-5)
    running = variables["batch_stats"]["batch_norm_0"]
    np.testing.assert_allclose(running["mean"], 0.25 * mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(running["var"], 0.75 + 0.25 * unbiased, rtol=1e-4)


@pytest.mark.medium
def test_batch_norm_uses_running_statistics_in_evaluation() -> None:
    module = network(BatchNorm(epsilon=0.1), Flatten())
    variables = initialise(module, IMAGES)
    mean, variance = np.arange(4.0, dtype=np.float32), np.full(4, 2.0, np.float32)
    variables["batch_stats"]["batch_norm_0"] = {"mean": mean, "var": variance}
    y = module.apply(variables, IMAGES, train=False)
    expected = (IMAGES - mean) / np.sqrt(2.1)
    np.testing.assert_allclose(y, expected.reshape(3, -1), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "function"),
    [
        (Relu(), lambda x: max(x, 0)),
        (Relu6(), lambda x: min(max(x, 0), 6)),
        (SquaredRelu(), lambda x: max(x, 0) ** 2),
        (Gelu(), lambda x: x * (1 + erf(x / 2**0.5)) / 2),
        (Tanh(), np.tanh),
        (Sigmoid(), lambda x: 1 / (1 + np.exp(-x))),
        (Swish(), lambda x: x / (1 + np.exp(-x))),
        (HardSigmoid(), lambda x: min(max(x + 3, 0), 6) / 6),
        (HardSwish(), lambda x: x * min(max(x + 3, 0), 6) / 6),
    ],
)
def test_activations_match_their_formulas(layer: LayerSpec, function: Any) -> None:
    x = np.linspace(-4, 8, 25, dtype=np.float32)[None]
    y, _ = run(network(layer), x)
    tolerance = 5e-4 if isinstance(layer, Gelu) else 1e-6
    np.testing.assert_allclose(y, [[function(value) for value in x[0]]], atol=tolerance, rtol=1e-5)


@pytest.mark.slow
def test_gelu_is_the_tanh_form() -> None:
    y, _ = run(network(Gelu()), np.ones((1, 1), np.float32))
    assert y.item() == pytest.approx(0.5 * (1 + np.tanh((2 / np.pi) ** 0.5 * 1.044715)), rel=1e-6)


def test_max_pool_stride_defaults_to_its_kernel() -> None:
    y, _ = images_out(MaxPool(kernel=2))
    expected = IMAGES[:, :, :4].reshape(3, 3, 2, 2, 2, 4).max((2, 4))
    np.testing.assert_array_equal(y, expected.reshape(3, -1))


@pytest.mark.parametrize(("padding", "rows"), [("same", (0, 1)), ("symmetric", (1, 1))])
def test_max_pool_with_stride_and_padding_matches_its_definition(
    padding: Literal["same", "symmetric"], rows: tuple[int, int]
) -> None:
    y, _ = images_out(MaxPool(kernel=3, stride=2, padding=padding))
    padded = np.pad(IMAGES, ((0, 0), rows, (1, 1), (0, 0)), constant_values=-np.inf)
    windows = [padded[:, i : i + 3, j : j + 3].max((1, 2)) for i in (0, 2, 4) for j in (0, 2, 4)]
    np.testing.assert_array_equal(y, np.stack(windows, 1).reshape(3, -1))


@pytest.mark.medium
def test_avg_pool_does_not_count_padding() -> None:
    y, _ = images_out(AvgPool(kernel=3, stride=2, padding="same"))
    padded = np.pad(IMAGES, ((0, 0), (0, 1), (1, 1), (0, 0)), constant_values=np.nan)
    windows = [
        np.nanmean(padded[:, i : i + 3, j : j + 3], axis=(1, 2))
        for i in (0, 2, 4)
        for j in (0, 2, 4)
    ]
    np.testing.assert_allclose(y, np.stack(windows, 1).reshape(3, -1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("dtype", "value"), [("float16", 3000.0), ("bfloat16", 3008.0)])
def test_avg_pool_of_16_bits_is_summed_in_float32(dtype: str, value: float) -> None:
    """A sum of 49 values overflows float16, and in bfloat16 was 2 % off."""
    y, _ = run(network(AvgPool(kernel=7), Flatten(), dtype=dtype), np.full((1, 7, 7, 1), value))
    np.testing.assert_array_equal(y, [[value]])


@pytest.mark.parametrize(
    "layers",
    [
        (Flatten(), Dense(features=3)),
        (ChannelShuffle(groups=2), Tokens(), MeanToken()),
        (Tokens(), StateSpace(heads=2, head=2, state=2), MeanToken()),
        (Embedding(vocabulary=3, features=2), MeanToken()),
    ],
)
def test_batch_may_have_no_samples(layers: tuple[LayerSpec, ...]) -> None:
    module = network(*layers)
    variables = jax.eval_shape(module.init, jax.random.key(0), IMAGES, train=False)
    y = jax.eval_shape(partial(module.apply, train=False), variables, IMAGES[:0])
    assert y.shape[0] == 0


def test_global_avg_pool_is_the_mean_of_all_positions() -> None:
    y, _ = run(network(GlobalAvgPool()), IMAGES)
    np.testing.assert_allclose(y, IMAGES.mean((1, 2)), rtol=1e-4, atol=1e-6)


def test_flatten_keeps_the_order_of_values() -> None:
    np.testing.assert_array_equal(run(network(Flatten()), IMAGES)[0], IMAGES.reshape(3, -1))


@pytest.mark.slow
def test_second_derivatives_of_layers_match_jax() -> None:
    """M-14: layers with gradient rules, against the same network of jax's functions."""
    module = network(Conv(features=3, kernel=3), Tanh(), Flatten(), Dense(features=2))
    images = random(4, 5, 5, 1)
    params = initialise(module, images)["params"]
    direction = jax.tree.map(
        lambda leaf: jnp.cos(37 * jnp.arange(leaf.size)).reshape(leaf.shape), params
    )

    def compute(params: Any) -> jax.Array:
        return module.apply({"params": params}, images, train=True)

    def compute_plainly(params: Any) -> jax.Array:
        kernel = params["conv_0"]["kernel"]
        form = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=form)
        rows = jnp.tanh(y).reshape(len(images), -1)
        return rows @ params["dense_0"]["kernel"] + params["dense_0"]["bias"]

    def derive_twice(compute: Any) -> Any:
        """The gradient of the derivative along a direction."""

        def derive(params: Any) -> jax.Array:
            gradients = jax.grad(lambda params: (compute(params) ** 3).sum())(params)
            return sum(
                jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), gradients, direction))
            )

        return jax.jit(jax.grad(derive))(params)

    expected = derive_twice(compute_plainly)
    for found, leaf in zip(*map(jax.tree.leaves, (derive_twice(compute), expected)), strict=True):
        assert jnp.abs(leaf).max() > 0.1
        np.testing.assert_allclose(found, leaf, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_dropout_gelu_and_max_pooling_are_the_adapters() -> None:
    """G-03."""
    dropped, _ = run(
        network(Dropout(rate=0.5)),
        np.ones((40, 100), np.float32),
        train=True,
        dropout=jax.random.key(1),
    )
    assert np.unique(dropped).tolist() == [0, 2]
    wide = ROWS.astype(np.float64)
    gelu = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    np.testing.assert_allclose(run(network(Gelu()), ROWS)[0], gelu, rtol=1e-5, atol=1e-6)
    images = IMAGES[:, :4, :4]
    pooled = images.reshape(3, 2, 2, 2, 2, 4).max(axis=(2, 4))
    np.testing.assert_array_equal(images_out(MaxPool(kernel=2), images)[0], pooled.reshape(3, -1))


@pytest.mark.slow
def test_dropout_zeroes_a_share_and_rescales_only_in_training() -> None:
    module, x = network(Dropout(rate=0.25)), np.ones((40, 100), np.float32)
    y, _ = run(module, x, train=True, dropout=jax.random.key(1))
    np.testing.assert_allclose(np.unique(y), [0, 4 / 3], rtol=1e-6)
    assert (y == 0).mean() == pytest.approx(0.25, abs=0.03)
    other, _ = run(module, x, train=True, dropout=jax.random.key(2))
    assert (y != other).any()
    np.testing.assert_array_equal(run(module, x)[0], x)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nhwc", "chwn"])
def test_dropout_per_sample_zeroes_all_of_a_sample_or_nothing(layout: Layout) -> None:
    module = network(Dropout(rate=0.25, per_sample=True), Flatten()).clone(layout=layout)
    x = np.ones((200, 2, 3, 4), np.float32)
    y, _ = run(module, x, train=True, dropout=jax.random.key(1))
    np.testing.assert_array_equal(y, np.repeat(y[:, :1], 24, axis=1))
    np.testing.assert_allclose(np.unique(y), [0, 4 / 3], rtol=1e-6)
    assert (y[:, 0] == 0).mean() == pytest.approx(0.25, abs=0.1)
    np.testing.assert_array_equal(run(module, x)[0], x.reshape(200, -1))


@pytest.mark.slow
def test_residual_adds_body_and_shortcut_with_separate_scopes() -> None:
    residual = Residual(
        scope="stage1_block0",
        body=(Dense(features=3), Tanh(), Dense(features=3)),
        shortcut=(Dense(features=3, bias=False),),
    )
    y, variables = run(network(residual), ROWS)
    p = parameters(variables)
    assert set(p) == {
        "stage1_block0/dense_0/kernel",
        "stage1_block0/dense_0/bias",
        "stage1_block0/dense_1/kernel",
        "stage1_block0/dense_1/bias",
        "stage1_block0/shortcut/dense_0/kernel",
    }
    hidden = ROWS @ p["stage1_block0/dense_0/kernel"] + p["stage1_block0/dense_0/bias"]
    body = np.tanh(hidden) @ p["stage1_block0/dense_1/kernel"] + p["stage1_block0/dense_1/bias"]
    expected = body + ROWS @ p["stage1_block0/shortcut/dense_0/kernel"]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_residual_without_shortcut_adds_its_input() -> None:
    y, _ = run(network(Residual(body=(Relu(),))), ROWS)
    np.testing.assert_allclose(y, ROWS + np.maximum(ROWS, 0), rtol=1e-6)


@pytest.mark.slow
def test_sequence_repeats_its_body_with_separate_weights() -> None:
    module = network(Sequence(body=(Dense(features=4), Relu()), repeat=2), Relu())
    y, variables = run(module, ROWS)
    p = parameters(variables)
    assert sorted({path.rsplit("/", 1)[0] for path in p}) == [
        "sequence_0/dense_0",
        "sequence_0/dense_1",
    ]
    x = ROWS
    for index in (0, 1):
        dense = variables["params"]["sequence_0"][f"dense_{index}"]
        x = np.maximum(x @ dense["kernel"] + dense["bias"], 0)
    np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-5)
    assert (p["sequence_0/dense_0/kernel"] != p["sequence_0/dense_1/kernel"]).any()


EVERY_KIND = (
    Conv(features=4, kernel=3, bias=True),
    BatchNorm(),
    Relu(),
    AvgPool(kernel=2),
    LayerNorm(),
    GroupNorm(groups=2),
    MaxPool(kernel=2),
    Residual(body=(Swish(),)),
    GlobalAvgPool(),
    Dropout(),
    Dense(features=3),
)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parameters_and_logits_are_float32_for_any_dtype(dtype: str) -> None:
    module = network(*EVERY_KIND, dtype=dtype)
    y, after = run(module, IMAGES, train=True, dropout=jax.random.key(1))
    assert y.dtype == jnp.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves(after)} == {"float32"}
    assert np.isfinite(y).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layer_keeps_the_dtype_of_activations(dtype: str) -> None:
    module = network(*EVERY_KIND, dtype=dtype)

    def outputs() -> dict[str, Any]:
        _, variables = module.init_with_output(
            jax.random.key(0), IMAGES, train=False, capture_intermediates=True
        )
        return flatten_dict(variables["intermediates"], sep="/")

    dtypes = {path: leaf.dtype.name for path, (leaf,) in jax.eval_shape(outputs).items()}
    assert dtypes.pop("__call__") == "float32"
    assert len(dtypes) == 8
    assert set(dtypes.values()) == {dtype}


@pytest.mark.slow
def test_images_of_any_float_dtype_are_read() -> None:
    module = network(Flatten(), Dense(features=2))
    expected, _ = run(module, IMAGES)
    y, _ = run(module, IMAGES.astype(np.float16))
    np.testing.assert_allclose(y, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.medium
def test_layers_appear_by_name_in_the_compiled_program() -> None:
    module = network(Residual(body=(Conv(features=4, kernel=3), Relu())), GlobalAvgPool())
    variables = initialise(module, IMAGES)
    lowered = jax.jit(lambda v, x: module.apply(v, x, train=False)).lower(variables, IMAGES)
    text = lowered.as_text(debug_info=True)
    for path in ("residual_0/conv_0/conv_general", "residual_0/relu_0", "global_avg_pool_0"):
        assert f"Network/{path}" in text


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            (Residual(scope="block", body=(Conv(features=6, kernel=3),)), Flatten()),
            r"block: the body returns shape \(1, 6, 5, 6\) and the shortcut \(1, 6, 5, 4\)",
        ),
        (
            (Dense(features=3),),
            r"dense_0: shape \(1, 6, 5, 4\) reaches the layer; must be \(batch, features\): "
            "put flatten or global_avg_pool before it",
        ),
        (
            (
                Sequence(scope="stem", body=(MaxPool(kernel=4), Conv(features=3, kernel=3))),
                MaxPool(kernel=2),
                Flatten(),
            ),
            r"max_pool_0: a window of 2x2 does not fit into shape \(1, 1, 1, 3\); the images are",
        ),
        (
            (Sequence(body=(Conv(features=3, kernel=3, dilation=3, padding="valid"),)), Flatten()),
            r"sequence_0/conv_0: a window of 7x7 does not fit into shape \(1, 6, 5, 4\)",
        ),
        (
            (AvgPool(kernel=(7, 1)), Flatten()),
            r"avg_pool_0: a window of 7x1 does not fit",
        ),
        (
            (Flatten(), Conv(features=3, kernel=3)),
            r"conv_0: shape \(1, 120\) reaches the layer; must be images \(batch, height, width, ",
        ),
        ((Flatten(), GlobalAvgPool()), r"global_avg_pool_0: shape .*; must be images"),
        (
            (Conv(features=6, kernel=3, groups=3), Flatten()),
            r"conv_0: groups 3 does not divide the 4 channels of shape \(1, 6, 5, 4\)",
        ),
        ((ChannelShuffle(groups=3), Flatten()), "channel_shuffle_0: groups 3 does not divide"),
        ((Flatten(), Upsample(), Flatten()), "upsample_0: shape .*; must be images"),
        (
            (Flatten(), ConvTranspose(features=3, kernel=2)),
            "conv_transpose_0: shape .*; must be images",
        ),
        ((GroupNorm(groups=3), Flatten()), "group_norm_0: groups 3 does not divide the 4 channels"),
        (
            (Flatten(), Dense(features="$classes")),
            r"dense_0: features \$classes is a number only in the model `layers`",
        ),
    ],
)
def test_incompatible_layers_are_reported(layers: tuple[LayerSpec, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shapes(network(*layers), (6, 5, 4))


def test_layer_without_a_computation_is_refused_with_a_hint() -> None:
    with pytest.raises(
        TypeError, match="novel_0: layer novel has no computation; its class must have"
    ):
        shapes(network(LayerSpec(name="novel")), (6, 5, 4))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nhwc", "chwn"])
def test_network_may_return_positions(layout: Layout) -> None:
    conv = network(Conv(features=6, kernel=3))
    variables = initialise(conv, IMAGES)
    flat = network(Conv(features=6, kernel=3), Flatten()).apply(variables, IMAGES, train=False)
    logits = conv.clone(layout=layout).apply(variables, IMAGES, train=False)
    assert logits.shape == (3, 6, 5, 6)
    np.testing.assert_allclose(logits.reshape(3, -1), flat, rtol=1e-5, atol=1e-6)
