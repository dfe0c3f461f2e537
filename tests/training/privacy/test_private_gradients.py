"""Clipped sums against gradients of each sample alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from scipy import stats

from pipeline.core.errors import RecipeError
from pipeline.core.registry import make_component
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.modules.layer_capture import grad_observing_layers
from pipeline.training.privacy.privacy_spec import AdaptiveClip
from pipeline.training.privacy.private_gradients import (
    PrivacyRule,
    PrivacyState,
    adapt_clip,
    add_noise,
    draw_normals,
    round_up_to_float32,
    split_noise,
    sum_clipped,
)
from tests.models.build import QUICK, initialise, network
from tests.slow_cases import mark_slow_except

SAMPLES = 5
KEY = jnp.array([1, 2, 3, 4], jnp.uint32)
draw = jax.jit(draw_normals, static_argnums=(2, 3))


def layer(name: str, **fields: Any) -> LayerSpec:
    spec: LayerSpec = make_component("layer", name, **fields)
    return spec


@dataclass(frozen=True)
class Case:
    """A network, and the shape of a sample; `tokens` are whole numbers below 7."""

    layers: tuple[LayerSpec, ...]
    shape: tuple[int, ...]
    tokens: bool = False
    layout: str = "nhwc"

    def build(self) -> tuple[nn.Module, Any, np.ndarray]:
        rng = np.random.default_rng(3)
        shape = (SAMPLES, *self.shape)
        images = rng.integers(0, 7, shape) if self.tokens else rng.normal(size=shape)
        module = network(*self.layers).clone(layout=self.layout)
        images = images.astype(np.float32)
        return module, initialise(module, images), images


HEAD = (layer("global_avg_pool"), layer("dense", features=3))
CASES = {
    "dense": Case((layer("flatten"), layer("dense", features=4), *[layer("relu")] * 1), (2, 3, 2)),
    "dense without bias": Case(
        (layer("flatten"), layer("dense", features=4, bias=False)), (2, 3, 2)
    ),
    "conv": Case((layer("conv", features=4, kernel=3, bias=True), *HEAD), (6, 5, 2)),
    "conv with strides": Case(
        (
            layer("conv", features=4, kernel=[3, 2], stride=2, padding="valid", dilation=2),
            layer("conv", features=2, kernel=1, padding=1, bias=True),
            *HEAD,
        ),
        (9, 8, 1),
    ),
    "conv of channels": Case(
        (layer("conv", features=64, kernel=1), layer("conv", features=48, kernel=2), *HEAD),
        (3, 3, 2),
    ),
    "batch last": Case(
        (layer("conv", features=4, kernel=3), layer("max_pool", kernel=2), *HEAD),
        (6, 6, 1),
        layout="chwn",
    ),
    "groups": Case((layer("conv", features=4, kernel=3, groups=2, bias=True), *HEAD), (5, 5, 2)),
    "transposed": Case((layer("conv_transpose", features=3, kernel=2, stride=2), *HEAD), (4, 4, 2)),
    "norms": Case(
        (
            layer("conv", features=4, kernel=1),
            layer("group_norm", groups=2),
            layer("layer_norm"),
            *HEAD,
        ),
        (4, 4, 2),
    ),
    "tokens": Case(
        (
            layer("embedding", vocabulary=7, features=8),
            layer("position_embedding"),
            layer("self_attention", heads=2),
            layer("layer_norm"),
            layer("first_token"),
            layer("dense", features=3),
        ),
        (6, 1, 1),
        tokens=True,
    ),
    "decoder": Case(
        (
            layer("embedding", vocabulary=7, features=8),
            layer("rms_norm"),
            layer(
                "self_attention",
                heads=4,
                key_heads=2,
                causal=True,
                query_key_norm=True,
                rotary={},
                bias=False,
            ),
            layer("gated_mlp", hidden=6),
            layer("mixture_of_experts", experts=3, hidden=4, balance=0, capacity_factor=1),
            layer("first_token"),
            layer("dense", features=3),
        ),
        (6, 1, 1),
        tokens=True,
    ),
    "images as tokens": Case(
        (
            layer("tokens"),
            layer("class_token"),
            layer("dense", features=5),
            layer("conv1d", features=4, kernel=3),
            layer("lstm", features=3, output="last"),
        ),
        (3, 2, 2),
    ),
}


def sum_by_network(case: Case, clip: float, mask: Any, labels: Any) -> tuple[Any, Any, Any]:
    """The clipped sum, the number of samples within the clip, and each gradient by vmap."""
    module, variables, images = case.build()

    def compute_losses(params: Any, images: Any, labels: Any) -> Any:
        logits = module.apply({"params": params}, images, train=True)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.reshape(len(logits), -1), labels
        )

    def compute_clipped(params: Any, images: Any) -> tuple[Any, Any]:
        def add(params: Any) -> tuple[Any, None]:
            return jnp.where(mask, compute_losses(params, images, labels), 0).sum(), None

        _, _, captures = grad_observing_layers(add, params, all_modules=True)
        return sum_clipped(captures, params, mask, jnp.float32(clip))

    def differentiate(params: Any, image: Any, label: Any) -> Any:
        return jax.grad(lambda p: compute_losses(p, image[None], label[None])[0])(params)

    params = variables["params"]
    compile_ = lambda f: jax.jit(f, compiler_options=QUICK)  # noqa: E731
    clipped, within = compile_(compute_clipped)(params, images)
    each = compile_(jax.vmap(differentiate, (None, 0, 0)))(params, images, labels)
    return clipped, within, each


GOLDEN = Path(__file__).parents[2] / "golden" / "clipped_sums.npz"
GOLDEN_LAYERS = {
    "images": (
        layer("conv", features=4, kernel=3, padding="valid", bias=True),
        layer("tanh"),
        layer("conv", features=24, kernel=2, padding="valid"),
        layer("layer_norm"),
        layer("flatten"),
        layer("dense", features=3),
    ),
    "tokens": (
        layer("embedding", vocabulary=7, features=5),
        layer("dense", features=6),
        layer("tanh"),
        layer("flatten"),
        layer("dense", features=3),
    ),
}
SAMPLE_SHAPES = {"images": (5, 5, 2), "tokens": (4, 1, 1)}

MASK = np.array([True, True, False, True, True])
LABELS = np.array([0, 2, 1, 1, 0])


PLAIN = ("dense", "dense without bias", "conv", "transposed", "norms", "tokens")


@pytest.mark.medium
@pytest.mark.parametrize("name", mark_slow_except(PLAIN, CASES))
def test_clipped_sums_match_per_sample_gradients(name: str) -> None:
    every, _, each = sum_by_network(CASES[name], 1e9, MASK, LABELS)
    flat = np.concatenate([np.reshape(leaf, (SAMPLES, -1)) for leaf in jax.tree.leaves(each)], 1)
    norms = np.linalg.norm(flat, axis=1)
    clip = float(np.sort(norms)[1:3].mean())
    clipped, within, _ = sum_by_network(CASES[name], clip, MASK, LABELS)
    weights = np.where(MASK, np.minimum(1, clip / norms), 0)
    assert within == (norms[MASK] <= clip).sum()
    require_weighted_sum(every, each, MASK.astype(float))
    require_weighted_sum(clipped, each, weights)


def require_weighted_sum(clipped: Any, each: Any, weights: np.ndarray) -> None:
    sums = flatten_dict(clipped)
    gradients = flatten_dict(each)
    assert sums.keys() == gradients.keys()
    for path, leaf in gradients.items():
        expected = np.tensordot(weights, np.asarray(leaf), 1)
        np.testing.assert_allclose(sums[path], expected, rtol=2e-4, atol=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize("name", GOLDEN_LAYERS)
def test_clipped_sums_match_golden_values(name: str) -> None:
    """Within 1e-6 of jax-privacy's, and without a clip within 1e-6 of the largest value."""
    with np.load(GOLDEN) as file:
        arrays = {key.removeprefix(f"{name}/"): file[key] for key in file if key.startswith(name)}
    params = unflatten_dict(select_arrays(arrays, "params/"), sep="/")
    module = network(*GOLDEN_LAYERS[name])
    samples = arrays["samples"].reshape(len(arrays["samples"]), *SAMPLE_SHAPES[name])

    def add(params: Any) -> tuple[Any, None]:
        logits = module.apply({"params": params}, samples.astype(np.float32), train=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, arrays["labels"])
        return losses.sum(), None

    @partial(jax.jit, compiler_options=QUICK)
    def compute_clipped(params: Any, clip: Any) -> Any:
        _, _, captures = grad_observing_layers(add, params, all_modules=True)
        return sum_clipped(captures, params, np.ones(len(samples), bool), clip)[0]

    for position, clip in enumerate(arrays["clips"]):
        sums = flatten_dict(compute_clipped(params, jnp.float32(clip)), sep="/")
        expected = select_arrays(arrays, f"sums/{position}/")
        assert sums.keys() == expected.keys()
        largest = max(float(np.abs(value).max()) for value in expected.values())
        tolerance = 1e-6 * max(1.0, largest)
        for path, value in expected.items():
            np.testing.assert_allclose(sums[path], value, rtol=0, atol=tolerance, err_msg=path)


