"""Functions with lowerings agree with themselves, and keep what they are made of."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import Array, lax

from pipeline.models.imported.with_lowerings import list_unreplaced, with_lowerings
from pipeline.models.lowerings.candidates import list_candidates
from pipeline.models.lowerings.problem import DEFAULTS, Lowering, Problem, RecordingPolicy
from tests.models.build import QUICK, draw_variables

Loss = Callable[[Any, Array], Array]


@dataclass(frozen=True)
class LastCandidate:
    """A policy that never chooses the default: each problem's last formula by XLA."""

    def choose(self, problem: Problem) -> Lowering:
        return list_candidates(problem, frozenset(("xla",)))[-1]


def random(*shape: int, seed: int = 0) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


class Only(nn.Module):
    """A module that applies a function of a compact module."""

    body: Callable[[Array], Array]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return self.body(x)


def draw_weights(module: nn.Module, x: Array) -> Any:
    return draw_variables(jax.eval_shape(module.init, jax.random.key(0), x))


LAYERS: dict[str, tuple[Callable[[Array], Array], tuple[int, ...]]] = {
    "same": (lambda x: nn.Conv(5, (3, 3))(x), (2, 7, 8, 3)),
    "valid": (lambda x: nn.Conv(5, (3, 2), padding="VALID")(x), (2, 7, 8, 3)),
    "explicit": (lambda x: nn.Conv(5, (3, 3), padding=((2, 0), (1, 3)))(x), (2, 7, 8, 3)),
    "circular": (lambda x: nn.Conv(5, (3, 3), padding="CIRCULAR")(x), (2, 7, 8, 3)),
    "strided": (lambda x: nn.Conv(5, (3, 3), (2, 3))(x), (2, 9, 8, 3)),
    "dilated": (lambda x: nn.Conv(5, (3, 3), kernel_dilation=2)(x), (2, 9, 8, 3)),
    "grouped": (lambda x: nn.Conv(6, (3, 3), feature_group_count=3)(x), (2, 7, 8, 6)),
    "depthwise": (lambda x: nn.Conv(6, (3, 3), feature_group_count=6)(x), (2, 7, 8, 6)),
    "pointwise": (lambda x: nn.Conv(6, (1, 1))(x), (2, 7, 8, 3)),
    "transposed": (lambda x: nn.ConvTranspose(5, (3, 3), (2, 2))(x), (2, 4, 5, 3)),
    "transposed, valid": (
        lambda x: nn.ConvTranspose(5, (4, 4), (2, 2), padding="VALID")(x),
        (2, 4, 5, 3),
    ),
    "sequence": (lambda x: nn.Conv(5, (3,), (2,))(x), (2, 9, 3)),
    "dense": (lambda x: nn.Dense(4)(x), (6, 5)),
    "wide dense": (lambda x: nn.Dense(150)(x), (6, 5)),
    "dense on tokens": (lambda x: nn.Dense(4)(x), (2, 3, 5)),
    "dense over two axes": (lambda x: nn.DenseGeneral((4, 3), axis=(-2, -1))(x), (2, 3, 5)),
    "max pool": (lambda x: nn.max_pool(nn.Dense(3)(x), (2, 2), (2, 2)), (2, 8, 8, 3)),
    "overlapping max pool": (
        lambda x: nn.max_pool(nn.Dense(3)(x), (3, 3), (2, 2), padding="SAME"),
        (2, 9, 8, 3),
    ),
    "avg pool": (lambda x: nn.avg_pool(nn.Conv(3, (3, 3))(x), (2, 2), (2, 2)), (2, 8, 8, 3)),
    "attention": (lambda x: nn.MultiHeadDotProductAttention(2)(x), (2, 5, 6)),
    "checkpointed": (lambda x: nn.remat(nn.Conv)(4, (3, 3))(x), (2, 7, 8, 3)),
    "jitted": (lambda x: nn.jit(nn.Conv)(4, (3, 3))(x), (2, 7, 8, 3)),
}


def lax_convolution(numbers: tuple[str, str, str], **how: Any) -> Callable[[Array, Array], Array]:
    def convolve(kernel: Array, images: Array) -> Array:
        given = {"window_strides": (2, 1), "padding": ((1, 1), (0, 2)), **how}
        return lax.conv_general_dilated(images, kernel, dimension_numbers=numbers, **given)

    return convolve


