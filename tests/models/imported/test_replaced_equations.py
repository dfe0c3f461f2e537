"""Gradients in a differentiated function are recognised, and computed as lowerings do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import Array, lax

from pipeline.models.imported.replaced_equations import explain_no_lowering
from pipeline.models.imported.with_lowerings import list_unreplaced, with_lowerings
from pipeline.models.lowerings.problem import (
    DEFAULTS,
    ROLES,
    ConvolutionProblem,
    Layout,
    LoweringPolicy,
    RecordingPolicy,
    make_window,
)
from tests.models.build import QUICK
from tests.models.imported.test_with_lowerings import (
    FUNCTIONS,
    LAYERS,
    LastCandidate,
    Only,
    draw_weights,
    lax_convolution,
    random,
    weighed,
)

Function = Callable[[Any, Array], Array]

NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
TOLERANCES = {"float32": 3e-5, "bfloat16": 3e-2}
"""By type, of the largest value."""


def differentiated(function: Function) -> Callable[[Any, Array], Any]:
    """A loss and both of its gradients."""
    return jax.value_and_grad(weighed(function), argnums=(0, 1))


def roles(function: Callable[..., Any], *arguments: Any) -> Counter[str]:
    """The problems of a differentiated function, by kind and role."""
    recording = RecordingPolicy()
    jax.eval_shape(with_lowerings(function, recording, differentiated=True), *arguments)
    return Counter(f"{problem.kind} {problem.role}" for problem in recording.problems)


def assert_equal(ours: Any, expected: Any) -> None:
    for actual, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert actual.dtype == other.dtype
        wide = np.asarray(other, np.float64)
        limit = TOLERANCES[str(other.dtype)] * max(1.0, float(np.abs(wide).max()))
        np.testing.assert_allclose(np.asarray(actual, np.float64), wide, rtol=0, atol=limit)


def assert_agrees(gradients: Callable[[Any, Array], Any], weights: Any, x: Array) -> None:
    """Values are those without lowerings, by the defaults, by other formulas and in CHWN.

    One program computes all.
    """
    settings: tuple[tuple[LoweringPolicy, Layout], ...] = (
        (DEFAULTS, "nhwc"),
        (LastCandidate(), "nhwc"),
        (DEFAULTS, "chwn"),
    )
    functions = [gradients] + [
        with_lowerings(gradients, policy, differentiated=True, layout=layout)
        for policy, layout in settings
    ]
    compute = jax.jit(lambda *operands: [f(*operands) for f in functions], compiler_options=QUICK)
    plain, *lowered = compute(weights, x)
    for ours in lowered:
        assert_equal(ours, plain)


OF_RANDOM_WINDOWS = {
    *("valid", "explicit", "strided", "dilated", "grouped", "depthwise", "pointwise"),
    "overlapping max pool",
}
"""Layers that the tests of random convolutions and random max pooling have."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LAYERS.keys() - OF_RANDOM_WINDOWS))
def test_gradients_of_flax_layers_match_jax(name: str) -> None:
    body, shape = LAYERS[name]
    module, x = Only(body), random(*shape)
    weights = draw_weights(module, x)
    gradients = differentiated(module.apply)
    assert_agrees(gradients, weights, x)
    counted = roles(gradients, weights, x)
    assert all(counted[f"{kind} {ROLES[0]}"] for kind in {key.split()[0] for key in counted})
    assert any(key.endswith(ROLES[1]) for key in counted), counted
    assert list_unreplaced(jax.make_jaxpr(gradients)(weights, x), differentiated=True) == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_jax_functions_match_jax(name: str) -> None:
    function, kernel, images = FUNCTIONS[name]
    gradients, weights, x = differentiated(function), random(*kernel, seed=1), random(*images)
    assert_agrees(gradients, weights, x)
    counted = roles(gradients, weights, x)
    assert any(key.endswith(ROLES[1]) for key in counted), counted


