from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from pipeline.models.modules.batch_norm import (
    BatchNormModule,
    NormSettings,
    _sum_products,
    _sum_shifted,
    compute_statistics,
    normalise_by_batch,
)
from tests.models.build import Variables, random
from tests.models.conftest import GOLDEN

X = 3 * random(4, 5, 2, 6) + 2


def ours(train: bool = True, axis: int = -1, dtype: str = "float32") -> BatchNormModule:
    return BatchNormModule(
        train=train, axis=axis, momentum=0.9, epsilon=1e-5, dtype=dtype, scale_init=1.0
    )


def flax(train: bool = True, dtype: str = "float32") -> nn.BatchNorm:
    return nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=dtype)


def fresh(channels: int) -> Variables:
    ones, zeros = np.ones(channels, np.float32), np.zeros(channels, np.float32)
    scale, bias = random(channels, seed=1), random(channels, seed=2)
    return {
        "params": {"scale": scale, "bias": bias},
        "batch_stats": {"mean": zeros, "var": ones},
    }


def is_close(ours: Any, expected: Any) -> bool:
    """Of the same type and shape, and equal but for rounding, as a share of the largest."""
    if (ours.dtype, ours.shape) != (expected.dtype, expected.shape):
        return False
    values, tolerance = np.asarray(expected, np.float32), 1e-6 if ours.dtype == "float32" else 0.02
    error = np.abs(np.asarray(ours, np.float32) - values).max()
    return bool(error <= tolerance * np.abs(values).max())


def stepped(module: nn.Module, variables: Variables, x: Any) -> tuple[Any, Variables]:
    """The result, and the running statistics after it."""
    return module.apply(variables, x, mutable=["batch_stats"])


@pytest.mark.slow
def test_running_statistics_after_two_steps_have_parity_with_mindspore() -> None:
    steps = json.loads((GOLDEN / "networks" / "batch_norm.json").read_text())["steps"]
    variables = ours().init(jax.random.key(0), np.array(steps[0]["x"], np.float32))
    for step in steps:
        y, changed = stepped(ours(), variables, np.array(step["x"], np.float32))
        np.testing.assert_allclose(y, step["y"], rtol=0, atol=2e-6)
        for name in ("mean", "var"):
            np.testing.assert_allclose(changed["batch_stats"][name], step[name], rtol=1e-6)
        variables = {**variables, **changed}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("train", [True, False])