def scanned(kernel: Array, images: Array) -> Array:
    convolve = lax_convolution(("NHWC", "HWIO", "NHWC"), window_strides=(1, 1), padding="SAME")
    return lax.scan(lambda x, _: (jnp.tanh(convolve(kernel, x)), x.mean()), images, length=3)[0]


def branching(kernel: Array, images: Array) -> Array:
    convolve = lax_convolution(("NHWC", "HWIO", "NHWC"))
    return lax.cond(
        images.sum() > 0, lambda x: convolve(kernel, x), lambda x: -2 * convolve(kernel, x), images
    )


FUNCTIONS: dict[str, tuple[Callable[[Array, Array], Array], tuple[int, ...], tuple[int, ...]]] = {
    "NCHW": (lax_convolution(("NCHW", "OIHW", "NCHW")), (5, 3, 3, 3), (2, 3, 7, 8)),
    "mixed": (lax_convolution(("NHWC", "OIHW", "NCHW")), (5, 3, 3, 3), (2, 7, 8, 3)),
    "scan": (scanned, (3, 3, 3, 3), (2, 7, 8, 3)),
    "cond": (branching, (3, 3, 3, 5), (2, 7, 8, 3)),
    "matrix product": (lambda kernel, x: jnp.tanh(x) @ kernel, (5, 4), (6, 5)),
    "NCHW pooling": (
        lambda kernel, x: lax.reduce_window(
            x * kernel, -jnp.inf, lax.max, (1, 1, 3, 2), (1, 1, 2, 2), "SAME"
        ),
        (3, 1, 1),
        (2, 3, 7, 8),
    ),
}


def weighed(function: Callable[[Any, Array], Array]) -> Loss:
    """A sum in which every result weighs differently."""

    def loss(weights: Any, x: Array) -> Array:
        y = function(weights, x)
        return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum()

    return loss