def select_arrays(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): arrays[key] for key in arrays if key.startswith(prefix)}


@pytest.mark.medium
def test_non_finite_samples_are_left_out() -> None:
    """Planted mistake: a gradient that isn't finite left unclipped."""
    case = CASES["conv"]
    module, variables, images = case.build()
    images[1] = np.inf
    images[3, 0, 0, 0] = np.nan

    def add(params: Any) -> tuple[Any, None]:
        logits = module.apply({"params": params}, images, train=True)
        return jnp.square(logits).sum(), None

    params = variables["params"]
    _, _, captures = grad_observing_layers(add, params, all_modules=True)
    clipped, _ = sum_clipped(captures, params, np.ones(SAMPLES, bool), jnp.float32(0.5))
    finite = np.array([True, False, True, False, True])
    expected, _ = sum_clipped(captures, params, finite, jnp.float32(0.5))
    jax.tree.map(np.testing.assert_array_equal, clipped, expected)
    total = np.linalg.norm([np.linalg.norm(leaf) for leaf in jax.tree.leaves(clipped)])
    assert 0 < total <= 3 * 0.5 + 1e-5


@pytest.mark.medium
def test_frozen_parameters_are_excluded_from_the_norm() -> None:
    module, variables, images = CASES["conv"].build()

    def add(params: Any) -> tuple[Any, None]:
        logits = module.apply({"params": {**variables["params"], **params}}, images, train=True)
        return jnp.square(logits).sum(), None

    trained = {"dense_0": variables["params"]["dense_0"]}
    _, _, captures = grad_observing_layers(add, trained, all_modules=True)
    clipped, _ = sum_clipped(captures, trained, np.ones(SAMPLES, bool), jnp.float32(1e9))
    expected = jax.grad(lambda params: add(params)[0])(trained)
    assert flatten_dict(clipped).keys() == flatten_dict(expected).keys()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), clipped, expected)