def test_results_match_flax(train: bool, dtype: str) -> None:
    x, variables = jnp.asarray(X, dtype), fresh(6)
    y, changed = stepped(ours(train, dtype=dtype), variables, x)
    expected, by_flax = stepped(flax(train, dtype=dtype), variables, x)
    assert y.dtype == dtype
    assert is_close(y, expected)
    np.testing.assert_array_equal(changed["batch_stats"]["mean"], by_flax["batch_stats"]["mean"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("train", [True, False])
def test_gradients_match_flax(train: bool, dtype: str) -> None:
    def loss(params: Any, x: Any, module: nn.Module) -> jax.Array:
        variables = {**fresh(6), "params": params}
        return jnp.sin(stepped(module, variables, x)[0].astype(jnp.float32)).sum()

    x, params = jnp.asarray(X, dtype), fresh(6)["params"]
    modules = ours(train, dtype=dtype), flax(train, dtype=dtype)
    by_ours, by_flax = (jax.grad(loss, argnums=(0, 1))(params, x, module) for module in modules)
    pairs = zip(jax.tree.leaves(by_ours), jax.tree.leaves(by_flax), strict=True)
    assert jax.tree.structure(by_ours) == jax.tree.structure(by_flax)
    assert all(is_close(*pair) for pair in pairs)


def test_channels_far_from_zero_are_normalised_accurately() -> None:
    """A mean a hundred times the deviation costs two of seven digits."""
    x = (random(64, 7, 7, 6) + 100).astype(np.float32)
    statistics = {"mean": np.full(6, 100, np.float32), "var": np.ones(6, np.float32)}
    parameters = {"scale": np.ones(6, np.float32), "bias": np.zeros(6, np.float32)}
    y, _ = stepped(ours(train=False), {"params": parameters, "batch_stats": statistics}, x)
    np.testing.assert_allclose(y, (x - 100) / np.sqrt(1 + 1e-5), rtol=0, atol=2e-5)


@pytest.mark.medium
def test_running_variance_uses_the_unbiased_estimate() -> None:
    _, changed = stepped(ours(), fresh(6), X)
    expected = 0.9 + 0.1 * X.var((0, 1, 2), ddof=1)
    np.testing.assert_allclose(changed["batch_stats"]["var"], expected, rtol=1e-5)


@pytest.mark.slow
def test_running_variance_of_a_single_value_is_not_corrected() -> None:
    _, changed = stepped(ours(), fresh(6), X[:1, :1, :1])
    np.testing.assert_allclose(changed["batch_stats"]["var"], np.full(6, 0.9), rtol=1e-6)


def test_evaluation_uses_and_does_not_change_running_statistics() -> None:
    variables = fresh(6)
    y, changed = stepped(ours(train=False), variables, X)
    scale, bias = variables["params"]["scale"], variables["params"]["bias"]
    np.testing.assert_allclose(y, X / np.sqrt(1 + 1e-5) * scale + bias, rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, changed["batch_stats"], variables["batch_stats"])


@pytest.mark.slow
def test_channels_may_come_first() -> None:
    y, changed = stepped(ours(), fresh(6), X)
    first, same = stepped(ours(axis=0), fresh(6), X.transpose(3, 1, 2, 0))
    np.testing.assert_allclose(first.transpose(3, 1, 2, 0), y, rtol=1e-5, atol=1e-5)
    for name in ("mean", "var"):
        np.testing.assert_allclose(
            same["batch_stats"][name], changed["batch_stats"][name], rtol=1e-5
        )


@pytest.mark.medium
def test_initial_statistics_are_independent_of_the_first_batch() -> None:
    variables = ours().init(jax.random.key(0), X)
    np.testing.assert_array_equal(variables["batch_stats"]["mean"], np.zeros(6))
    np.testing.assert_array_equal(variables["batch_stats"]["var"], np.ones(6))
    np.testing.assert_array_equal(variables["params"]["scale"], np.ones(6))


def test_bfloat16_images_are_not_copied_to_float32() -> None:
    """Every sum converts what it reads: XLA:CPU would write a copy that several read."""
    x = jnp.asarray(random(4, 16, 16, 8), jnp.bfloat16)
    module = ours(dtype="bfloat16")

    def step(x: jax.Array, cotangent: jax.Array) -> Any:
        def normalise(x: jax.Array) -> tuple[jax.Array, Any]:
            return module.apply(fresh(8), x, mutable=["batch_stats"])

        y, back, changed = jax.vjp(normalise, x, has_aux=True)
        return y, changed, back(cotangent)

    program = jax.jit(step).lower(x, x).compile().as_text()
    written = re.findall(r"= (\w+\[4,16,16,8\])\S* (\w+)\(", program.split("ENTRY")[1])
    assert ("bf16[4,16,16,8]", "fusion") in written
    assert not [one for one in written if one[0].startswith("f32")]


def far_from_zero(ratio: float, axis: int) -> tuple[Any, Any]:
    """Values of deviation 1 whose means are 1 to 2 times the ratio, but for channel 0, near zero;
    and cotangents. The last axis or axis 0 has the channels."""
    means = ratio * np.linspace(1, 2, 6)
    means[0] = 0.5
    x = (random(16, 8, 8, 6) + means).astype(np.float32)
    cotangent = random(16, 8, 8, 6, seed=1)
    return tuple(np.moveaxis(array, -1, axis) for array in (x, cotangent))


def normalised_in_float64(x: Any, cotangent: Any) -> dict[str, Any]:
    """Result, statistics and gradients by their closed forms, for arrays with channels last."""
    x, dy = np.float64(x), np.float64(cotangent)
    axes, inverse = (0, 1, 2), 1 / np.sqrt(x.var((0, 1, 2)) + 1e-5)
    y = (x - x.mean(axes)) * inverse
    return {
        "y": y,
        "mean": x.mean(axes),
        "var": x.var(axes, ddof=1),
        "x_grad": inverse * (dy - dy.mean(axes) - y * (dy * y).mean(axes)),
        "scale_grad": (dy * y).sum(axes),
        "bias_grad": dy.sum(axes),
    }


def normalised_by_ours(x: Any, cotangent: Any, axis: int, running: float) -> dict[str, Any]:
    channels = x.shape[axis]
    params = {"scale": jnp.ones(channels), "bias": jnp.zeros(channels)}
    statistics = {"mean": jnp.full(channels, running), "var": jnp.ones(channels)}

    def normalise(params: Any, x: Any) -> Any:
        module = BatchNormModule(True, axis, 0.0, 1e-5, "float32", 1.0)
        return stepped(module, {"params": params, "batch_stats": statistics}, x)

    y, back, changed = jax.vjp(normalise, params, x, has_aux=True)
    grads, x_grad = back(cotangent)
    values = {"y": y, "x_grad": x_grad, **changed["batch_stats"]}
    return values | {"scale_grad": grads["scale"], "bias_grad": grads["bias"]}


@pytest.mark.slow
@pytest.mark.parametrize("running", [0.0, 1000.0])
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("ratio", [0, 1, 7, 30, 300, 3000, 30000])
def test_batch_far_from_zero_is_normalised_as_in_float64(
    ratio: float, axis: int, running: float
) -> None:
    """The result of a batch doesn't depend on how far from zero its channels are."""
    x, cotangent = far_from_zero(ratio, axis)
    ours = jax.jit(normalised_by_ours, static_argnums=(2, 3))(x, cotangent, axis, running)
    last = (np.moveaxis(array, axis, -1) for array in (x, cotangent))
    for name, expected in normalised_in_float64(*last).items():
        value = np.moveaxis(ours[name], axis, -1) if expected.ndim > 1 else ours[name]
        tolerance = 4e-5 * np.abs(expected).max()
        np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.medium
def test_bits_of_a_channel_do_not_depend_on_channels_far_from_zero() -> None:
    (near, cotangent), (far, _) = far_from_zero(0, -1), far_from_zero(300, -1)
    both = np.concatenate([near, far], -1)
    cotangents = np.concatenate([cotangent, cotangent], -1)
    alone = normalised_by_ours(near, cotangent, -1, 0.0)
    together = normalised_by_ours(both, cotangents, -1, 0.0)
    for name, value in alone.items():
        np.testing.assert_array_equal(together[name][..., :6], value, err_msg=name)


@pytest.mark.medium
def test_bits_of_a_run_do_not_depend_on_other_runs_of_a_population() -> None:
    runs = [far_from_zero(ratio, -1) for ratio in (0, 300)]
    x, cotangent = (np.stack(arrays) for arrays in zip(*runs, strict=True))
    together = jax.vmap(lambda x, dy: normalised_by_ours(x, dy, -1, 0.0))(x, cotangent)
    same = np.stack([x[0], x[0]])
    beside_itself = jax.vmap(lambda x, dy: normalised_by_ours(x, dy, -1, 0.0))(same, cotangent)
    for name in together:
        np.testing.assert_array_equal(together[name][0], beside_itself[name][0], err_msg=name)
    far = normalised_in_float64(*runs[1])
    np.testing.assert_allclose(together["y"][1], far["y"], rtol=0, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_devices_other_than_the_cpu_are_accurate(dtype: str) -> None:
    """They subtract the first value of each channel as they read."""
    x, cotangent = (jnp.asarray(array, dtype) for array in far_from_zero(300, -1))
    settings = NormSettings((0, 1, 2), 1e-5, dtype, None, 1)
    shift, offset, var = _sum_shifted(settings, x)
    values, dy = np.float64(x), np.float64(cotangent)
    np.testing.assert_allclose(shift + offset, values.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(var, values.var((0, 1, 2)), rtol=1e-5, atol=1e-5)
    bias_grad, products = _sum_products(settings, x, shift, cotangent)
    expected = (dy * (values - np.float64(shift))).sum((0, 1, 2))
    np.testing.assert_allclose(bias_grad, dy.sum((0, 1, 2)), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(products, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.medium
def test_batch_shared_by_devices_is_normalised_as_in_float64() -> None:
    x, cotangent = far_from_zero(3000, -1)
    settings = NormSettings((0, 1, 2), 1e-5, "float32", "devices", 4)

    def normalise(x: jax.Array, cotangent: jax.Array) -> Any:
        def compute(x: jax.Array) -> jax.Array:
            statistics = compute_statistics(jax.lax.stop_gradient(x), settings)
            return normalise_by_batch(settings, x, statistics, jnp.ones(6), jnp.zeros(6))

        y, back = jax.vjp(compute, x)
        return y, *back(cotangent)

    parts = [array.reshape(4, 4, *array.shape[1:]) for array in (x, cotangent)]
    y, x_grad = jax.vmap(normalise, axis_name="devices")(*parts)
    expected = normalised_in_float64(x, cotangent)
    # The mean of all devices is a float32.
    np.testing.assert_allclose(y.reshape(x.shape), expected["y"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(x_grad.reshape(x.shape), expected["x_grad"], rtol=0, atol=1e-3)