def exact_convolution(images: Array, kernel: Array, how: dict[str, Any]) -> Array:
    """The convolution of images that are padded and cropped before, all in NHWC.

    So its gradients have no negative pads, which XLA:CPU doesn't compute rightly.
    """
    (height, width), groups = how["sizes"], how["groups"]
    window = make_window(
        (height, width), kernel.shape[:2], how["strides"], how["padding"], how["dilation"], groups
    )
    padded = jnp.pad(images, ((0, 0), *window.pads, (0, 0)))
    stops = [axis.last_offset + axis.dilated_extent + 1 for axis in (window.rows, window.columns)]
    return lax.conv_general_dilated(
        padded[:, : stops[0], : stops[1]],
        kernel,
        how["strides"],
        "VALID",
        rhs_dilation=how["dilation"],
        dimension_numbers=NHWC,
        feature_group_count=groups,
    )


pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
edges = st.tuples(st.integers(0, 3), st.integers(0, 3))
paddings = st.one_of(st.sampled_from(["SAME", "VALID"]), st.tuples(edges, edges))


@pytest.mark.slow
@settings(max_examples=45)
@given(
    numbers=st.sampled_from([NHWC, NCHW, ("NHWC", "OIHW", "NCHW")]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    batch=st.integers(1, 3),
    sizes=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    groups=st.sampled_from([1, 1, 2, 3]),
    strides=pairs,
    dilation=pairs,
    padding=paddings,
    chosen=st.booleans(),
    layout=st.sampled_from(["nhwc", "chwn"]),
)
def test_gradients_of_random_convolutions_match_jax(
    numbers: tuple[str, str, str],
    dtype: str,
    batch: int,
    sizes: tuple[int, int],
    kernel: tuple[int, int],
    channels: tuple[int, int],
    groups: int,
    strides: tuple[int, int],
    dilation: tuple[int, int],
    padding: Any,
    chosen: bool,
    layout: Layout,
) -> None:
    window = make_window(sizes, kernel, strides, padding, dilation, groups)
    assume(min(window.output_size) > 0)
    draw = np.random.default_rng(0)
    images = draw.normal(size=(batch, *sizes, groups * channels[0]))
    weights = draw.normal(size=(*kernel, channels[0], groups * channels[1]))
    weights, images = (jnp.asarray(array, dtype) for array in (weights, images))
    how = {"sizes": sizes, "padding": padding, "strides": strides, "dilation": dilation}

    def axes(to: str, letters: str) -> list[int]:
        return [letters.index(letter) for letter in to]

    def convolve(weights: Array, images: Array) -> Array:
        result = lax.conv_general_dilated(
            images.transpose(axes(numbers[0], "NHWC")),
            weights.transpose(axes(numbers[1], "HWIO")),
            strides,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=numbers,
            feature_group_count=groups,
        )
        return result.transpose(axes("NHWC", numbers[2]))

    gradients = differentiated(convolve)
    assert set(roles(gradients, weights, images)) == {f"conv2d {role}" for role in ROLES}
    assert list_unreplaced(jax.make_jaxpr(gradients)(weights, images), differentiated=True) == ()
    policy = LastCandidate() if chosen else DEFAULTS
    ours = with_lowerings(gradients, policy, differentiated=True, layout=layout)
    wide = (weights.astype(jnp.float32), images.astype(jnp.float32))
    exact = differentiated(lambda w, x: exact_convolution(x, w, {**how, "groups": groups}))
    if dtype == "bfloat16":
        # Weighed in bfloat16, too, and summed in float32 as XLA does.
        exact = differentiated(
            lambda w, x: exact_convolution(x, w, {**how, "groups": groups}).astype(dtype)
        )
    (_, expected), (_, actual) = jax.jit(
        lambda wide, narrow: (exact(*wide), ours(*narrow)), compiler_options=QUICK
    )(wide, (weights, images))
    assert_equal(actual, jax.tree.map(lambda array: array.astype(dtype), expected))


@pytest.mark.medium
def test_gradients_are_recognised_for_any_pads_and_dilation() -> None:
    for how in ({}, {"padding": "SAME"}, {"padding": "VALID"}, {"rhs_dilation": (2, 1)}):
        for numbers, kernel, images in (
            (NHWC, (3, 3, 3, 5), (2, 7, 8, 3)),
            (NCHW, (5, 3, 3, 3), (2, 3, 7, 8)),
        ):
            gradients = differentiated(lax_convolution(numbers, **how))
            counted = roles(gradients, random(*kernel, seed=1), random(*images))
            assert counted == {f"conv2d {role}": 1 for role in ROLES}, (how, numbers)


@pytest.mark.slow
def test_gradients_of_grouped_large_kernels_match_jax() -> None:
    how = {"padding": ((3, 4), (2, 5)), "window_strides": (2, 1), "feature_group_count": 2}
    gradients = differentiated(lax_convolution(NHWC, **how))
    weights, images = random(6, 5, 2, 6, seed=1), random(1, 4, 4, 4)
    assert_agrees(gradients, weights, images)
    assert set(roles(gradients, weights, images)) == {f"conv2d {role}" for role in ROLES}


@pytest.mark.slow
@settings(max_examples=15)
@given(
    channels_first=st.booleans(),
    sizes=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    window=pairs,
    strides=pairs,
    padding=st.sampled_from(["SAME", "VALID", ((0, 0), (0, 0))]),
)
def test_gradients_of_random_max_pooling_match_jax(
    channels_first: bool,
    sizes: tuple[int, int],
    window: tuple[int, int],
    strides: tuple[int, int],
    padding: Any,
) -> None:
    def spread(pair: Any, still: Any) -> Any:
        return (still, still, *pair) if channels_first else (still, *pair, still)

    def pool(weights: Array, x: Array) -> Array:
        pads = padding if isinstance(padding, str) else spread(padding, (0, 0))
        return lax.reduce_window(
            weights * x, -jnp.inf, lax.max, spread(window, 1), spread(strides, 1), pads
        )

    assume(window != (1, 1))
    shape = (2, 3, *sizes) if channels_first else (2, *sizes, 3)
    gradients, x = differentiated(pool), random(*shape)
    assert set(roles(gradients, x, x)) == {f"max_pool {role}" for role in ROLES[:2]}
    assert_agrees(gradients, random(*shape, seed=1), x)


@pytest.mark.medium
def test_gradient_of_flax_max_pool_matches_jax() -> None:
    def pool(weights: Array, x: Array) -> Array:
        return nn.max_pool(weights * x, (3, 2), (2, 2), padding="SAME")

    gradients, x = differentiated(pool), random(2, 7, 6, 3)
    assert roles(gradients, x, x) == {"max_pool forward": 1, "max_pool input_grad": 1}
    assert_agrees(gradients, random(2, 7, 6, 3, seed=1), x)


@pytest.mark.medium
def test_gradients_of_products_match_jax() -> None:
    for kernel, rows in (((5, 4), (6, 5)), ((5, 150), (6, 5)), ((5, 4), (2, 3, 5))):
        gradients = differentiated(lambda kernel, x: x @ kernel)
        weights, x = random(*kernel, seed=1), random(*rows)
        assert roles(gradients, weights, x) == {f"dense {role}": 1 for role in ROLES}
        assert_agrees(gradients, weights, x)


def net(weights: dict[str, Array], x: Array) -> Array:
    x = nn.relu(lax_convolution(NHWC, window_strides=(1, 1), padding="SAME")(weights["first"], x))
    x = nn.max_pool(x, (2, 2), (2, 2))
    x = jnp.tanh(lax_convolution(NHWC)(weights["second"], x))
    return x.reshape(len(x), -1) @ weights["dense"]


NET = {"first": (3, 3, 2, 4), "second": (3, 3, 4, 4), "dense": (32, 3)}


def net_operands() -> tuple[dict[str, Array], Array]:
    weights = {name: 0.2 * random(*shape, seed=7) for name, shape in NET.items()}
    return weights, random(2, 9, 9, 2)


WRAPPED: dict[str, Callable[[Function], Function]] = {
    "checkpoint": jax.checkpoint,
    "jit of jit": lambda function: jax.jit(lambda w, x: 2.0 * jax.jit(function)(w, x)),
    "scan": lambda function: (
        lambda w, x: lax.scan(
            lambda total, _: (total + function(w, total.sum() + x), None), function(w, x), length=2
        )[0]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
def test_gradients_in_calls_and_loops_match_jax(name: str) -> None:
    weights, x = net_operands()
    gradients = differentiated(WRAPPED[name](net))
    assert roles(gradients, weights, x) == roles(differentiated(net), weights, x)
    assert_agrees(gradients, weights, x)


@pytest.mark.medium
def test_gradient_problems_match_the_lowered_forward_pass() -> None:
    weights, x = net_operands()
    before, after = RecordingPolicy(), RecordingPolicy()
    jax.eval_shape(jax.grad(weighed(with_lowerings(net, before)), argnums=(0, 1)), weights, x)
    jax.eval_shape(with_lowerings(differentiated(net), after, differentiated=True), weights, x)
    assert set(before.problems) == set(after.problems)
    assert len(after.problems) == 3 * 3 + 2


@pytest.mark.medium
def test_gradients_have_the_pads_of_the_forward_convolution() -> None:
    # Pads of 1 after the images, which strides of 2 don't reach: the gradients don't show them.
    convolve = lax_convolution(NHWC, window_strides=(2, 2), padding=((1, 1), (1, 1)))
    recording = RecordingPolicy()
    lowered = with_lowerings(differentiated(convolve), recording, differentiated=True)
    jax.eval_shape(lowered, random(3, 3, 3, 5), random(2, 8, 8, 3))
    problems = [p for p in recording.problems if isinstance(p, ConvolutionProblem)]
    assert [p.window.pads for p in problems] == [((1, 1), (1, 1))] * 3


def second_derivative(weights: Array, x: Array) -> Array:
    """A loss of gradients, as of a gradient penalty."""
    convolve = lax_convolution(NHWC, window_strides=(2, 1), padding="SAME")

    def loss(x: Array) -> Array:
        return jnp.tanh(convolve(weights, x)).sum()

    return jax.grad(loss)(x)


@pytest.mark.slow
def test_second_derivatives_match_jax() -> None:
    gradients = differentiated(second_derivative)
    assert_agrees(gradients, random(3, 3, 3, 5, seed=1), random(2, 7, 8, 3))


@pytest.mark.slow
def test_per_sample_gradients_match_jax() -> None:
    def of_samples(weights: Any, x: Array) -> Any:
        single = differentiated(lambda weights, image: net(weights, image[None]))
        return jax.vmap(single, (None, 0))(weights, x)

    assert_agrees(of_samples, *net_operands())


def test_gradients_of_unreplaced_convolutions_are_unreplaced() -> None:
    precise = lax_convolution(NHWC, precision=lax.Precision.HIGHEST)
    gradients, operands = differentiated(precise), (random(3, 3, 3, 5), random(2, 7, 8, 3))
    assert roles(gradients, *operands) == {}
    assert len(list_unreplaced(jax.make_jaxpr(gradients)(*operands), differentiated=True)) == 2
    ours = with_lowerings(gradients, LastCandidate(), differentiated=True)
    plain = jax.jit(gradients)(*operands)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(ours)(*operands), plain)


@pytest.mark.medium
def test_function_without_gradient_needs_the_forward_role_only() -> None:
    assert roles(net, *net_operands()) == {
        "conv2d forward": 2,
        "max_pool forward": 1,
        "dense forward": 1,
    }


def test_dtypes_of_all_operands_are_named() -> None:
    kernel, x = jnp.ones((5, 4), jnp.bfloat16), jnp.ones((3, 5))
    contracted = (((1,), (0,)), ((), ()))
    jaxpr = jax.make_jaxpr(lambda k, x: lax.dot_general(x, k, contracted))(kernel, x)
    (equation,) = jaxpr.eqns
    assert explain_no_lowering(equation) == "gives float32 for float32 and bfloat16"