def assert_agrees(function: Callable[[Any, Array], Array], weights: Any, x: Array) -> None:
    """Results and gradients with lowerings are those without; one program computes all."""
    losses = [weighed(function)] + [
        weighed(with_lowerings(function, policy)) for policy in (DEFAULTS, LastCandidate())
    ]
    gradients = [jax.value_and_grad(loss, argnums=(0, 1)) for loss in losses]
    compute = jax.jit(lambda *operands: [f(*operands) for f in gradients], compiler_options=QUICK)
    plain, *lowered = compute(weights, x)
    for ours in lowered:
        for own, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
            scale = max(1.0, float(np.abs(expected).max()))
            np.testing.assert_allclose(own, expected, rtol=1e-5, atol=3e-5 * scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_flax_layers_match_with_lowerings(name: str) -> None:
    body, shape = LAYERS[name]
    module, x = Only(body), random(*shape)
    weights = draw_weights(module, x)
    assert_agrees(module.apply, weights, x)
    recording = RecordingPolicy()
    jax.eval_shape(with_lowerings(module.apply, recording), weights, x)
    assert recording.problems, "something was lowered"
    assert list_unreplaced(jax.make_jaxpr(module.apply)(weights, x)) == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_jax_functions_match_with_lowerings(name: str) -> None:
    function, kernel, images = FUNCTIONS[name]
    assert_agrees(function, random(*kernel, seed=1), random(*images))
    recording = RecordingPolicy()
    jax.eval_shape(with_lowerings(function, recording), random(*kernel), random(*images))
    assert recording.problems


@pytest.mark.medium
def test_mixed_function_matches_with_lowerings() -> None:
    function, kernel, images = FUNCTIONS["mixed"]
    assert_agrees(function, random(*kernel, seed=1), random(*images))


@pytest.mark.medium
def test_negative_pads_crop_the_images() -> None:
    # XLA:CPU itself reads beyond the images here, so that the images are cropped by hand.
    numbers = ("NHWC", "HWIO", "NHWC")
    function = lax_convolution(numbers, padding=((-1, 2), (0, -1)))
    on_cropped = lax_convolution(numbers, padding=((0, 2), (0, 0)))
    kernel, images = random(3, 3, 3, 5, seed=1), random(2, 7, 8, 3)
    lowered = jax.jit(with_lowerings(function, DEFAULTS))(kernel, images)
    np.testing.assert_allclose(
        lowered, on_cropped(kernel, images[:, 1:, :-1]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.medium
def test_while_loop_matches_with_lowerings() -> None:
    def doubled(kernel: Array, x: Array) -> Array:
        return lax.while_loop(lambda y: y.sum() < 100.0, lambda y: y @ kernel, x)

    kernel, x = 2.0 * jnp.eye(3), jnp.ones((2, 3))
    ours = jax.jit(with_lowerings(doubled, DEFAULTS))(kernel, x)
    np.testing.assert_array_equal(ours, doubled(kernel, x))


@pytest.mark.medium
def test_custom_derivative_is_preserved() -> None:
    @jax.custom_vjp
    def product(x: Array, kernel: Array) -> Array:
        return x @ kernel

    product.defvjp(lambda x, k: (x @ k, (x, k)), lambda kept, g: (7.0 * kept[0], 5.0 * kept[1]))
    x, kernel = random(4, 3), random(3, 2)
    lowered = with_lowerings(product, LastCandidate())
    by_x, by_kernel = jax.grad(lambda x, k: lowered(x, k).sum(), argnums=(0, 1))(x, kernel)
    np.testing.assert_array_equal(by_x, 7.0 * x)
    np.testing.assert_array_equal(by_kernel, 5.0 * kernel)


def test_scopes_are_layer_paths_below_the_root() -> None:
    class Root(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            return nn.Dense(2, name="head")(
                nn.relu(nn.Conv(4, (3, 3), name="stem")(x)).mean((1, 2))
            )

    module, x = Root(), random(2, 6, 6, 1)
    weights = draw_weights(module, x)

    def applied(weights: Any, x: Array) -> Any:
        with jax.named_scope("Outer"):
            return module.apply(weights, x)

    def scopes_of(function: Callable[..., Any]) -> set[str]:
        traced = jax.make_jaxpr(function)(weights, x)
        return {str(equation.source_info.name_stack) for equation in traced.eqns}

    expected = {"Outer", "Outer/stem", "Outer/head"}
    assert scopes_of(with_lowerings(applied, DEFAULTS, "Outer/Root")) == expected
    assert scopes_of(with_lowerings(module.apply, DEFAULTS, "Root")) == {
        scope.replace("Outer", "Root") for scope in expected
    }


def test_transformed_scopes_are_preserved() -> None:
    module, x = Only(lambda x: nn.relu(nn.Dense(3, name="head")(x))), random(4, 2)
    weights = draw_weights(module, x)

    def scopes_of(function: Callable[..., Any]) -> set[str]:
        traced = jax.make_jaxpr(jax.grad(lambda w: function(w, x).sum()))(weights)
        return {str(equation.source_info.name_stack) for equation in traced.eqns}

    assert scopes_of(module.apply) <= scopes_of(with_lowerings(module.apply, DEFAULTS))


class Kept3D(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        return nn.Conv(2, (3, 3, 3), name="volume")(x)


def precise(kernel: Array, x: Array) -> Array:
    convolve = lax_convolution(("NHWC", "HWIO", "NHWC"), precision=lax.Precision.HIGHEST)
    with jax.named_scope("stem"):
        return convolve(kernel, x)


def wide_result(kernel: Array, x: Array) -> Array:
    wide = partial(lax_convolution, ("NHWC", "HWIO", "NHWC"), preferred_element_type=jnp.float32)
    return wide()(kernel.astype(jnp.bfloat16), x.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("function", "shapes", "said"),
    [
        (precise, ((3, 3, 3, 5), (2, 7, 8, 3)), "stem: convolution asks for precision HIGHEST"),
        (
            wide_result,
            ((3, 3, 3, 5), (2, 7, 8, 3)),
            "a function: convolution gives float32 for bfloat16",
        ),
        (
            lambda _, x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2, 2), (1, 1, 1), "SAME"),
            ((1,), (4, 4, 4)),
            "a function: max pooling is not over height and width",
        ),
    ],
)
def test_unreplaced_operations_are_reported_with_the_reason(
    function: Any, shapes: tuple[tuple[int, ...], ...], said: str
) -> None:
    weights, x = (random(*shape) for shape in shapes)
    (kept,) = list_unreplaced(jax.make_jaxpr(function)(weights, x))
    assert re.sub(r"Precision\.", "", str(kept)) == said
    lowered = jax.jit(with_lowerings(function, LastCandidate()))(weights, x)
    np.testing.assert_array_equal(lowered, jax.jit(function)(weights, x))


def test_convolution_in_3d_is_not_replaced() -> None:
    module, x = Kept3D(), random(2, 4, 5, 6, 1)
    weights = draw_weights(module, x)
    (kept,) = list_unreplaced(jax.make_jaxpr(module.apply)(weights, x), root="Kept3D")
    assert (str(kept), kept.is_convolution) == ("volume: convolution is 3-D", True)