@pytest.mark.medium
def test_nesting_layer_is_refused() -> None:
    tied = layer("tied_embedding", vocabulary=7, features=4, body=(layer("layer_norm"),))
    module, variables, images = Case((tied,), (3, 1, 1), tokens=True).build()

    def add(params: Any) -> tuple[Any, None]:
        return module.apply({"params": params}, images, train=True).sum(), None

    params = variables["params"]
    _, _, captures = grad_observing_layers(add, params, all_modules=True)
    with pytest.raises(RecipeError, match="tied_embedding_0/table can't be separated by sample"):
        sum_clipped(captures, params, np.ones(SAMPLES, bool), jnp.float32(1))


@pytest.mark.medium
def test_draws_are_standard_normal() -> None:
    values = np.asarray(draw(KEY, 5, 1, 200_000), np.float64)
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert np.abs(values).max() > 4
    neighbours = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(neighbours) < 0.01


@pytest.mark.medium
def test_draws_differ_by_step_parameter_and_key() -> None:
    """Noise differs for each step and parameter, and doesn't depend on the number of draws."""
    first = np.asarray(draw(KEY, 5, 1, 64))
    for key, step, number in ((KEY, 6, 1), (KEY, 5, 2), (KEY + jnp.uint32(1), 5, 1)):
        assert (np.asarray(draw(key, step, number, 64)) != first).all()
    np.testing.assert_array_equal(draw(KEY, 5, 1, 16), first[:16])
    # The words of the order of samples don't decide noise.
    np.testing.assert_array_equal(draw(KEY.at[2:].set(9), 5, 1, 64), first)


@pytest.mark.medium
def test_noise_has_the_deviation_of_the_rule() -> None:
    """Planted mistake: noise off."""
    rule = PrivacyRule(expected_batch_size=10, clip=0.5)
    privacy = PrivacyState(KEY, jnp.float32(2.0), jnp.float32(0.5))
    sums = {"a": jnp.full((40_000,), 3.0), "b": jnp.zeros((200, 200))}
    noisy = jax.jit(lambda: add_noise(rule, privacy, jnp.int32(3), sums))()
    assert float(noisy["a"].mean()) == pytest.approx(0.3, abs=3e-3)
    for leaf in noisy.values():
        assert float(leaf.std()) == pytest.approx(2.0 * 0.5 / 10, rel=0.02)
    assert abs(np.corrcoef(noisy["a"], noisy["b"].ravel())[0, 1]) < 0.02


@pytest.mark.medium
def test_clip_adapts_to_the_share_within_it() -> None:
    rule = PrivacyRule(1_000_000, 1.0, AdaptiveClip(quantile=0.5, rate=0.2))
    privacy = PrivacyState(KEY, jnp.float32(1.0), jnp.float32(1.0))
    for within, sign in ((900_000, -1), (100_000, 1)):
        after = adapt_clip(rule, privacy, jnp.int32(0), jnp.float32(within), jnp.int32(1_000_000))
        noise = 0.05 * float(draw(KEY, 0, 0, 1)[0])
        assert float(jnp.log(after.clip)) == pytest.approx(0.2 * (0.4 * sign - noise), rel=1e-3)
    fixed = PrivacyRule(10, 1.0)
    assert adapt_clip(fixed, privacy, jnp.int32(0), jnp.float32(1), jnp.int32(2)) is privacy


def test_noise_increases_to_pay_for_the_noisy_count() -> None:
    noise = split_noise(1.1, 50.0)
    assert noise > 1.1
    assert noise**-2 + (2 * 50.0) ** -2 == pytest.approx(1.1**-2)
    with pytest.raises(ValueError, match=r"noise = 3: must be below 2 with an adaptive clip"):
        split_noise(3.0, 1.0)


@pytest.mark.parametrize("noise", [0.1, 1.0, 1 / 3, 7.7])
def test_noise_is_rounded_up(noise: float) -> None:
    rounded = round_up_to_float32(noise)
    assert np.float32(rounded) == rounded
    assert noise <= rounded < noise * (1 + 1e-6)
